# SPDX-License-Identifier: Apache-2.0
"""Tool output that comes in pieces while the tool still runs.

The pieces are kept with the session, and the KV of what they render to so far is computed ahead;
the history gets the output as a whole once it is sealed, so its ids are those of one append. Does
not know: HTTP.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from appliance.api.wire_sessions import ItemsAppend
from appliance.errors import ApiError
from appliance.prefill import Prefiller
from appliance.services import Services
from appliance.text_limits import off_loop
from engine.text.errors import TextError
from sessions.ids import new_id
from sessions.items import FunctionCallOutput, parse_items
from sessions.session import Session
from sessions.token_codec import TOKEN_BYTES
from sessions.turn_log import TurnLog

# What may follow a text: ids that all of these leave as they are will hardly change any more.
CONTINUATIONS = ("a", " a", "\n", "0", ".")
STEP_CHARS = 256  # a prefill for less would cost more than it saves


def piece_of(body: ItemsAppend) -> FunctionCallOutput:
    """Return the piece that a body brings. Raises: ApiError, ItemError."""
    if body.call_id is None:
        raise ApiError("missing_field", "call_id: required with partial and final", "call_id")
    if isinstance(body.items, str):
        return FunctionCallOutput(id=new_id("item"), call_id=body.call_id, output=body.items)
    items = parse_items(body.items, path="items")
    if not items:
        return FunctionCallOutput(id=new_id("item"), call_id=body.call_id, output="")
    piece = items[0]
    if len(items) > 1 or not isinstance(piece, FunctionCallOutput):
        raise ApiError(
            "invalid_value", "items: with partial or final, one function_call_output", "items"
        )
    if piece.call_id != body.call_id:
        raise ApiError(
            "invalid_value",
            f"items[0].call_id: {piece.call_id!r} is not the call_id {body.call_id!r}",
            "items[0].call_id",
        )
    return piece


def output_with(so_far: str, piece: str, offset: int | None) -> str:
    """Return the output with a piece behind it, or (again) at `offset`. Raises: ApiError."""
    if offset is None:
        return so_far + piece
    if offset > len(so_far):
        raise ApiError(
            "invalid_value",
            f"offset: {offset}; the output so far has {len(so_far)} characters",
            "offset",
        )
    known = so_far[offset : offset + len(piece)]
    if not piece.startswith(known):
        raise ApiError("invalid_value", "items: other text than was sent for this offset", "items")
    return so_far[:offset] + piece if len(known) < len(piece) else so_far


class PartialPrefill:
    """Computes ahead what partial outputs render to. Belongs to one event loop."""

    def __init__(self, services: Services, prefiller: Prefiller) -> None:
        self._services = services
        self._prefiller = prefiller
        self._num_chars: dict[tuple[str, str], int] = {}  # prefilled so far
        services.hub.listen(self._on_session_event)

    async def advance(self, session: Session, log: TurnLog, call_id: str) -> dict[str, object]:
        """Prefill up to where the ids of the output are certain; says what was started."""
        text = session.partial_output(call_id)
        key = (session.id, call_id)
        if len(text) - self._num_chars.get(key, 0) < STEP_CHARS:
            return {"state": "waiting"}
        self._num_chars[key] = len(text)
        stable = await off_loop(
            len(text) * len(CONTINUATIONS), lambda: self._stable_ids(session, log, call_id, text)
        )
        if stable:
            self._prefiller.start(session, log.token_ids + stable)
        return {"state": "started", "tokens": len(stable) // TOKEN_BYTES}

    def _stable_ids(self, session: Session, log: TurnLog, call_id: str, text: str) -> bytes:
        try:
            renders = [
                self._render(session, log, call_id, text + more) for more in ("", *CONTINUATIONS)
            ]
        except TextError:
            return b""
        return _common_ids(renders)

    def _render(self, session: Session, log: TurnLog, call_id: str, text: str) -> bytes:
        services = self._services
        items = (FunctionCallOutput(id="item_partial", call_id=call_id, output=text),)
        end = services.end_of(session, log, items)
        head = services.head_of(session)
        rendered = services.renderer.render_turn(end, items, head, add_generation_prompt=False)
        return rendered.token_ids

    def _on_session_event(self, kind: str, session: Session, fields: dict[str, object]) -> None:
        if kind in ("session.items_appended", "session.turn_started", "session.closed"):
            for key in [key for key in self._num_chars if key[0] == session.id]:
                del self._num_chars[key]


def _common_ids(renders: Sequence[bytes]) -> bytes:
    """The whole ids that all renders begin with."""
    num_bytes = len(os.path.commonprefix(list(renders)))
    return renders[0][: num_bytes // TOKEN_BYTES * TOKEN_BYTES]
