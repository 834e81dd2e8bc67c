# SPDX-License-Identifier: Apache-2.0
"""The event streams of a session and of the cache, as frames for SSE.

A session's stream starts with `session.state`, so that nothing is missed between reading a session
and listening to it. Residency is asked of the engine, never guessed: cache changes only say when.
Does not know: HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import msgspec

from appliance.services import Services
from appliance.session_hub import Subscription, session_state
from engine.errors import EngineError
from sessions.errors import SessionError

CACHE = "cache"  # no session has this id
RESIDENCY_EVERY_S = 0.2  # changes that come faster are told as one


def frame_of(number: int, event: dict[str, Any]) -> bytes:
    """Frame one event with its number in this stream."""
    body = msgspec.json.encode({**event, "sequence_number": number})
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (number, event["type"].encode(), body)


async def watch_session(
    services: Services, tenant: str | None, session_id: str
) -> AsyncGenerator[bytes, None]:
    """Return frames of a session's life and residency until it is closed.

    Raises: SessionNotFound.
    """
    subscription = services.hub.subscribe(session_id)
    try:
        session = await services.store.get(session_id, tenant=tenant)
    except SessionError:
        services.hub.unsubscribe(subscription)
        raise
    subscription.put({"type": "session.state", **session_state(session)})
    return _watch(services, subscription, _tell_residency(services, session_id, subscription))


def watch_cache(services: Services) -> AsyncGenerator[bytes, None]:
    """Return frames of cache changes, of every tenant, until the process stops."""
    subscription = services.hub.subscribe(CACHE)
    return _watch(services, subscription, _tell_changes(services, subscription))


async def _watch(
    services: Services, subscription: Subscription, source: Coroutine[Any, Any, None]
) -> AsyncGenerator[bytes, None]:
    """Yield what comes into the subscription while `source` runs beside it."""
    task = asyncio.create_task(source)
    number = 0
    try:
        async for event in subscription.read():
            number += 1
            yield frame_of(number, event)
    finally:
        services.hub.unsubscribe(subscription)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _tell_changes(services: Services, to: Subscription) -> None:
    async with contextlib.aclosing(services.client.kv_events()) as batches:
        async for batch in batches:
            for change in batch.events:
                to.put(
                    {
                        "type": f"cache.{change.kind}",
                        "tier": change.tier,
                        "page_hash": change.page_hash.hex(),
                        "parent_hash": change.parent_hash.hex(),
                        "num_tokens": change.num_tokens,
                    }
                )


async def _tell_residency(services: Services, session_id: str, to: Subscription) -> None:
    """Send `session.residency` at first, and after what changed it: changes of the cache, and those
    of the history, which may come to the store long behind the last of the cache."""
    known: dict[str, int] | None = None
    history = services.hub.subscribe(session_id)
    async with (
        contextlib.aclosing(services.client.kv_events()) as batches,
        contextlib.aclosing(history.read()) as events,
    ):
        changes = _Latest(batches, events)
        try:
            while True:
                found = await _residency(services, session_id)
                if found is None:
                    return
                if found != known:
                    known = found
                    to.put({"type": "session.residency", "session_id": session_id, **found})
                await changes.wait()
                await asyncio.sleep(RESIDENCY_EVERY_S)
        finally:
            services.hub.unsubscribe(history)
            await changes.close()


async def _residency(services: Services, session_id: str) -> dict[str, int] | None:
    """Tokens by tier now; zeros while no engine answers, None once the session is gone."""
    try:
        session = await services.store.get(session_id)
        token_ids = await services.store.read_tokens(session)
        hit = await services.client.query_prefix(
            token_ids, salt=services.salt_of(session.tenant), timeout_s=2.0
        )
    except EngineError:
        return {"l1": 0, "l2": 0, "l3": 0}
    except SessionError:
        return None
    return {"l1": hit.l1, "l2": hit.l2, "l3": hit.l3}


class _Latest:
    """Drains streams and remembers only that something came."""

    def __init__(self, *streams: AsyncGenerator[Any, None]) -> None:
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._drain(stream)) for stream in streams]

    async def _drain(self, stream: AsyncGenerator[Any, None]) -> None:
        async for _ in stream:
            self._changed.set()

    async def wait(self) -> None:
        """Return once something came since the last call."""
        await self._changed.wait()
        self._changed.clear()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
