# SPDX-License-Identifier: Apache-2.0
"""Owns the parse of one call: its name, its arguments, where it ends.

Does not know: text, reasoning, sections, chunking. Each parser is a generator over the bytes; it
raises `NotACallError` at the first byte that no call of the format has.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tools_schema.byte_source import END, ByteSource, MarkerSet, Wait
from tools_schema.channels import Utf8Channel
from tools_schema.events import Event, ToolCallArgs, ToolCallEnd, ToolCallStart
from tools_schema.formats.base import HeaderBody, JsonBody, ParamStyle, ToolFormat
from tools_schema.json_scan import BadJsonError, EndOfStreamError, scan_string, scan_value
from tools_schema.json_types import json_types
from tools_schema.param_types import ParamTypes, param_types
from tools_schema.tool_spec import ToolSet
from tools_schema.validation import parse_json

_NAME_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_NAME_MAX = 64
_ID_BYTES = _NAME_BYTES | frozenset(b".:")
_ID_MAX = 256
_KEY_MAX = 1024
_BRACE, _CLOSE_BRACE, _COLON, _COMMA = b"{}:,"


class NotACallError(Exception):
    """What follows is no call (never leaves the room). `code` is that of a ParseProblem."""

    def __init__(self, message: str, code: str = "malformed_call") -> None:
        super().__init__(message)
        self.code = code


class OpenCall:
    """A call in the making: holds its arguments until it may start, then streams them."""

    def __init__(
        self,
        index: int,
        names: frozenset[str],
        emit: Callable[[Event], None],
        new_call_id: Callable[[], str],
        used_ids: set[str],
    ) -> None:
        self.index = index
        self.has_started = False
        self.has_ended = False
        self.model_id: str | None = None
        self._names = names
        self._emit = emit
        self._new_call_id = new_call_id
        self._used_ids = used_ids
        self._name: str | None = None
        self._call_id = ""
        self._parts: list[str] = []
        self._channel = Utf8Channel(self._take)

    def set_name(self, name: str) -> None:
        if self._name is not None:
            raise NotACallError("the call is named twice")
        if name not in self._names:
            raise NotACallError(f"no tool named {name!r} may be called", "unknown_tool")
        self._name = name

    @property
    def name(self) -> str | None:
        return self._name

    @property
    def has_arguments(self) -> bool:
        return bool(self._parts)

    def start_if_named(self, *, keep_model_id: bool = False) -> None:
        if self._name is None or self.has_started:
            return
        self.has_started = True
        sampled = self.model_id if keep_model_id and self.model_id not in self._used_ids else None
        self._call_id = sampled or self._new_call_id()
        self._used_ids.add(self._call_id)
        self._emit(ToolCallStart(self.index, self._call_id, self._name, self.model_id))
        if self._parts:
            self._emit(ToolCallArgs(self.index, "".join(self._parts)))

    def write(self, data: bytes) -> None:
        self._channel.write(data)

    def write_text(self, text: str) -> None:
        self._take(text)

    def end(self) -> None:
        self._channel.close()
        if self._name is None:
            raise NotACallError("the call has no name")
        if not self._parts:
            self._take("{}")
        arguments = "".join(self._parts)
        try:
            parse_json(arguments)
        except ValueError as error:
            raise NotACallError(f"the arguments are not JSON: {error}") from None
        self.start_if_named()
        self.has_ended = True
        self._emit(ToolCallEnd(self.index, self._call_id, self._name, arguments, self.model_id))

    def _take(self, text: str) -> None:
        self._parts.append(text)
        if self.has_started:
            self._emit(ToolCallArgs(self.index, text))


def parse_call(
    source: ByteSource, tool_format: ToolFormat, toolset: ToolSet, call: OpenCall
) -> Wait[None]:
    """One call, from after `call_begin` to after `call_end`."""
    body = tool_format.body
    try:
        if isinstance(body, JsonBody):
            yield from _parse_json_call(source, body, call, is_bare=tool_format.is_bare)
            yield from expect(source, tool_format.call_end)
        else:
            yield from _parse_header_call(source, tool_format, body, toolset, call)
    except BadJsonError as error:
        raise NotACallError(str(error)) from None


# -- one JSON object -----------------------------------------------------------------------


def _parse_json_call(
    source: ByteSource, body: JsonBody, call: OpenCall, *, is_bare: bool
) -> Wait[None]:
    yield from source.skip_blanks()
    yield from _expect_byte(source, _BRACE)
    seen: set[str] = set()
    is_first = True
    while True:
        byte = yield from source.skip_blanks()
        if byte == _CLOSE_BRACE and is_first:
            source.skip()
            break
        key = yield from _read_string(source)
        if key in seen:
            raise NotACallError(f"the key {key!r} comes twice")
        seen.add(key)
        yield from source.skip_blanks()
        yield from _expect_byte(source, _COLON)
        yield from source.skip_blanks()
        yield from _parse_member(source, body, call, key, is_bare=is_bare)
        is_first = False
        byte = yield from source.skip_blanks()
        if byte == _CLOSE_BRACE:
            source.skip()
            break
        yield from _expect_byte(source, _COMMA)
    call.end()


def _parse_member(
    source: ByteSource, body: JsonBody, call: OpenCall, key: str, *, is_bare: bool
) -> Wait[None]:
    """One value. The call starts when both its name and its arguments have been seen."""
    if key == body.name_key:
        call.set_name((yield from _read_string(source)))
        if call.has_arguments:
            call.start_if_named()
    elif key == body.arguments_key:
        call.start_if_named()
        yield from scan_value(source, call.write)
    elif key == body.id_key:
        call.model_id = yield from _read_string(source)
    elif is_bare and key not in ("type", "id"):
        # An answer in JSON is no call; waiting for its end would hold all of it back.
        raise NotACallError(f"a call has no key {key!r}")
    else:
        yield from scan_value(source, lambda data: None)


def _read_string(source: ByteSource) -> Wait[str]:
    taken: list[bytes] = []
    yield from scan_string(source, taken.append)
    try:
        text = json.loads(b"".join(taken))
    except ValueError as error:
        raise NotACallError(f"not a JSON string: {error}") from None
    return str(text)


def _expect_byte(source: ByteSource, wanted: int) -> Wait[None]:
    byte = yield from source.peek()
    if byte == END:
        raise EndOfStreamError
    if byte != wanted:
        raise NotACallError(f"{chr(wanted)!r} was due")
    source.skip()


# -- a header, then arguments --------------------------------------------------------------


def _parse_header_call(
    source: ByteSource,
    tool_format: ToolFormat,
    body: HeaderBody,
    toolset: ToolSet,
    call: OpenCall,
) -> Wait[None]:
    yield from expect(source, body.before_name)
    yield from source.skip_blanks()
    name = (yield from source.take_while(_NAME_BYTES, _NAME_MAX)).decode()
    if (yield from source.peek()) == END:
        raise EndOfStreamError
    call.set_name(name)
    yield from _read_id(source, body, name, call)
    yield from expect(source, body.after_name, *body.also_after_name)
    call.start_if_named(keep_model_id=tool_format.id_style == "sampled")
    yield from source.skip_blanks()
    if body.params is None:
        if (yield from source.peek()) not in (_BRACE, END):
            raise NotACallError("the arguments are no JSON object")
        yield from scan_value(source, call.write)
        call.end()
        yield from expect(source, tool_format.call_end)
        return
    spec = toolset.get(name)
    types = param_types(spec.schema() if spec is not None else {})
    has_any = yield from _parse_params(source, body.params, types, call)
    # Only the end marker says that no further parameter comes.
    yield from expect(source, tool_format.call_end)
    if has_any:
        call.write_text("}")
    call.end()


def _read_id(source: ByteSource, body: HeaderBody, name: str, call: OpenCall) -> Wait[None]:
    if not body.id_mark or not (yield from source.match_loosely(body.id_mark)):
        return
    yield from source.skip_blanks()
    sampled = (yield from source.take_while(_ID_BYTES, _ID_MAX)).decode()
    head = body.before_name + name + body.id_mark if body.id_has_name else ""
    call.model_id = head + sampled


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


def _parse_params(
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
    return has_any


def _read_key(source: ByteSource, style: ParamStyle) -> Wait[str]:
    closing = style.after_key if style.type_mark is None else style.type_mark
    taken: list[bytes] = []
    markers = MarkerSet((closing.split("\n")[0].strip() or closing.strip(),))
    if (yield from source.until(markers, taken.append, flushes=False)) is None:
        raise EndOfStreamError
    key = b"".join(taken)
    if not key or len(key) > _KEY_MAX:
        raise NotACallError("the parameter has no name")
    for line in closing.split("\n")[1:]:
        yield from expect(source, line)
    return key.decode("utf-8", "replace")


def _read_type_mark(source: ByteSource, style: ParamStyle) -> Wait[frozenset[str]]:
    is_text = yield from source.match(b"true")
    if not is_text and not (yield from source.match(b"false")):
        if (yield from source.peek()) == END:
            raise EndOfStreamError
        raise NotACallError("a parameter is a string or it is not: true or false was due")
    yield from expect(source, style.after_key)
    return frozenset({"string"}) if is_text else frozenset()


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
    if admitted == frozenset({"string"}):
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
