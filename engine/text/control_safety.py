# SPDX-License-Identifier: Apache-2.0
"""Keeps text of a client from reading as control tokens once a template has placed it.

Before rendering, a sentinel character that occurs nowhere is put inside every stretch of client
text that spells (or, at its ends, begins or ends to spell) an added token. After rendering, the
text splits at the tokens that are still whole: the template's own. Then the sentinels go.
Does not know: templates, token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.text.tokenizer import pattern_of

# Noncharacters: no blank, no letter, never in interchanged text; then a private-use tail.
_SENTINELS = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xE100))]


def choose_sentinel(strings: Iterable[str]) -> str:
    """A character that none of these strings holds."""
    used = set().union(*map(set, strings)) if strings else set()
    for sentinel in _SENTINELS:
        if sentinel not in used:
            return sentinel
    # Every candidate occurs: any character that does not will do.
    return next(chr(c) for c in range(0x100000, 0x10FFFE) if chr(c) not in used)


def strings_in(value: Any) -> Iterable[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


class Literal(str):
    """Text of ours inside a message: what it spells may become a control token."""

    __slots__ = ()


class TextParts(tuple[str, ...]):
    """The text of a message in parts: `Literal` ones, and those of clients and models."""

    __slots__ = ()


class Neutraliser:
    """Breaks up the texts of one set of tokens."""

    def __init__(self, token_texts: Iterable[str]) -> None:
        texts = [text for text in token_texts if len(text) > 1]
        self._whole = pattern_of(texts)
        # A client string that ends with the head of a token text, or begins with the tail of
        # one, could become that token beside a literal of the template.
        self._heads = _by_edge({text[:size] for text in texts for size in range(1, len(text))}, -1)
        self._tails = _by_edge({text[size:] for text in texts for size in range(1, len(text))}, 0)

    def apply(self, value: Any, sentinel: str) -> Any:
        """The same JSON-like value with sentinels in its strings and keys."""
        if isinstance(value, str):
            return self._text(value, sentinel)
        if isinstance(value, Mapping):
            return {
                self.apply(key, sentinel): self.apply(item, sentinel) for key, item in value.items()
            }
        if isinstance(value, TextParts):
            parts = (p if isinstance(p, Literal) else self._text(p, sentinel) for p in value)
            return "".join(parts)
        if isinstance(value, list | tuple):
            return [self.apply(item, sentinel) for item in value]
        return value

    def _text(self, text: str, sentinel: str) -> str:
        while self._whole.search(text):  # breaking one up may bare another inside it
            text = self._whole.sub(lambda m: m[0][0] + sentinel + m[0][1:], text)
        body = text.rstrip()  # templates trim; the sentinel goes beside what a trim leaves
        if body.endswith(self._heads.get(body[-1:], ())):
            text = body + sentinel + text[len(body) :]
        body = text.lstrip()
        if body.startswith(self._tails.get(body[:1], ())):
            text = text[: len(text) - len(body)] + sentinel + body
        return text


def _by_edge(texts: Iterable[str], edge: int) -> dict[str, tuple[str, ...]]:
    """These texts by their first (0) or last (-1) character: few are left to compare with."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[edge], []).append(text)
    return {char: tuple(group) for char, group in groups.items()}
