# SPDX-License-Identifier: Apache-2.0
"""Owns finding where a JSON value ends, byte by byte, without changing one of them.

Does not know: tool calls. It follows strings and brackets only: that the finished text is valid
JSON is for whoever parses it.
"""

from __future__ import annotations

import re

from tools_schema.byte_source import END, ByteSource, Sink, Wait

_IN_STRING = re.compile(rb'["\\]')
_OUTSIDE = re.compile(rb'["{}\[\]]')
_AFTER_LITERAL = re.compile(rb"[^-+.0-9A-Za-z]")
_CLOSES = {ord("}"): ord("{"), ord("]"): ord("[")}
_QUOTE = ord('"')


class BadJsonError(Exception):
    """The bytes are no JSON value (never leaves the room)."""


class EndOfStreamError(Exception):
    """The stream ended inside a value (never leaves the room)."""


def scan_value(source: ByteSource, sink: Sink) -> Wait[None]:
    """Hand the next JSON value to `sink`, exactly as written. The source is at its first byte."""
    first = yield from source.peek()
    if first == END:
        raise EndOfStreamError
    if first == _QUOTE:
        yield from scan_string(source, sink)
    elif first in b"{[":
        yield from _scan_nested(source, sink)
    else:
        yield from _scan_literal(source, sink)


def scan_string(source: ByteSource, sink: Sink) -> Wait[None]:
    """Hand a JSON string with its quotes to `sink`."""
    first = yield from source.peek()
    if first == END:
        raise EndOfStreamError
    if first != _QUOTE:
        raise BadJsonError("a string was due")
    _take(source, sink, _QUOTE)
    while True:
        byte = yield from source.run_to(_IN_STRING, sink)
        if byte == END:
            raise EndOfStreamError
        _take(source, sink, byte)
        if byte == _QUOTE:
            return
        escaped = yield from source.peek()
        if escaped == END:
            raise EndOfStreamError
        _take(source, sink, escaped)


def _scan_nested(source: ByteSource, sink: Sink) -> Wait[None]:
    opened: list[int] = []
    while True:
        byte = yield from source.run_to(_OUTSIDE, sink)
        if byte == END:
            raise EndOfStreamError
        if byte == _QUOTE:
            yield from scan_string(source, sink)
            continue
        if byte in _CLOSES:
            if opened.pop() != _CLOSES[byte]:
                raise BadJsonError("brackets do not pair")
        else:
            opened.append(byte)
        _take(source, sink, byte)
        if not opened:
            return


def _scan_literal(source: ByteSource, sink: Sink) -> Wait[None]:
    taken: list[bytes] = []
    if (yield from source.run_to(_AFTER_LITERAL, taken.append)) == END:
        raise EndOfStreamError
    if not taken:
        raise BadJsonError("a value was due")
    sink(b"".join(taken))


def _take(source: ByteSource, sink: Sink, byte: int) -> None:
    source.skip()
    sink(bytes((byte,)))
