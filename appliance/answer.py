# SPDX-License-Identifier: Apache-2.0
"""One answer of the model as it comes: token ids -> text -> parse events, one token at a time.

Taking the tokens singly makes the events a function of the ids alone: an answer that is read
again after a crash yields the same events under the same numbers. Does not know: the engine's
protocol, SSE, sessions.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from sessions.token_codec import encode_ids
from tools_schema import events as parsed
from tools_schema.stream_parser import StreamParser


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """What of an answer goes into the history.

    num_sampled: how many of the ids are the sampled ones, from the start (the rest, at most the
    head of a token that a cut went through, was encoded anew).
    is_closed: they end with the model's end-of-turn token.
    """

    token_ids: bytes
    num_sampled: int
    is_closed: bool


@dataclass(slots=True)
class AnswerReader:
    """Reads one answer. `parser` None: everything is text."""

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    parser: StreamParser | None = None
    stop_strings: Sequence[str] = ()
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    has_calls: bool = False
    has_truncated_call: bool = False
    num_reasoning: int = 0  # tokens that brought reasoning
    _runs: list[list[str]] = field(default_factory=list)
    _last_kind: type | None = None
    _num_at_last_call_end: int = 0
    _detokenizer: Detokenizer | None = None

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, self.stop_strings)

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
        events = self._parse(self._text_source.push((token_id,)))
        self.num_reasoning += any(isinstance(event, parsed.ReasoningDelta) for event in events)
        return events

    def finish(self, *, is_cut: bool) -> list[parsed.Event]:
        """No more tokens come. `is_cut`: not because the model was done."""
        events = [] if self.is_stopped else self._parse(self._text_source.flush())
        if self.parser is not None:
            events += self._note(self.parser.finish("length" if is_cut else "stop"))
        return events

    def kept(self, *, text_only: bool = False) -> KeptTokens:
        """Return the tokens of the whole items in this answer.

        An answer loses the call it was cut in; with `text_only` it loses all its calls.
        """
        if text_only and (self.has_calls or self.has_truncated_call):
            return self._kept_text()
        if self.has_truncated_call:  # by a limit, or by a stop string inside the call
            if self.has_calls:
                return self._kept_head(self._num_at_last_call_end, "")
            return self._kept_text()
        stop = self._text_source.stop
        if stop is not None:
            return self._kept_head(stop.num_tokens_kept, stop.tail_text)
        is_closed = bool(self.token_ids) and self.token_ids[-1] in self.eos_ids
        return KeptTokens(
            token_ids=encode_ids(self.token_ids),
            num_sampled=len(self.token_ids),
            is_closed=is_closed,
        )

    @property
    def _text_source(self) -> Detokenizer:
        assert self._detokenizer is not None
        return self._detokenizer

    def _parse(self, text: str) -> list[parsed.Event]:
        if not text:
            return []
        if self.parser is None:
            return self._note([parsed.TextDelta(text)])
        return self._note(self.parser.feed(text.encode()))

    def _note(self, events: list[parsed.Event]) -> list[parsed.Event]:
        for event in events:
            match event:
                case parsed.TextDelta() | parsed.ReasoningDelta():
                    if not self.has_calls:
                        self._note_run(type(event), event.text)
                case parsed.ToolCallEnd():
                    self.has_calls = True
                    self._num_at_last_call_end = len(self.token_ids)
                case parsed.ParseProblem(code="truncated_call"):
                    self.has_truncated_call = True
        return events

    def _note_run(self, kind: type, text: str) -> None:
        """Remember stretches of text and of reasoning: each occurs verbatim in the raw output."""
        if kind is self._last_kind:
            self._runs[-1].append(text)
        else:
            self._runs.append([text])
            self._last_kind = kind

    def _kept_head(self, num_tokens: int, tail_text: str) -> KeptTokens:
        tail = self.tokenizer.encode(tail_text) if tail_text else []
        return KeptTokens(
            token_ids=encode_ids(self.token_ids[:num_tokens]) + encode_ids(tail),
            num_sampled=num_tokens,
            is_closed=False,
        )

    def _kept_text(self) -> KeptTokens:
        """The tokens up to the end of the text in front of the first call."""
        raw = self.tokenizer.decode_bytes(self.token_ids)
        end = 0
        for run in self._runs:
            spelled = "".join(run).encode()
            at = raw.find(spelled, end)
            if at < 0:  # a character that was no UTF-8 stands for other bytes: keep what is sure
                break
            end = at + len(spelled)
        num_tokens, num_bytes = 0, 0
        for token_id in self.token_ids:
            size = len(self.tokenizer.token_bytes(token_id))
            if num_bytes + size > end:
                break
            num_bytes += size
            num_tokens += 1
        return self._kept_head(num_tokens, raw[num_bytes:end].decode("utf-8", "replace"))
