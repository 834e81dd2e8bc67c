# SPDX-License-Identifier: Apache-2.0
"""Owns the bytes of one stream and the waiting for more of them.

Does not know: formats, events, JSON. Parsers are generators over a `ByteSource`: they `yield` when
they cannot decide with what is there. A decision depends on bytes and on the end of the stream,
never on where a chunk ended, so a parse cannot depend on chunking.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
Sink = Callable[[bytes], None]

BLANKS = b" \t\r\n"
END = -1
_COMPACT_BYTES = 1 << 16


class ByteSource:
    """A growing buffer with a read position and a mark.

    Bytes since the mark are kept, so that what turns out to be no call can go out as text.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._pos = 0
        self._mark = 0
        self._num_dropped = 0  # bytes that are in the buffer no more
        self._ended = False
        self.was_cut = False  # the last match failed only because the stream ended inside it
        self._until: tuple[MarkerSet, Sink] | None = None  # the search that waits, holding nothing

    # -- the writing side ------------------------------------------------------------------

    def push(self, data: bytes) -> None:
        self._buffer += data

    def would_pass_on(self, data: bytes, sink: Sink) -> bool:
        """Whether `pass_on` would hand all of `data` to `sink`."""
        waiting = self._until
        return waiting is not None and waiting[1] == sink and not waiting[0].may_begin(data)

    def pass_on(self, data: bytes) -> bool:
        """Hand `data` straight to a search that waits, where no marker can begin in it.

        It says the same as `push` and a step of the parser would; False where it cannot.
        """
        if self._until is None or self._until[0].may_begin(data):
            return False
        self._until[1](data)
        self._num_dropped += len(data)
        return True

    def end(self) -> None:
        self._ended = True

    # -- marks -----------------------------------------------------------------------------

    def mark(self, back: int = 0) -> None:
        """Forget what lies more than `back` bytes behind the read position."""
        self._mark = self._pos - back
        if self._mark > _COMPACT_BYTES:
            del self._buffer[: self._mark]
            self._num_dropped += self._mark
            self._pos -= self._mark
            self._mark = 0

    def since_mark(self) -> bytes:
        return bytes(self._buffer[self._mark : self._pos])

    @property
    def position(self) -> int:
        """Bytes of the stream that have been read."""
        return self._num_dropped + self._pos

    # -- the reading side ------------------------------------------------------------------

    def peek(self) -> Wait[int]:
        """The next byte, or END."""
        while self._pos >= len(self._buffer):
            if self._ended:
                return END
            yield
        return self._buffer[self._pos]

    def skip(self, num_bytes: int = 1) -> None:
        self._pos += num_bytes

    def rest(self) -> bytes:
        """All that is there, unread."""
        return bytes(self._buffer[self._pos :])

    def skip_rest(self) -> None:
        """Skip all that is there."""
        self._pos = len(self._buffer)

    def skip_blanks(self) -> Wait[int]:
        """Skip whitespace; the first byte after it, or END."""
        while (byte := (yield from self.peek())) != END and byte in BLANKS:
            self._pos += 1
        return byte

    def match(self, literal: bytes) -> Wait[bool]:
        """Consume `literal` if it comes next; else consume nothing."""
        self.was_cut = False
        while True:
            there = self._buffer[self._pos : self._pos + len(literal)]
            if not literal.startswith(there):
                return False
            if len(there) == len(literal):
                self._pos += len(literal)
                return True
            if self._ended:
                self.was_cut = bool(there)
                return False
            yield

    def match_loosely(self, literal: str) -> Wait[bool]:
        """Consume the lines of `literal`, with any whitespace before each of them."""
        for line in literal.split("\n"):
            text = line.strip().encode()
            if not text:
                continue
            yield from self.skip_blanks()
            if not (yield from self.match(text)):
                return False
        return True

    def take_while(self, allowed: frozenset[int], most: int) -> Wait[bytes]:
        """The longest run of `allowed` bytes, cut at `most`."""
        start = self._pos
        while (yield from self.peek()) in allowed and self._pos - start < most:
            self._pos += 1
        return bytes(self._buffer[start : self._pos])

    def run_to(self, stop: re.Pattern[bytes], sink: Sink) -> Wait[int]:
        """Hand bytes to `sink` up to the first that matches `stop`; that byte, or END."""
        while True:
            found = stop.search(self._buffer, self._pos)
            end = len(self._buffer) if found is None else found.start()
            self._hand_over(end, sink)
            if found is not None:
                return self._buffer[end]
            if self._ended:
                return END
            yield

    def until(
        self, markers: MarkerSet, sink: Sink, *, flushes: bool = True, keeps: bool = True
    ) -> Wait[bytes | None]:
        """Hand bytes to `sink` up to the first marker, consume and return it; None at the end.

        A suffix that may be the beginning of a marker is held back until that is decided; at the
        end of the stream it is handed over too, where `flushes`. Not `keeps`: what is handed over
        is no part of what `since_mark` returns, so that bytes may go straight to the sink.
        """
        while True:
            found = markers.pattern.search(self._buffer, self._pos)
            if found is not None:
                marker = bytes(found.group())
                self._hand_over(found.start(), sink)
                self._pos += len(marker)
                return marker
            held = 0 if self._ended and flushes else markers.held_bytes(self._buffer, self._pos)
            self._hand_over(len(self._buffer) - held, sink)
            if self._ended:
                return None
            if not held and not keeps:
                self._until = (markers, sink)
            yield
            self._until = None

    def _hand_over(self, end: int, sink: Sink) -> None:
        if end > self._pos:
            sink(bytes(self._buffer[self._pos : end]))
            self._pos = end


class MarkerSet:
    """Markers to look for. None may be a part of another: the leftmost is then the only one."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        encoded = [marker.encode() for marker in dict.fromkeys(markers) if marker]
        # No marker at all: a pattern that never matches.
        self.pattern = re.compile(b"|".join(map(re.escape, encoded)) if encoded else b"(?!)")
        self._prefixes = frozenset(m[:n] for m in encoded for n in range(1, len(m)))
        self._longest = max((len(m) - 1 for m in encoded), default=0)
        firsts = b"".join(dict.fromkeys(m[:1] for m in encoded))
        self._first = re.compile(b"[" + re.escape(firsts) + b"]" if firsts else b"(?!)")

    def may_begin(self, data: bytes) -> bool:
        """Whether a marker may begin in `data`."""
        return self._first.search(data) is not None

    def held_bytes(self, buffer: bytearray, start: int) -> int:
        """Length of the longest suffix of `buffer[start:]` that begins a marker."""
        for size in range(min(self._longest, len(buffer) - start), 0, -1):
            if bytes(buffer[-size:]) in self._prefixes:
                return size
        return 0
