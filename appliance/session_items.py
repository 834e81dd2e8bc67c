# SPDX-License-Identifier: Apache-2.0
"""ItemService: items appended to a history without generating, whole or in pieces.

Does not know: HTTP, turns.
"""

from __future__ import annotations

from typing import Any

import msgspec

from appliance.api.wire_sessions import ItemsAppend
from appliance.errors import ApiError
from appliance.history_room import HistoryRoom, num_new_of
from appliance.partial_output import PartialPrefill, output_with, piece_of
from appliance.prefill import Prefiller
from appliance.races import racing
from appliance.reasoning_history import ReasoningHistory, drops_reasoning
from appliance.response_events import item_wire
from appliance.services import Services
from appliance.session_history import check_fits
from appliance.text_limits import check_can_fit, num_chars, off_loop
from sessions.items import item_to_wire, parse_items
from sessions.session import Session, items_record
from sessions.turn_log import Record, TurnLog


class ItemService:
    """Belongs to one event loop."""

    def __init__(self, services: Services, prefiller: Prefiller, room: HistoryRoom) -> None:
        self._services = services
        self._room = room
        self._prefiller = prefiller
        self._partial = PartialPrefill(services, prefiller)
        self._reasoning = ReasoningHistory(services)

    async def append(
        self, tenant: str | None, session_id: str, body: ItemsAppend
    ) -> dict[str, Any]:
        """Append items without generating; with `prefill`, their KV is computed too.

        With `partial` or `final`, the items are a piece of a tool's output.
        """
        if body.partial or body.final:
            return await self._append_piece(tenant, session_id, body)
        for name in ("call_id", "offset"):
            if getattr(body, name) is not None:
                raise ApiError("invalid_value", f"{name}: only with partial or final", name)
        return await self._append_items(tenant, session_id, body)

    async def _append_piece(
        self, tenant: str | None, session_id: str, body: ItemsAppend
    ) -> dict[str, Any]:
        """Take a piece of a tool's output; `final` makes the whole of it history."""
        services = self._services
        piece = piece_of(body)

        async def once() -> tuple[Session, str]:
            session = await services.store.get(session_id, tenant=tenant)
            session.check_ready(services.clock_ms(), expect_revision=body.expect_revision)
            text = output_with(session.partial_output(piece.call_id), piece.text, body.offset)
            if body.final:
                return session, text
            room = services.context_limit(session)
            if session.settings.context.on_overflow == "error":
                room -= session.num_tokens  # else the history gives way once the output is whole
            max_token_bytes = services.assets.tokenizer.max_token_bytes
            check_can_fit(len(text), room, max_token_bytes, "items")
            grown = session.with_partial_output(piece.call_id, text, services.clock_ms())
            return await services.store.update(grown), text

        session, text = await racing(once)
        if body.final:
            whole = item_to_wire(msgspec.structs.replace(piece, output=text))
            sealed = body.model_copy(update={"items": [whole]})
            return await self._append_items(tenant, session_id, sealed)
        prefill: dict[str, object] | None = None
        if body.prefill != "none" or "prefill" not in body.model_fields_set:
            log = await services.store.read_log(session)
            prefill = await self._partial.advance(session, log, piece.call_id)
        return {
            "object": "list",
            "data": [],
            "revision": session.revision,
            "num_tokens": session.num_tokens,
            "added_tokens": 0,
            "open_calls": list(session.open_call_ids),
            "partial": {"call_id": piece.call_id, "num_chars": len(text)},
            "prefill": prefill,
        }

    async def _append_items(
        self, tenant: str | None, session_id: str, body: ItemsAppend
    ) -> dict[str, Any]:
        services = self._services

        async def once() -> tuple[Session, Record]:
            session = await services.store.get(session_id, tenant=tenant)
            session.check_ready(services.clock_ms(), expect_revision=body.expect_revision)
            await services.check_quota(session.tenant)
            session = await services.adopt_model(session)
            if drops_reasoning(session, body.items):
                session = await self._reasoning.drop(session)
            log = await services.store.read_log(session)
            try:
                appended, record = await self._appended(session, log, body)
            except ApiError as error:
                if not self._room.can_make(session, log, error):
                    raise
                session = await self._room.make(session, num_new_of(error))
                log = await services.store.read_log(session)
                appended, record = await self._appended(session, log, body)
            return await services.store.append_record(appended, record), record

        stored, record = await racing(once)
        return {
            "object": "list",
            "data": [item_wire(item) for item in record.input_items],
            "revision": stored.revision,
            "num_tokens": stored.num_tokens,
            "added_tokens": record.num_tokens,
            "open_calls": list(stored.open_call_ids),
            "prefill": await self._prefill(stored, body.prefill),
        }

    async def _appended(
        self, session: Session, log: TurnLog, body: ItemsAppend
    ) -> tuple[Session, Record]:
        """The session with its new record. Raises: ApiError where the context is too short."""
        services = self._services
        chars = num_chars(body.items)
        room = services.context_limit(session) - session.num_tokens
        check_can_fit(chars, room, services.assets.tokenizer.max_token_bytes, "items")
        record = await off_loop(chars, lambda: self._items_record(session, log, body))
        appended = session.append_items(record, services.clock_ms())
        num_new = appended.num_tokens - session.num_tokens
        check_fits(appended, services.context_limit(session), "items", num_new=num_new)
        return appended, record

    async def _prefill(self, session: Session, how: str) -> dict[str, Any] | None:
        if how == "none":
            return None
        token_ids = await self._services.store.read_tokens(session)
        if how == "now":
            return (await self._prefiller.run(session, token_ids, is_urgent=True)).wire()
        self._prefiller.start(session, token_ids)
        return {"state": "started"}

    def _items_record(self, session: Session, log: TurnLog, body: ItemsAppend) -> Record:
        services = self._services
        items = session.prepare_input(
            parse_items(body.items, path="items"),
            auto_close_calls=body.auto_close_calls,
            allow_open_calls=True,
            path="items",
        )
        if not items:
            raise ApiError("invalid_value", "items: there is nothing to append", "items")
        rendered = services.renderer.render_turn(
            services.end_of(session, log, items),
            items,
            services.head_of(session),
            add_generation_prompt=False,
        )
        return items_record(
            items,
            revision=session.revision + 1,
            token_ids=rendered.token_ids,
            item_token_ends=rendered.item_token_ends,
            model_fingerprint=services.assets.fingerprint,
        )
