# SPDX-License-Identifier: Apache-2.0
"""Owns reading one turn of a model: reasoning, text and tool calls, from bytes as they come.

Does not know: tokens, dialects, which family it reads (that is data, a `ToolFormat`). The
concatenation of what it says never depends on how the bytes were cut. A suffix that may become a
marker is held back until that is decided; what turns out to be no call goes out as text, so no
byte is lost. Whitespace next to a call or to reasoning is the format's layout and is dropped.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from tools_schema.byte_source import END, ByteSource, MarkerSet, Wait
from tools_schema.call_parsers import parse_call
from tools_schema.channels import ProseChannel
from tools_schema.events import (
    Event,
    ParseProblem,
    ReasoningDelta,
    TextDelta,
    ToolCallArgs,
    ToolCallEnd,
)
from tools_schema.formats.base import HeaderBody, ToolFormat
from tools_schema.json_scan import EndOfStreamError
from tools_schema.open_call import NotACallError, OpenCall
from tools_schema.param_parser import expect
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSet

_BRACE, _BRACKET, _CLOSE_BRACKET, _COMMA = b"{[],"
_ID_CHARS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
CALL_PREFIX = "call_"


# So much of a marker is no accident: a turn cut behind it was cut in a call, not in its text.
SURE_MARKER_BYTES = 4


@dataclass(frozen=True, slots=True)
class WholePart:
    """What of a turn is whole: its first `num_bytes`, and then `closing` to end its calls."""

    num_bytes: int
    closing: str = ""


def new_call_id(prefix: str = CALL_PREFIX) -> str:
    """The prefix and 24 random characters."""
    return prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(24))


class StreamParser:
    """Feed bytes, get events. One parser per turn; after `finish` it takes no more.

    Args:
        choice: kind `none` switches the calls off: all markup is text.
        reasoning_open: the rendered prompt ended inside open reasoning. Say what the prompt
            says, never what the request asked for.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        toolset: ToolSet,
        choice: ToolChoice,
        *,
        reasoning_open: bool = False,
        call_id_factory: Callable[[], str] = new_call_id,
    ) -> None:
        self._format = tool_format
        self._toolset = toolset
        self._names = frozenset(choice.names) if choice.kind != "none" else frozenset()
        self._must_call = choice.is_forced
        self._reasoning_open = reasoning_open
        self._new_call_id = call_id_factory
        self._events: list[Event] = []
        self._num_started = 0
        self._num_ended = 0
        self._used_ids: set[str] = set()
        self._call: OpenCall | None = None
        self._closers = ""  # what follows the last call of the part that is being read
        self._cut_short = False
        self._is_half = False  # something at the end is neither text nor a whole call
        self._before_calls: WholePart | None = None
        self._whole = WholePart(0)
        self._source = ByteSource()
        self._text = ProseChannel(lambda text: self._emit(TextDelta(text)))
        self._run = self._read_turn()
        self._is_done = False

    @property
    def num_calls(self) -> int:
        """Calls that have started."""
        return self._num_started

    @property
    def before_calls(self) -> WholePart | None:
        """The turn up to its first call, without the layout between; None if none was begun."""
        return self._before_calls

    @property
    def whole_part(self) -> WholePart | None:
        """After `finish`: what to keep of a turn that was cut short; None: all of it, as it is."""
        is_open = self._num_ended > 0 and self._whole != WholePart(self._source.position)
        return self._whole if self._is_half or (self._cut_short and is_open) else None

    def feed(self, data: bytes) -> list[Event]:
        """What these bytes decided."""
        if not self._source.pass_on(data):
            self._source.push(data)
            return self._advance()
        events, self._events = self._events, []
        return events

    def is_text(self, data: bytes) -> bool:
        """Whether these bytes, fed now, go on with the text, whatever follows them."""
        return self._source.would_pass_on(data, self._text.write)

    def finish(self, reason: str = "stop") -> list[Event]:
        """The stream has ended: everything that was held back.

        Args:
            reason: `stop` where the model ended the turn itself; anything else (`length`,
                `aborted`, ...) cut it short: a call that had only begun is then dropped from the
                text, and reported as `truncated_call`.
        """
        self._cut_short = reason != "stop"
        self._source.end()
        return self._advance()

    def _advance(self) -> list[Event]:
        if not self._is_done:
            try:
                next(self._run)
            except StopIteration:
                self._is_done = True
        events, self._events = self._events, []
        return events

    def _emit(self, event: Event) -> None:
        """Neighbouring deltas of one kind become one event."""
        last = self._events[-1] if self._events else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            self._events[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            self._events[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolCallArgs) and isinstance(last, ToolCallArgs):
            self._events[-1] = ToolCallArgs(event.index, last.delta + event.delta)
        else:
            self._events.append(event)

    # -- the turn --------------------------------------------------------------------------

    def _read_turn(self) -> Wait[None]:
        yield from self._read_reasoning()
        if not self._names:
            yield from self._read_prose()
        elif self._format.is_bare:
            yield from self._read_bare_calls()
        else:
            yield from self._read_text_and_calls()
        self._text.close()

    def _read_reasoning(self) -> Wait[None]:
        tags = self._format.reasoning
        if tags is None:
            return
        self._source.mark()
        if not self._reasoning_open:
            yield from self._source.skip_blanks()
            if not (yield from self._source.match(tags.begin.strip().encode())):
                self._text.write(self._source.since_mark())
                return
        yield from self._read_thought(tags.end)

    def _read_thought(self, end: str) -> Wait[None]:
        reasoning = ProseChannel(lambda text: self._emit(ReasoningDelta(text)), skip_leading=True)
        markers = MarkerSet((end.strip(),))
        if (yield from self._source.until(markers, reasoning.write, keeps=False)) is None:
            reasoning.close()
            return
        reasoning.drop_layout()
        self._text.drop_layout()

    def _read_prose(self) -> Wait[None]:
        """Calls are switched off: only what parts the messages of a turn is no text."""
        markers = MarkerSet(self._layout_markers())
        sink = self._text.write
        while (yield from self._source.until(markers, sink, keeps=False)) is not None:
            self._source.mark()

    def _layout_markers(self) -> tuple[str, ...]:
        fmt = self._format
        begins = (fmt.text_begin, fmt.preamble[0] if fmt.preamble else "", *fmt.dropped)
        return tuple(marker.strip() for marker in begins if marker.strip())

    def _read_text_and_calls(self) -> Wait[None]:
        fmt = self._format
        openers = (fmt.open_marker, fmt.call_marker, fmt.also_call_begin)
        thought = fmt.reasoning.begin if fmt.reasoning and fmt.reasoning_anywhere else ""
        markers = MarkerSet((*openers, thought, *self._layout_markers()))
        sink = self._text.write
        while True:
            found = yield from self._source.until(markers, sink, flushes=False, keeps=False)
            if found is None:
                break
            self._source.mark(back=len(found))
            marker = found.decode()
            if marker == thought and fmt.reasoning is not None:
                yield from self._read_thought(fmt.reasoning.end)
            elif marker in openers:
                self._note_before_calls(len(found))
                yield from self._read_calls(self._reader_behind(marker))
        self._end_text(openers)

    def _note_before_calls(self, num_read: int) -> None:
        """A call begins `num_read` bytes behind the read position."""
        if not self._num_ended:
            num_layout = num_read + self._text.num_blanks
            self._whole = self._before_calls = WholePart(self._source.position - num_layout)

    def _end_text(self, openers: tuple[str, ...]) -> None:
        """What was held back at the end: text, or a turn that was cut inside a marker."""
        self._source.mark()
        held = self._source.rest()
        if not (held and self._cut_short and self._is_half_marker(held)):
            self._source.skip_rest()
            self._text.write(held)
            return
        self._is_half = True
        self._note_before_calls(0)
        self._source.skip_rest()
        self._text.drop_layout()
        shown = held.decode("utf-8", "replace")
        if any(opener.startswith(shown) for opener in openers):
            message = "generation ended inside the marker of a call"
            self._emit(ParseProblem("truncated_call", message, None, shown))

    def _is_half_marker(self, held: bytes) -> bool:
        """Whether these bytes, which begin a marker, are sure to be one, or must be."""
        was_due = self._must_call and not self._num_started
        return was_due or self._num_ended > 0 or len(held) >= SURE_MARKER_BYTES

    def _reader_behind(self, marker: str) -> Callable[[], Wait[None]]:
        fmt = self._format
        if fmt.section_begin and marker == fmt.open_marker:
            return self._read_list if fmt.calls_as_list else self._read_section
        rest = "" if marker == fmt.also_call_begin else fmt.call_begin.strip()[len(marker) :]
        return lambda: self._read_lone_call(rest)

    def _read_calls(self, read: Callable[[], Wait[None]]) -> Wait[None]:
        """Run one of the readers below; what it could not read becomes text or a problem."""
        try:
            yield from read()
        except (NotACallError, EndOfStreamError) as problem:
            self._give_up(problem)
        self._call = None

    def _give_up(self, problem: NotACallError | EndOfStreamError) -> None:
        is_cut = isinstance(problem, EndOfStreamError)
        code = "truncated_call" if is_cut else getattr(problem, "code", "malformed_call")
        message = "generation ended inside a call" if is_cut else str(problem)
        if is_cut:
            self._source.skip_rest()  # what was held back is of the call, too
        raw = self._source.since_mark()
        self._source.mark()
        call = self._call
        shown = raw.decode("utf-8", "replace")
        if call is not None and call.has_started and not call.has_ended:
            self._is_half |= is_cut
            self._emit(ParseProblem(code, message, call.index, shown))
            return
        if is_cut and call is not None and call.has_ended:
            return  # only the closing markers are missing
        if self._format.is_bare and not (is_cut and self._cut_short and self._is_sure_call(raw)):
            self._write_as_text(raw)  # an answer in JSON, as likely as not
            return
        if is_cut and self._cut_short:
            self._is_half = True
            self._text.drop_layout()
        else:
            self._write_as_text(raw)
        self._emit(ParseProblem(code, message, None, shown))

    def _write_as_text(self, raw: bytes) -> None:
        if not self._num_ended:
            self._before_calls = None
        self._text.write(raw)

    def _is_sure_call(self, raw: bytes) -> bool:
        """Whether a bare call was cut: one was due, or it begins like nothing else."""
        if self._must_call or self._num_ended:
            return True
        begin = self._format.bare_begin.encode()
        shown = raw.strip()[: len(begin)]
        return len(shown) >= SURE_MARKER_BYTES and begin.startswith(shown)

    # -- readers: each starts right after the marker that called it ------------------------

    def _read_one(self) -> Wait[None]:
        """The inside of a call. From its start on, what was held is no text any more."""
        self._call = OpenCall(
            self._num_started, self._names, self._emit_call, self._new_call_id, self._used_ids
        )
        yield from parse_call(self._source, self._format, self._toolset, self._call)
        self._source.mark()
        self._note_whole(self._closers)

    def _note_whole(self, closing: str) -> None:
        """All up to the read position is whole, once `closing` stands behind it."""
        self._whole = WholePart(self._source.position, closing)

    def _emit_call(self, event: Event) -> None:
        call = self._call
        if call is not None and call.index == self._num_started:
            self._num_started += 1
            self._text.drop_layout()
        if isinstance(event, ToolCallEnd):
            self._num_ended += 1
            body = self._format.body
            # Tagged parameters end with their call's end marker, JSON in front of it.
            is_tagged = isinstance(body, HeaderBody) and body.params is not None
            self._note_whole(
                self._closers if is_tagged else self._format.call_end.rstrip() + self._closers
            )
        self._emit(event)

    def _read_lone_call(self, rest_of_begin: str) -> Wait[None]:
        self._closers = ""
        yield from expect(self._source, rest_of_begin)
        yield from self._read_one()

    def _read_section(self) -> Wait[None]:
        fmt = self._format
        self._closers = fmt.call_end[len(fmt.call_end.rstrip()) :] + fmt.section_end
        while not (yield from self._source.match_loosely(fmt.section_end)):
            if self._source.was_cut:
                self._source.skip_rest()
                raise EndOfStreamError
            yield from self._source.match_loosely(fmt.separator)
            yield from expect(self._source, fmt.call_begin)
            yield from self._read_one()
        self._source.mark()
        self._note_whole("")

    def _read_list(self) -> Wait[None]:
        self._closers = self._format.section_end
        byte = yield from self._source.skip_blanks()
        if byte == _BRACE:  # one call, not in a list
            yield from self._read_one()
        elif byte == _BRACKET:
            self._source.skip()
            self._closers = "]" + self._closers
            yield from self._read_elements()
        elif byte == END:
            raise EndOfStreamError
        else:
            raise NotACallError("a list of calls was due")
        if self._format.section_end:
            yield from expect(self._source, self._format.section_end)
        self._text.drop_layout()
        self._source.mark()
        self._note_whole("")

    def _read_elements(self) -> Wait[None]:
        byte = yield from self._source.skip_blanks()
        while byte != _CLOSE_BRACKET:
            if byte == END:
                raise EndOfStreamError
            yield from self._read_one()
            byte = yield from self._source.skip_blanks()
            if byte == _COMMA:
                self._source.skip()
                byte = yield from self._source.skip_blanks()
                if byte == _CLOSE_BRACKET:
                    raise NotACallError("a call was due after the comma")
        self._source.skip()
        if self._num_ended:
            self._note_whole(self._format.section_end)

    def _read_bare_calls(self) -> Wait[None]:
        """Calls are the whole message: the first byte that begins none makes the rest text."""
        fmt = self._format
        separator = fmt.separator.strip()
        while True:
            self._source.mark()
            if self._num_started and separator:
                yield from self._source.match_loosely(separator)
            if fmt.optional_prefix:
                yield from self._source.match_loosely(fmt.optional_prefix)
            if (yield from self._source.skip_blanks()) != _BRACE:
                break
            num_started = self._num_started
            self._note_before_calls(len(self._source.since_mark()))
            yield from self._read_calls(self._read_one)
            if self._num_started == num_started:
                break
        if not (self._num_ended and self._cut_short):  # else cut between two calls
            self._text.write(self._source.since_mark())
        self._source.mark()
        yield from self._source.until(MarkerSet(()), self._text.write, keeps=False)
