# SPDX-License-Identifier: Apache-2.0
"""The session API for asyncio. Same calls as `moorage_client.client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from moorage_client import calls, types
from moorage_client.calls import Call
from moorage_client.errors import ApiError, ServerAwayError, is_away, refusal_of
from moorage_client.patience import Patience
from moorage_client.reader import Position

Answer = TypeVar("Answer")
# The server's heartbeats come every 5 s; a stream silent for longer than this is broken.
SILENCE_S = 20.0
CONNECT_S = 5.0


class AsyncMoorage:
    """A client for asyncio, as an async context manager.

    Args:
        base_url: where the server is, such as `http://127.0.0.1:8000`; with `/v1` behind it, as
            OpenAI's clients are given it, too.
        api_key: sent as a bearer token.
        patience_s: how long the server may be away before a call gives up; seconds.
        timeout_s: how long an answer may take; seconds, None: as long as it takes.

    Every call raises ApiError where the server refuses, ServerAwayError where it stays away.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        patience_s: float = 60.0,
        timeout_s: float | None = None,
    ) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(
            base_url=calls.root_of(base_url),
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
        )
        self._patience_s = patience_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; sessions live on."""
        await self._http.aclose()

    # Sessions -----------------------------------------------------------------------------

    async def create_session(self, body: types.SessionCreate) -> types.Session:
        """Create a session."""
        return await self._json(calls.create_session(body))

    async def list_sessions(
        self, *, metadata: Mapping[str, str] | None = None, **query: str | int
    ) -> types.SessionPage:
        """A page of sessions: `after`, `limit`, `status`, `parent_session_id`, `order`."""
        return await self._json(calls.list_sessions(metadata, query))

    async def get_session(self, session_id: str) -> types.Session:
        """A session as it is."""
        return await self._json(calls.get_session(session_id))

    async def update_session(
        self, session_id: str, body: types.SessionUpdate
    ) -> types.SessionUpdated:
        """Change settings; absent fields stay."""
        return await self._json(calls.update_session(session_id, body))

    async def close_session(
        self, session_id: str, *, cache: str = "release"
    ) -> types.SessionDeleted:
        """Delete a session; `release` lets its KV go now, `decay` leaves it to eviction."""
        return await self._json(calls.close_session(session_id, cache))

    async def append_items(self, session_id: str, body: types.ItemsAppend) -> types.ItemsAppended:
        """Append items without generating."""
        return await self._json(calls.append_items(session_id, body))

    async def list_items(self, session_id: str, **query: str | int) -> types.ItemPage:
        """A page of the transcript: `after`, `limit`, `order`."""
        return await self._json(calls.list_items(session_id, query))

    async def tokens(self, session_id: str) -> types.SessionTokens:
        """The exact token ids of the history."""
        return await self._json(calls.tokens(session_id))

    async def fork(self, session_id: str, body: types.ForkCreate | None = None) -> types.ForkAnswer:
        """Sessions that share this history; default: one, at its head."""
        return await self._json(calls.fork(session_id, body or {}))

    async def rollback(self, session_id: str, body: types.Rollback) -> types.RolledBack:
        """Go back to just behind a turn, an item or a revision."""
        return await self._json(calls.rollback(session_id, body))

    async def compact(self, session_id: str, body: types.CompactCreate) -> types.Compacted:
        """Put a summary, or items, in place of the older part of the history."""
        return await self._json(calls.compact(session_id, body))

    async def suspend(self, session_id: str) -> types.Suspended:
        """Flush the session's KV to the lowest tier and let go of what lies above."""
        return await self._json(calls.suspend(session_id))

    async def resume(self, session_id: str) -> types.Resumed:
        """Bring the session's KV back to L1."""
        return await self._json(calls.resume(session_id))

    async def lease(self, session_id: str, body: types.LeaseCreate) -> types.Lease:
        """Ask that a prefix is kept."""
        return await self._json(calls.lease(session_id, body))

    async def list_leases(self, session_id: str) -> types.LeaseList:
        """Live leases."""
        return await self._json(calls.list_leases(session_id))

    async def release_lease(self, session_id: str, lease_id: str) -> types.LeaseDeleted:
        """Let a lease go."""
        return await self._json(calls.release_lease(session_id, lease_id))

    async def signal(self, session_id: str, body: types.SignalCreate) -> types.Signal:
        """Say what goes on outside the model: a tool runs, the user types."""
        return await self._json(calls.signal(session_id, body))

    async def cache(self, session_id: str) -> types.CacheView:
        """Where the session's KV is, and what its last turn reused."""
        return await self._json(calls.cache(session_id))

    # Turns --------------------------------------------------------------------------------

    async def run_turn(
        self, session_id: str, body: types.TurnCreate, *, idempotency_key: str | None = None
    ) -> types.Turn:
        """Run a turn to its end; asked again under the same key where the server restarts."""
        return await self._json(calls.create_turn(session_id, body, idempotency_key, stream=False))

    def stream_turn(
        self, session_id: str, body: types.TurnCreate, *, idempotency_key: str | None = None
    ) -> AsyncTurnStream:
        """Run a turn and read its events. Nothing is sent before the stream is read."""
        first = calls.create_turn(session_id, body, idempotency_key, stream=True)
        return AsyncTurnStream(self, Position(session_id, first, None, 0))

    def follow_turn(
        self, session_id: str, turn_id: str, *, starting_after: int = 0
    ) -> AsyncTurnStream:
        """The events of a turn that is there, from any of them on."""
        first = calls.turn_events(session_id, turn_id, starting_after)
        return AsyncTurnStream(self, Position(session_id, first, turn_id, starting_after))

    async def get_turn(self, session_id: str, turn_id: str) -> types.Turn:
        """A turn as it is."""
        return await self._json(calls.get_turn(session_id, turn_id))

    async def list_turns(self, session_id: str) -> types.TurnPage:
        """The turns of the history, and the one that runs."""
        return await self._json(calls.list_turns(session_id))

    async def cancel_turn(self, session_id: str, turn_id: str) -> types.Turn:
        """Stop a turn; returns it as it ended."""
        return await self._json(calls.cancel_turn(session_id, turn_id))

    # Inside -------------------------------------------------------------------------------

    async def _json(self, call: Call[Answer]) -> Answer:
        patience = Patience(self._patience_s)
        while True:
            try:
                response = await self._http.send(self._request(call))
                if response.is_success:
                    answer: Answer = response.json()
                    return answer
                raise refusal_of(response)
            except (ApiError, httpx.TransportError) as error:
                if not is_away(error):
                    raise
                await self._pause(patience if call.is_repeatable else None, error)

    def _request(self, call: Call[Any], timeout: httpx.Timeout | None = None) -> httpx.Request:
        return self._http.build_request(
            call.method,
            call.path,
            params=dict(call.query),
            json=call.body,
            headers=dict(call.headers),
            timeout=timeout or httpx.USE_CLIENT_DEFAULT,
        )

    async def _pause(self, patience: Patience | None, error: Exception) -> None:
        """Wait before the next attempt, or raise what an attempt too many ends with."""
        pause_s = None if patience is None else patience.next_pause_s()
        if pause_s is not None:
            await asyncio.sleep(pause_s)
        elif isinstance(error, ApiError):
            raise error
        else:
            where = str(self._http.base_url).rstrip("/")
            raise ServerAwayError(f"{where}: {str(error) or type(error).__name__}") from error

    async def _events(self, position: Position) -> AsyncGenerator[types.TurnEvent, None]:
        """Events of a turn across broken connections and restarts of the server."""
        patience = Patience(self._patience_s)
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        while True:
            failure: Exception = httpx.RemoteProtocolError("the stream ended before the turn did")
            try:
                request = self._request(position.next_call(), timeout)
                response = await self._http.send(request, stream=True)
                try:
                    if not response.is_success:
                        await response.aread()
                        raise refusal_of(response)
                    async for piece in response.aiter_bytes():
                        for event in position.take(piece):
                            patience.renew()
                            yield event
                        if position.has_ended:
                            return
                finally:
                    await response.aclose()
            except (ApiError, httpx.TransportError) as error:
                if not is_away(error):
                    raise
                failure = error
            await self._pause(patience, failure)


