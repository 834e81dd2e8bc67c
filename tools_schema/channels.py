# SPDX-License-Identifier: Apache-2.0
"""Owns turning the bytes of one channel (text, reasoning, arguments) into str.

Does not know: formats, markers. A character cut by a chunk waits for its rest; bytes that can
become no character come out as U+FFFD, at the same place however they were cut.
"""

from __future__ import annotations

from collections.abc import Callable
from encodings.utf_8 import IncrementalDecoder

from tools_schema.byte_source import BLANKS


class Utf8Channel:
    """Decodes bytes as they come and hands on what is whole."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._decoder = IncrementalDecoder("replace")

    def write(self, data: bytes) -> None:
        if data.isascii() and not self._decoder.buffer:  # the decoder would cost far more
            self._hand_on(data.decode())
        else:
            self._hand_on(self._decoder.decode(data))

    def close(self) -> None:
        """No more bytes: a character that is still cut is none."""
        self._hand_on(self._decoder.decode(b"", True))
        self._decoder.reset()

    def _hand_on(self, text: str) -> None:
        if text:
            self._emit(text)


class ProseChannel:
    """Text or reasoning: whitespace at its edges may be layout, so it waits until that is known."""

    def __init__(self, emit: Callable[[str], None], *, skip_leading: bool = False) -> None:
        self._channel = Utf8Channel(emit)
        self._blanks = bytearray()
        self._skips = skip_leading

    def write(self, data: bytes) -> None:
        if self._skips:
            data = data.lstrip(BLANKS)
            if not data:
                return
            self._skips = False
        solid = data.rstrip(BLANKS)
        if solid:
            if self._blanks:
                solid_data = bytes(self._blanks) + solid
                self._blanks.clear()
                self._channel.write(solid_data)
            else:
                self._channel.write(solid)
        if len(solid) < len(data):
            self._blanks += data[len(solid) :]

    @property
    def num_blanks(self) -> int:
        """Bytes of whitespace that wait: layout if a marker follows."""
        return len(self._blanks)

    def drop_layout(self) -> None:
        """A marker follows: trailing whitespace was layout, and so is what comes after it."""
        self._blanks.clear()
        self._channel.close()
        self._skips = True

    def close(self) -> None:
        """The end: trailing whitespace was the model's own."""
        if self._blanks:
            self._channel.write(bytes(self._blanks))
            self._blanks.clear()
        self._channel.close()
