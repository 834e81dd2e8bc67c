# SPDX-License-Identifier: Apache-2.0
"""Computes the KV of a history before anybody asks for an answer.

A prefill is a request for one token that nobody keeps: what the engine then holds is the prompt.
Those in the background give way to the session's next turn, which finds what they got done. Does
not know: HTTP, what the history says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import Any

from appliance.errors import known_code
from appliance.services import Services
from engine import api
from engine.errors import EngineError
from sessions.session import Session

logger = logging.getLogger(__name__)

MAX_PRIORITY = (1 << 31) - 1
GIVES_WAY = ("session.turn_started", "session.closed", "session.expired")


class Prefiller:
    """All prefills of this process. Belongs to one event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._background: dict[str, asyncio.Task[None]] = {}
        services.hub.listen(self._on_session_event)

    async def run(self, session: Session, token_ids: bytes, *, is_urgent: bool) -> Prefilled:
        """Compute the KV of `token_ids`; says how far that got, never raises for the engine."""
        services = self._services
        request = api.GenerateRequest(
            request_id=f"prefill_{uuid.uuid4().hex}",
            token_ids=token_ids,
            sampling=api.SamplingParams(max_new_tokens=1, temperature=0.0),
            priority=min(session.settings.priority + (0 if is_urgent else 1), MAX_PRIORITY),
            tenant=session.tenant,
            salt=services.salt_of(session.tenant),
        )
        done = Prefilled()
        try:
            async with contextlib.aclosing(services.client.generate(request)) as items:
                async for item in items:
                    if isinstance(item, api.Started):
                        done.cache = item.cache
                    elif isinstance(item, api.Finished):
                        done.finished = item
        except EngineError as error:
            done.error_code = known_code(error.code)
        if done.finished is not None and done.finished.reason is api.FinishReason.ERROR:
            done.error_code = known_code(done.finished.error_code)
        return done

    def start(self, session: Session, token_ids: bytes) -> None:
        """Prefill in the background, in place of what is under way for this session."""
        self._stop(session.id)
        task = asyncio.create_task(self._run_behind(session, token_ids))
        self._background[session.id] = task
        task.add_done_callback(lambda task: self._forget(session.id, task))

    async def close(self) -> None:
        """Stop everything that runs behind."""
        tasks = list(self._background.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_behind(self, session: Session, token_ids: bytes) -> None:
        done = await self.run(session, token_ids, is_urgent=False)
        event = {"type": "session.prefilled", "session_id": session.id}
        self._services.hub.put(session.id, {**event, **done.wire()})

    def _on_session_event(self, kind: str, session: Session, fields: dict[str, Any]) -> None:
        if kind in GIVES_WAY:
            self._stop(session.id)

    def _stop(self, session_id: str) -> None:
        task = self._background.pop(session_id, None)
        if task is not None:
            task.cancel()

    def _forget(self, session_id: str, task: asyncio.Task[None]) -> None:
        if self._background.get(session_id) is task:
            del self._background[session_id]


class Prefilled:
    """How a prefill went."""

    def __init__(self) -> None:
        self.cache: api.CacheHit | None = None
        self.finished: api.Finished | None = None
        self.error_code = ""

    @property
    def num_cached(self) -> int:
        """Tokens whose KV the engine now holds."""
        return 0 if self.error_code or self.finished is None else self.finished.num_cached_tokens

    def wire(self) -> dict[str, Any]:
        """The prefill as the API shows it."""
        cache = self.cache or api.CacheHit()
        return {
            "state": "failed" if self.error_code else "done",
            "cached_tokens": cache.l1 + cache.l2 + cache.l3,
            "computed_tokens": 0 if self.error_code else cache.to_compute,
            "error": self.error_code or None,
        }
