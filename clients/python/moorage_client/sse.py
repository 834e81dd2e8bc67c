# SPDX-License-Identifier: Apache-2.0
"""Server-sent events out of bytes, as the WHATWG HTML standard (section 9.2.6) parses them."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

_LINE_END = re.compile("\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event as it was sent."""

    id: str
    event: str
    data: str


@dataclass(slots=True)
class SseParser:
    """Takes bytes in pieces of any size; gives the events that are complete."""

    _rest: str = ""
    _id: str = ""
    _event: str = ""
    _data: list[str] = field(default_factory=list)
    _is_start: bool = True
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def push(self, piece: bytes) -> list[ServerSentEvent]:
        """Events that these bytes complete; none for comments and halves."""
        text = self._rest + self._decoder.decode(piece)
        if self._is_start and text:
            text = text.removeprefix("\ufeff")
            self._is_start = False
        events: list[ServerSentEvent] = []
        start = 0
        for end in _LINE_END.finditer(text):
            if end.group() == "\r" and end.end() == len(text):
                break  # a \n may follow in the next piece
            self._take(text[start : end.start()], events)
            start = end.end()
        self._rest = text[start:]
        return events

    def _take(self, line: str, events: list[ServerSentEvent]) -> None:
        if not line:
            if self._data:
                name = self._event or "message"
                events.append(ServerSentEvent(self._id, name, "\n".join(self._data)))
            self._event, self._data = "", []
            return
        name, _, value = line.partition(":")  # a line that begins with ":" is a comment
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
