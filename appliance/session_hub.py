# SPDX-License-Identifier: Apache-2.0
"""Who listens to what happens to sessions in this process; events are live, nothing is replayed.

A reader that falls behind by more than its queue holds is told `events.lost` with how many, and
goes on with what comes: it reads the session to know where it stands. Does not know: HTTP, stores.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from sessions.session import Session

MAX_QUEUED = 1024

Event = dict[str, Any]
Tell = Callable[[str, Session, dict[str, Any]], None]


class Subscription:
    """The events on their way to one reader."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self._events: deque[Event] = deque()
        self._num_lost = 0
        self._has_news = asyncio.Event()
        self._is_closed = False

    def put(self, event: Event) -> None:
        """Queue an event, or count it as lost."""
        if len(self._events) >= MAX_QUEUED:
            self._num_lost += 1
        else:
            self._events.append(event)
        self._has_news.set()

    def close(self) -> None:
        """Let the reader come to its end once it has what is queued."""
        self._is_closed = True
        self._has_news.set()

    async def read(self) -> AsyncGenerator[Event, None]:
        """Yield events until the subscription is closed."""
        while True:
            while self._events:
                yield self._events.popleft()
            if self._num_lost:
                num_lost, self._num_lost = self._num_lost, 0
                yield {"type": "events.lost", "session_id": self.session_id, "num": num_lost}
            if self._is_closed:
                return
            self._has_news.clear()
            await self._has_news.wait()


class SessionHub:
    """Passes events of sessions to their readers. Belongs to one event loop."""

    def __init__(self) -> None:
        self._readers: dict[str, list[Subscription]] = {}
        self._listeners: list[Tell] = []

    def listen(self, listener: Tell) -> None:
        """Call `listener` with every event of every session."""
        self._listeners.append(listener)

    def subscribe(self, session_id: str) -> Subscription:
        """Listen to one session; give the subscription back with `unsubscribe`."""
        subscription = Subscription(session_id)
        self._readers.setdefault(session_id, []).append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Stop listening; harmless when repeated."""
        readers = self._readers.get(subscription.session_id, [])
        if subscription in readers:
            readers.remove(subscription)
        if not readers:
            self._readers.pop(subscription.session_id, None)

    def tell(self, event_type: str, session: Session, fields: dict[str, Any]) -> None:
        """Send an event with the session's state; `session.closed` is the last one."""
        for listener in self._listeners:
            listener(event_type, session, fields)
        self.put(session.id, {"type": event_type, **session_state(session), **fields})
        if event_type == "session.closed":
            self.close(session.id)

    def put(self, session_id: str, event: Event) -> None:
        """Send an event to whoever listens to this session."""
        for reader in self._readers.get(session_id, ()):
            reader.put(event)

    def close(self, session_id: str | None = None) -> None:
        """End the streams of a session, or all of them."""
        chosen = list(self._readers) if session_id is None else [session_id]
        for name in chosen:
            for reader in self._readers.get(name, ()):
                reader.close()


def session_state(session: Session) -> Event:
    """What every event says of its session."""
    return {
        "session_id": session.id,
        "at": time.time(),
        "status": session.status,
        "revision": session.revision,
        "num_tokens": session.num_tokens,
        "current_turn": session.current_turn,
    }