class AsyncTurnStream:
    """Iterate it once; `final_turn` reads what is left and gives the turn as it ended."""

    def __init__(self, client: AsyncMoorage, position: Position) -> None:
        self._client = client
        self._position = position
        self._events = client._events(position)

    @property
    def turn_id(self) -> str | None:
        """The turn's id, once its first event has come."""
        return self._position.turn_id

    @property
    def last_sequence(self) -> int:
        """Number of the last event that came: what a later reader continues after."""
        return self._position.last_sequence

    def __aiter__(self) -> AsyncIterator[types.TurnEvent]:
        return self._events

    async def text(self) -> AsyncGenerator[str, None]:
        """The answer's text as it comes."""
        async for event in self:
            if event["type"] == "response.output_text.delta":
                yield event["delta"]

    async def final_turn(self) -> types.Turn:
        """Read to the end. A failed turn is returned, not raised."""
        async for _ in self:
            pass
        if self._position.turn is None:
            raise ServerAwayError("the stream was not read to its end")
        return self._position.turn

    async def cancel(self) -> types.Turn:
        """Stop the turn; the stream still ends with its terminal event."""
        if self.turn_id is None:
            raise ServerAwayError("the turn has not begun")
        return await self._client.cancel_turn(self._position.session_id, self.turn_id)
