# SPDX-License-Identifier: Apache-2.0
"""One answer of the model as it comes: token ids -> bytes -> parse events, one token at a time.

Taking the tokens singly makes what is counted (which tokens an item has, how many were reasoning)
a function of the ids alone; neighbouring deltas of tokens that came together become one event.
Does not know: the engine's protocol, SSE, sessions.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from sessions.token_codec import encode_ids
from tools_schema import events as parsed
from tools_schema.call_reader import WholePart
from tools_schema.stream_parser import StreamParser

_new_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """What of an answer goes into the history.

    num_sampled: how many of the ids are the sampled ones, from the start. The rest was encoded
        anew: the head of a token that a cut went through, what closes the calls of a cut answer,
        or another end of turn.
    is_closed: they end with the model's end-of-turn token.
    """

    token_ids: bytes
    num_sampled: int
    is_closed: bool


@dataclass(slots=True)
class AnswerReader:
    """Reads one answer. `parser` None: everything is text.

    shown_control: control tokens that the parser reads; the others leave no bytes.
    closing_ids: ends of turn that stand in a history as another token, or (None) not at all.
    """

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    parser: StreamParser | None = None
    stop_strings: Sequence[str] = ()
    shown_control: frozenset[int] = frozenset()
    closing_ids: Mapping[int, int | None] = field(default_factory=dict)
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    has_calls: bool = False
    has_truncated_call: bool = False
    num_reasoning: int = 0  # tokens that brought reasoning
    _decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _new_decoder("replace"))
    _detokenizer: Detokenizer | None = None
    _is_in_text: bool = False  # the last event was text

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(
            self.tokenizer, self.stop_strings, shown_control=self.shown_control
        )

    @property
    def is_stopped(self) -> bool:
        """A stop string has matched; no further token is taken."""
        return self._text_source.stop is not None

    @property
    def stop_string(self) -> str | None:
        stop = self._text_source.stop
        return None if stop is None else stop.stop_string

    def push(self, token_id: int) -> list[parsed.Event]:
        """Take one sampled token."""
        self.token_ids.append(token_id)
        data = self._text_source.push_bytes(token_id)
        if not data:
            return []
        events = self._parse(data)
        for event in events:
            if isinstance(event, parsed.ReasoningDelta):
                self.num_reasoning += 1
                break
        return events

    def take(self, token_ids: Sequence[int]) -> list[tuple[parsed.Event, int]]:
        """Take tokens that came together, up to a stop string.

        Returns their events, neighbouring deltas of one kind as one, each with how many tokens the
        answer had when it began.
        """
        text = self._text_of(token_ids) if self._is_in_text and len(token_ids) > 1 else None
        if text is not None:
            self.token_ids.extend(token_ids)
            return [(event, len(self.token_ids)) for event in text]
        taken: list[tuple[parsed.Event, int]] = []
        run: list[parsed.Event] = []
        begun = 0
        for token_id in token_ids:
            if self._text_source.stop is not None:
                break
            for event in self.push(token_id):
                if run and not (isinstance(event, parsed.DELTAS) and type(event) is type(run[0])):
                    taken.append((parsed.joined(run), begun))
                    run = []
                if not run:
                    begun = len(self.token_ids)
                run.append(event)
        if run:
            taken.append((parsed.joined(run), begun))
            self._is_in_text = isinstance(run[0], parsed.TextDelta)
        return taken

    def _text_of(self, token_ids: Sequence[int]) -> list[parsed.Event] | None:
        """The events of tokens that only go on with a text, read at once; None: they may do more.

        There is nothing to count of each of them: the text has begun, and goes on.
        """
        data = self._text_source.plain_bytes(token_ids)
        if data is None or self.parser is None or not self.parser.is_text(data):
            return None
        return self.parser.feed(data)

    def finish(self, *, is_cut: bool) -> list[parsed.Event]:
        """No more tokens come. `is_cut`: not because the model was done."""
        rest = b"" if self.is_stopped else self._text_source.flush_bytes()
        if self.parser is None:
            text = self._decoder.decode(rest, True)
            return [parsed.TextDelta(text)] if text else []
        return self._parse(rest) + self._note(self.parser.finish("length" if is_cut else "stop"))

    def kept(self, *, text_only: bool = False) -> KeptTokens:
        """Return the tokens of the whole items in this answer.

        An answer loses the call it was cut in, and what it had begun of a marker; with `text_only`
        it loses all its calls.
        """
        if self.parser is not None:
            part = self.parser.before_calls if text_only else None
            part = part or self.parser.whole_part
            if part is not None:
                return self._kept_part(part)
        stop = self._text_source.stop
        if stop is not None:
            return self._kept_head(stop.num_tokens_kept, stop.tail_text)
        return self._kept_all()

    @property
    def _text_source(self) -> Detokenizer:
        assert self._detokenizer is not None
        return self._detokenizer

    def _parse(self, data: bytes) -> list[parsed.Event]:
        if self.parser is None:
            text = self._decoder.decode(data)
            return [parsed.TextDelta(text)] if text else []
        events = self.parser.feed(data)
        return self._note(events) if events else events

    def _note(self, events: list[parsed.Event]) -> list[parsed.Event]:
        for event in events:
            if isinstance(event, parsed.DELTAS):
                continue
            if isinstance(event, parsed.ToolCallEnd):
                self.has_calls = True
            elif isinstance(event, parsed.ParseProblem) and event.code == "truncated_call":
                self.has_truncated_call = True
        return events

    def _kept_all(self) -> KeptTokens:
        last = self.token_ids[-1] if self.token_ids else -1
        if last not in self.closing_ids:
            return KeptTokens(
                token_ids=encode_ids(self.token_ids),
                num_sampled=len(self.token_ids),
                is_closed=last in self.eos_ids,
            )
        end_id, head = self.closing_ids[last], self.token_ids[:-1]
        return KeptTokens(
            token_ids=encode_ids(head) + (b"" if end_id is None else encode_ids([end_id])),
            num_sampled=len(head),
            is_closed=end_id is not None,
        )

    def _kept_part(self, part: WholePart) -> KeptTokens:
        """The tokens of the first bytes, and those that close what they left open."""
        num_tokens = num_bytes = 0
        tail = b""
        for token_id in self.token_ids:
            spelled = self._bytes_of(token_id)
            if num_bytes + len(spelled) > part.num_bytes:
                tail = spelled[: part.num_bytes - num_bytes]
                break
            num_bytes += len(spelled)
            num_tokens += 1
        return self._kept_head(num_tokens, tail.decode("utf-8", "replace"), part.closing)

    def _kept_head(self, num_tokens: int, tail_text: str, closing: str = "") -> KeptTokens:
        tail = self.tokenizer.encode(tail_text) if tail_text else []
        tail += self.tokenizer.encode_with_control(closing) if closing else []
        return KeptTokens(
            token_ids=encode_ids(self.token_ids[:num_tokens]) + encode_ids(tail),
            num_sampled=num_tokens,
            is_closed=False,
        )

    def _bytes_of(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id, with_control=token_id in self.shown_control)
