# SPDX-License-Identifier: Apache-2.0
"""Owns reading one turn of a model: reasoning, text and tool calls, from bytes as they come.

Does not know: tokens, dialects, the inside of calls (`call_reader`), which family it reads (that
is data, a `ToolFormat`). The concatenation of what it says never depends on how the bytes were
cut. A suffix that may become a marker is held back until that is decided; what turns out to be no
call goes out as text, so no byte is lost. Whitespace next to a call or to reasoning is the
format's layout and is dropped.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from tools_schema.byte_source import ByteSource, MarkerSet, Wait
from tools_schema.call_reader import CallReader, WholePart
from tools_schema.channels import ProseChannel
from tools_schema.events import Event, EventBuffer, ParseProblem, ReasoningDelta, TextDelta
from tools_schema.formats.base import ToolFormat
from tools_schema.json_scan import EndOfStreamError
from tools_schema.open_call import NotACallError
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSet

_ID_CHARS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
CALL_PREFIX = "call_"
# So much of a marker is no accident: a turn cut behind it was cut in a call, not in its text.
SURE_MARKER_BYTES = 4


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
        self._names = frozenset(choice.names) if choice.kind != "none" else frozenset()
        self._must_call = choice.is_forced
        self._reasoning_open = reasoning_open
        self._cut_short = False
        self._is_half = False  # something at the end is neither text nor a whole call
        self._events = EventBuffer()
        self._source = ByteSource()
        self._text = ProseChannel(lambda text: self._events.add(TextDelta(text)))
        self._calls = CallReader(
            self._source,
            tool_format,
            toolset,
            self._names,
            self._text,
            self._events.add,
            call_id_factory,
        )
        self._run = self._read_turn()
        self._is_done = False

    @property
    def num_calls(self) -> int:
        """Calls that have started."""
        return self._calls.num_started

    @property
    def before_calls(self) -> WholePart | None:
        """The turn up to its first call, without the layout between; None if none was begun."""
        return self._calls.before_calls

    @property
    def whole_part(self) -> WholePart | None:
        """After `finish`: what to keep of a turn that was cut short; None: all of it, as it is."""
        calls = self._calls
        is_open = calls.num_ended > 0 and calls.whole != WholePart(self._source.position)
        return calls.whole if self._is_half or (self._cut_short and is_open) else None

    def feed(self, data: bytes) -> list[Event]:
        """What these bytes decided."""
        if not self._source.pass_on(data):
            self._source.push(data)
            return self._advance()
        return self._events.take()

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
        return self._events.take()

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
        reasoning = ProseChannel(
            lambda text: self._events.add(ReasoningDelta(text)), skip_leading=True
        )
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
                self._calls.note_before_calls(len(found))
                yield from self._read_calls(self._calls.reader_behind(marker))
        self._end_text(openers)

    def _end_text(self, openers: tuple[str, ...]) -> None:
        """What was held back at the end: text, or a turn that was cut inside a marker."""
        self._source.mark()
        held = self._source.rest()
        if not (held and self._cut_short and self._is_half_marker(held)):
            self._source.skip_rest()
            self._text.write(held)
            return
        self._is_half = True
        self._calls.note_before_calls(0)
        self._source.skip_rest()
        self._text.drop_layout()
        shown = held.decode("utf-8", "replace")
        if any(opener.startswith(shown) for opener in openers):
            message = "generation ended inside the marker of a call"
            self._events.add(ParseProblem("truncated_call", message, None, shown))

    def _is_half_marker(self, held: bytes) -> bool:
        """Whether these bytes, which begin a marker, are sure to be one, or must be."""
        was_due = self._must_call and not self._calls.num_started
        return was_due or self._calls.num_ended > 0 or len(held) >= SURE_MARKER_BYTES

    def _read_calls(self, read: Callable[[], Wait[None]]) -> Wait[None]:
        """Run a reader of calls; what it could not read becomes text or a problem."""
        try:
            yield from read()
        except (NotACallError, EndOfStreamError) as problem:
            self._give_up(problem)
        self._calls.call = None

    def _give_up(self, problem: NotACallError | EndOfStreamError) -> None:
        is_cut = isinstance(problem, EndOfStreamError)
        code = "truncated_call" if is_cut else getattr(problem, "code", "malformed_call")
        message = "generation ended inside a call" if is_cut else str(problem)
        if is_cut:
            self._source.skip_rest()  # what was held back is of the call, too
        raw = self._source.since_mark()
        self._source.mark()
        call = self._calls.call
        shown = raw.decode("utf-8", "replace")
        if call is not None and call.has_started and not call.has_ended:
            self._is_half |= is_cut
            self._events.add(ParseProblem(code, message, call.index, shown))
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
        self._events.add(ParseProblem(code, message, None, shown))

    def _write_as_text(self, raw: bytes) -> None:
        if not self._calls.num_ended:
            self._calls.before_calls = None
        self._text.write(raw)

    def _is_sure_call(self, raw: bytes) -> bool:
        """Whether a bare call was cut: one was due, or it begins like nothing else."""
        if self._must_call or self._calls.num_ended:
            return True
        begin = self._format.bare_begin.encode()
        shown = raw.strip()[: len(begin)]
        return len(shown) >= SURE_MARKER_BYTES and begin.startswith(shown)

    def _read_bare_calls(self) -> Wait[None]:
        """Calls are the whole message: the first byte that begins none makes the rest text."""
        fmt = self._format
        separator = fmt.separator.strip()
        while True:
            self._source.mark()
            if self._calls.num_started and separator:
                yield from self._source.match_loosely(separator)
            if fmt.optional_prefix:
                yield from self._source.match_loosely(fmt.optional_prefix)
            if (yield from self._source.skip_blanks()) != ord("{"):
                break
            num_started = self._calls.num_started
            self._calls.note_before_calls(len(self._source.since_mark()))
            yield from self._read_calls(self._calls.read_one)
            if self._calls.num_started == num_started:
                break
        if not (self._calls.num_ended and self._cut_short):  # else cut between two calls
            self._text.write(self._source.since_mark())
        self._source.mark()
        yield from self._source.until(MarkerSet(()), self._text.write, keeps=False)
