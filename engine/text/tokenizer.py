# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, with control tokens kept apart from text.

A *control token* (<|im_end|>) steers the model and is never text. A *markup token* (<tool_call>)
is one token the model may write as text. `encode` yields neither, whatever the text says:
the tokenizer behind it does not hold them. `encode_with_control` is for template literals.
Does not know: files, chat templates, models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as BpeTokenizer

from engine.text.byte_alphabet import CHAR_OF_BYTE, bytes_of_spelling
from engine.text.errors import TokenizerError

LONG_TEXT_CHARS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token outside the BPE vocabulary. A control token unless `is_markup`."""

    token_id: int
    text: str
    is_markup: bool = False
    eats_space_before: bool = False
    eats_space_after: bool = False


class Tokenizer:
    """Byte-level BPE.

    Args:
        plain: the BPE model alone: no added tokens, no post-processor.
        added: control and markup tokens.
        vocab_size: rows of the model's output; ids at or above the last token are holes.
        bos_id: prepended by `encode_prompt` where the model wants it; else None.
    """

    def __init__(
        self,
        plain: BpeTokenizer,
        added: Sequence[AddedToken],
        *,
        vocab_size: int,
        bos_id: int | None = None,
    ) -> None:
        self._plain = plain
        self._added = {token.text: token for token in added}
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.control_ids = frozenset(t.token_id for t in added if not t.is_markup)
        self.markup_ids = frozenset(t.token_id for t in added if t.is_markup)
        self._bytes = _spell_vocabulary(plain.get_vocab(), added, vocab_size)
        self._max_token_bytes = max(map(len, self._bytes), default=1)
        self._added_pattern = pattern_of(self._added)

    @property
    def added_tokens(self) -> Mapping[str, AddedToken]:
        """Control and markup tokens by their text."""
        return self._added

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a control or markup token.

        Lone surrogates become U+FFFD, as UTF-8 has no form for them. A byte the vocabulary
        has no token for (see `missing_bytes`) is left out, as the reference tokenizers do.
        """
        whole = _well_formed(text)
        if len(whole) > LONG_TEXT_CHARS:  # lets other threads run meanwhile; `encode` does not
            return list(self._plain.encode_batch_fast([whole], add_special_tokens=False)[0].ids)
        return list(self._plain.encode(whole, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """`encode`, behind the begin-of-text token where the model was trained with one."""
        ids = self.encode(text)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def encode_with_control(self, text: str, *, drop: str = "") -> list[int]:
        """Ids of trusted text: the text of an added token becomes that token.

        `drop`: a character taken out of every stretch of ordinary text after the split, so
        that a caller can break up what must not be read as an added token.
        """
        pieces = self._added_pattern.split(text)  # text, token, text, token, ..., text
        tokens = [self._added[piece] for piece in pieces[1::2]]
        ids: list[int] = []
        for index, piece in enumerate(pieces[::2]):
            plain = piece.replace(drop, "") if drop else piece
            if index > 0 and tokens[index - 1].eats_space_after:
                plain = plain.lstrip()
            if index < len(tokens) and tokens[index].eats_space_before:
                plain = plain.rstrip()
            if plain:
                ids.extend(self.encode(plain))
            if index < len(tokens):
                ids.append(tokens[index].token_id)
        return ids

    @property
    def max_token_bytes(self) -> int:
        """Bytes of the token that stands for most."""
        return self._max_token_bytes

    def token_id(self, text: str) -> int | None:
        """The id of an added token by its text."""
        token = self._added.get(text)
        return None if token is None else token.token_id

    def token_bytes(self, token_id: int, *, with_control: bool = False) -> bytes:
        """What a token stands for; b"" for a control token unless asked, and for a hole.

        Raises:
            IndexError: the id is outside [0, vocab_size).
        """
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        if not with_control and token_id in self.control_ids:
            return b""
        return self._bytes[token_id]

    def all_token_bytes(self) -> list[bytes]:
        """Bytes per id [vocab_size], control tokens and holes as b"": what a grammar takes."""
        return [b"" if i in self.control_ids else item for i, item in enumerate(self._bytes)]

    def decode_bytes(self, ids: Iterable[int], *, with_control: bool = False) -> bytes:
        """The bytes of a run of tokens. Raises IndexError for an id out of range."""
        return b"".join([self.token_bytes(i, with_control=with_control) for i in ids])

    def decode(self, ids: Iterable[int], *, with_control: bool = False) -> str:
        """Text of a run of tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, with_control=with_control).decode("utf-8", "replace")

    def missing_bytes(self) -> frozenset[int]:
        """Bytes no token can spell (rare control characters, unused UTF-8 lead bytes)."""
        known = self._plain.get_vocab()
        return frozenset(byte for byte, char in CHAR_OF_BYTE.items() if char not in known)


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """One capturing pattern for any of these, the longest first; never matches for none."""
    ordered = sorted(texts, key=len, reverse=True)
    if not ordered:
        return re.compile(r"((?!))")
    return re.compile("(" + "|".join(re.escape(text) for text in ordered) + ")")


def _spell_vocabulary(
    vocabulary: Mapping[str, int], added: Sequence[AddedToken], vocab_size: int
) -> list[bytes]:
    table = [b""] * vocab_size
    for spelling, token_id in vocabulary.items():
        if token_id >= vocab_size:
            raise TokenizerError(
                f"tokenizer: token {spelling!r} has id {token_id}, the model {vocab_size} rows"
            )
        spelled = bytes_of_spelling(spelling)
        if spelled is None:
            raise TokenizerError(
                f"tokenizer: token {token_id} ({spelling!r}) is not byte-level spelling"
            )
        table[token_id] = spelled
    for token in added:
        if token.token_id >= vocab_size:
            raise TokenizerError(
                f"tokenizer: added token {token.text!r} has id {token.token_id}, "
                f"the model {vocab_size} rows"
            )
        table[token.token_id] = token.text.encode("utf-8")
    return table


def _well_formed(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
