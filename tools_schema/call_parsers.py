# SPDX-License-Identifier: Apache-2.0
"""Owns the parse of one call: its name, its arguments, where it ends.

Does not know: text, reasoning, sections, chunking. Each parser is a generator over the bytes; it
raises `NotACallError` at the first byte that no call of the format has.
"""

from __future__ import annotations

import json

from tools_schema.byte_source import END, ByteSource, Wait
from tools_schema.formats.base import HeaderBody, JsonBody, ToolFormat
from tools_schema.json_scan import BadJsonError, EndOfStreamError, scan_string, scan_value
from tools_schema.open_call import NotACallError, OpenCall
from tools_schema.param_parser import expect, parse_params
from tools_schema.param_types import param_types
from tools_schema.tool_spec import ToolSet

_NAME_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_NAME_MAX = 64
_ID_BYTES = _NAME_BYTES | frozenset(b".:")
_ID_MAX = 256
_BRACE, _CLOSE_BRACE, _COLON, _COMMA = b"{}:,"


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
    has_any = yield from parse_params(source, body.params, types, call)
    # Only the end marker says that no further parameter comes.
    yield from expect(source, tool_format.call_end)
    if has_any:
        call.write_text("}")
    call.end()


def _read_id(source: ByteSource, body: HeaderBody, name: str, call: OpenCall) -> Wait[None]:
    if not body.id_mark:
        return
    if not (yield from source.match_loosely(body.id_mark)):
        if source.was_cut:
            source.skip_rest()
            raise EndOfStreamError
        return
    yield from source.skip_blanks()
    sampled = (yield from source.take_while(_ID_BYTES, _ID_MAX)).decode()
    head = body.before_name + name + body.id_mark if body.id_has_name else ""
    call.model_id = head + sampled
