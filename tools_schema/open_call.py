# SPDX-License-Identifier: Apache-2.0
"""Owns a call in the making: what it is called, its arguments so far, when it may start.

Does not know: how calls are written. From its start on a call's arguments stream.
"""

from __future__ import annotations

from collections.abc import Callable

from tools_schema.channels import Utf8Channel
from tools_schema.events import Event, ToolCallArgs, ToolCallEnd, ToolCallStart
from tools_schema.validation import parse_json


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
