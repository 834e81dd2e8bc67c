# SPDX-License-Identifier: Apache-2.0
"""Owns reading the calls behind one marker: a lone one, a section of them, a list.

Does not know: text, reasoning, what becomes of bytes that are no call (`stream_parser`). Keeps the
count of a turn's calls, and what of the turn is whole should it be cut here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools_schema.byte_source import END, ByteSource, Wait
from tools_schema.call_parsers import parse_call
from tools_schema.channels import ProseChannel
from tools_schema.events import Event, ToolCallEnd
from tools_schema.formats.base import HeaderBody, ToolFormat
from tools_schema.json_scan import EndOfStreamError
from tools_schema.open_call import NotACallError, OpenCall
from tools_schema.param_parser import expect
from tools_schema.tool_spec import ToolSet

_BRACE, _BRACKET, _CLOSE_BRACKET, _COMMA = b"{[],"


@dataclass(frozen=True, slots=True)
class WholePart:
    """What of a turn is whole: its first `num_bytes`, and then `closing` to end its calls."""

    num_bytes: int
    closing: str = ""


class CallReader:
    """The readers raise `NotACallError`, `EndOfStreamError`; `call` is then the one they were in.

    Args:
        names: the calls that may be; any other is none.
        text: where the turn's text goes: whitespace in front of a call is layout.
    """

    def __init__(
        self,
        source: ByteSource,
        tool_format: ToolFormat,
        toolset: ToolSet,
        names: frozenset[str],
        text: ProseChannel,
        emit: Callable[[Event], None],
        new_call_id: Callable[[], str],
    ) -> None:
        self._source = source
        self._format = tool_format
        self._toolset = toolset
        self._names = names
        self._text = text
        self._emit = emit
        self._new_call_id = new_call_id
        self._used_ids: set[str] = set()
        self._closers = ""  # what follows the last call of the part that is being read
        self.call: OpenCall | None = None
        self.num_started = 0
        self.num_ended = 0
        self.before_calls: WholePart | None = None
        self.whole = WholePart(0)

    def note_before_calls(self, num_read: int) -> None:
        """A call begins `num_read` bytes behind the read position."""
        if not self.num_ended:
            num_layout = num_read + self._text.num_blanks
            self.whole = self.before_calls = WholePart(self._source.position - num_layout)

    def reader_behind(self, marker: str) -> Callable[[], Wait[None]]:
        """What to run behind one of the format's markers."""
        fmt = self._format
        if fmt.section_begin and marker == fmt.open_marker:
            return self._read_list if fmt.calls_as_list else self._read_section
        rest = "" if marker == fmt.also_call_begin else fmt.call_begin.strip()[len(marker) :]
        return lambda: self._read_lone(rest)

    def read_one(self) -> Wait[None]:
        """The inside of a call. From its start on, what was held is no text any more."""
        self.call = OpenCall(
            self.num_started, self._names, self._emit_call, self._new_call_id, self._used_ids
        )
        yield from parse_call(self._source, self._format, self._toolset, self.call)
        self._source.mark()
        self._note_whole(self._closers)

    def _emit_call(self, event: Event) -> None:
        if self.call is not None and self.call.index == self.num_started:
            self.num_started += 1
            self._text.drop_layout()
        if isinstance(event, ToolCallEnd):
            self.num_ended += 1
            body = self._format.body
            # Tagged parameters end with their call's end marker, JSON in front of it.
            is_tagged = isinstance(body, HeaderBody) and body.params is not None
            self._note_whole(
                self._closers if is_tagged else self._format.call_end.rstrip() + self._closers
            )
        self._emit(event)

    def _note_whole(self, closing: str) -> None:
        """All up to the read position is whole, once `closing` stands behind it."""
        self.whole = WholePart(self._source.position, closing)

    def _read_lone(self, rest_of_begin: str) -> Wait[None]:
        self._closers = ""
        yield from expect(self._source, rest_of_begin)
        yield from self.read_one()

    def _read_section(self) -> Wait[None]:
        fmt = self._format
        self._closers = fmt.call_end[len(fmt.call_end.rstrip()) :] + fmt.section_end
        while not (yield from self._source.match_loosely(fmt.section_end)):
            if self._source.was_cut:
                self._source.skip_rest()
                raise EndOfStreamError
            yield from self._source.match_loosely(fmt.separator)
            yield from expect(self._source, fmt.call_begin)
            yield from self.read_one()
        self._source.mark()
        self._note_whole("")

    def _read_list(self) -> Wait[None]:
        self._closers = self._format.section_end
        byte = yield from self._source.skip_blanks()
        if byte == _BRACE:  # one call, not in a list
            yield from self.read_one()
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
            yield from self.read_one()
            byte = yield from self._source.skip_blanks()
            if byte == _COMMA:
                self._source.skip()
                byte = yield from self._source.skip_blanks()
                if byte == _CLOSE_BRACKET:
                    raise NotACallError("a call was due after the comma")
        self._source.skip()
        if self.num_ended:
            self._note_whole(self._format.section_end)
