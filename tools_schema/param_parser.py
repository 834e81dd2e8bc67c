# SPDX-License-Identifier: Apache-2.0
"""Owns reading tagged parameters as the members of one JSON object, while they are written.

Does not know: calls, sections. Strings are escaped as they come, JSON goes out as it is; what may
be either waits for its end.
"""

from __future__ import annotations

import json

from tools_schema.byte_source import END, ByteSource, MarkerSet, Wait
from tools_schema.channels import Utf8Channel
from tools_schema.formats.base import ParamStyle
from tools_schema.json_scan import EndOfStreamError, scan_value
from tools_schema.json_types import json_types
from tools_schema.open_call import NotACallError, OpenCall
from tools_schema.param_types import ParamTypes
from tools_schema.validation import parse_json

_STRING = frozenset({"string"})


def expect(source: ByteSource, *literals: str) -> Wait[None]:
    """Consume one of these markers, whatever the whitespace around its lines."""
    is_cut = False
    for literal in literals:
        if (yield from source.match_loosely(literal)):
            return
        is_cut |= source.was_cut
    if is_cut:
        source.skip_rest()
    if (yield from source.peek()) == END:
        raise EndOfStreamError
    raise NotACallError(f"{literals[0].strip()!r} was due")


def parse_params(
    source: ByteSource, style: ParamStyle, types: ParamTypes, call: OpenCall
) -> Wait[bool]:
    """All parameters, as the members of one JSON object; whether there was any."""
    has_any = False
    while (yield from source.match_loosely(style.begin)):
        key = yield from _read_key(source, style)
        call.write_text(", " if has_any else "{")
        call.write_text(json.dumps(key, ensure_ascii=False) + ": ")
        has_any = True
        admitted = types.of(key)
        if style.type_mark is not None:
            admitted = yield from _read_type_mark(source, style)
        yield from _parse_value(source, style, admitted, call)
    if source.was_cut:
        source.skip_rest()
        raise EndOfStreamError
    return has_any


def _read_key(source: ByteSource, style: ParamStyle) -> Wait[str]:
    closing = style.after_key if style.type_mark is None else style.type_mark
    taken: list[bytes] = []
    markers = MarkerSet((closing.split("\n")[0].strip() or closing.strip(),))
    if (yield from source.until(markers, taken.append, flushes=False)) is None:
        raise EndOfStreamError
    key = b"".join(taken)
    if not key:
        raise NotACallError("the parameter has no name")
    for line in closing.split("\n")[1:]:
        yield from expect(source, line)
    return key.decode("utf-8", "replace")


def _read_type_mark(source: ByteSource, style: ParamStyle) -> Wait[frozenset[str]]:
    is_text = yield from source.match(b"true")
    is_cut = source.was_cut
    if not is_text and not (yield from source.match(b"false")):
        if is_cut or source.was_cut or (yield from source.peek()) == END:
            source.skip_rest()
            raise EndOfStreamError
        raise NotACallError("a parameter is a string or it is not: true or false was due")
    yield from expect(source, style.after_key)
    return _STRING if is_text else frozenset()


def _parse_value(
    source: ByteSource, style: ParamStyle, admitted: frozenset[str], call: OpenCall
) -> Wait[None]:
    """One value and its end marker: strings and JSON stream, what may be either waits."""
    if "string" not in admitted:
        yield from source.skip_blanks()
        yield from scan_value(source, call.write)
        yield from expect(source, style.end)
        return
    if style.after_key.endswith("\n"):
        yield from source.match(b"\n")
    markers = MarkerSet((style.end.strip(),))
    trims = style.end.startswith("\n")
    if admitted == _STRING:
        writer = _StringWriter(call, trims=trims)
        if (yield from source.until(markers, writer.write, flushes=False)) is None:
            raise EndOfStreamError
        writer.close()
        return
    taken: list[bytes] = []
    if (yield from source.until(markers, taken.append, flushes=False)) is None:
        raise EndOfStreamError
    raw = b"".join(taken)
    if trims and raw.endswith(b"\n"):
        raw = raw[:-1]
    call.write_text(_as_json(raw.decode("utf-8", "replace"), admitted))


def _as_json(text: str, admitted: frozenset[str]) -> str:
    """A value that may be text or JSON: JSON where it is of an admitted type."""
    try:
        types = json_types(parse_json(text))
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if types & admitted:
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


class _StringWriter:
    """Writes raw text as a JSON string, escaping as it goes; holds back one closing newline."""

    def __init__(self, call: OpenCall, *, trims: bool) -> None:
        self._call = call
        self._trims = trims
        self._held = b""
        self._channel = Utf8Channel(self._escape)
        call.write_text('"')

    def write(self, data: bytes) -> None:
        data = self._held + data
        self._held = b""
        if self._trims and data.endswith(b"\n"):
            data, self._held = data[:-1], b"\n"
        self._channel.write(data)

    def close(self) -> None:
        self._channel.close()
        self._call.write_text('"')

    def _escape(self, text: str) -> None:
        self._call.write_text(json.dumps(text, ensure_ascii=False)[1:-1])
