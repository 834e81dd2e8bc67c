# SPDX-License-Identifier: Apache-2.0
"""A store's connection to Mooncake: made when it can be, left when it is dead, made anew.

Does not know: pages, what is asked. Threads: any, several at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from kvtiers.deadlines import CallNotDoneError
from kvtiers.mooncake_client import NO_SPACE, MooncakeClient
from kvtiers.mooncake_endpoints import MooncakeEndpoints, read_endpoints

# Answers of a library that works: no space, and an object that is not ready, not there, there
# already, in use, or whose lease ran out under a read. Anything else is a failure.
WORKING_CODES = frozenset((NO_SPACE, -703, -704, -705, -706, -707))
RETRY_S = 1.0
# The library finds its owner again in 2 to 5 s, but not always: where an owner did not hear of this
# client for a while it may keep its old memory, and refuse the same memory for ever after.
RENEW_S = 6.0


class MooncakeConnection:
    """Connects at the first call of `get` that finds the owner listening.

    Args:
        path: the file that says where Mooncake listens; read again at every new connection.
        slot_bytes, ring_bytes: of the shared memory that objects pass through.
        now_s: a clock that never goes back.
        when_made, when_left: told of each connection, before anybody has it and when it is left.
    """

    def __init__(
        self,
        path: Path,
        slot_bytes: int,
        ring_bytes: int,
        *,
        now_s: Callable[[], float],
        when_made: Callable[[MooncakeEndpoints], None],
        when_left: Callable[[], None],
    ) -> None:
        self._path = path
        self._slot_bytes = slot_bytes
        self._num_slots = max(2, ring_bytes // slot_bytes)
        self._now_s = now_s
        self._when_made = when_made
        self._when_left = when_left
        self._connecting = threading.Lock()
        self._counting = threading.Lock()
        self._is_closed = False
        self._retry_at_s = -1e9
        self._failing_since_s: float | None = None
        self.client: MooncakeClient | None = None
        self.endpoints = MooncakeEndpoints(owner="")
        self.reason = ""
        """Why it is not well; empty while it is."""
        self.num_made = 0
        self.num_failures = 0

    def get(self) -> MooncakeClient | None:
        """The client, made anew where there is none; None where it cannot be made now."""
        client = self.client
        if client is not None:
            return client
        with self._connecting:
            if self.client is None and not self._is_closed and self._now_s() >= self._retry_at_s:
                try:
                    self.endpoints = read_endpoints(self._path)
                    made = MooncakeClient(self.endpoints.owner, self._slot_bytes, self._num_slots)
                except OSError as error:
                    self._retry_at_s = self._now_s() + RETRY_S
                    self.reason = str(error)
                else:
                    self._when_made(self.endpoints)
                    self.client, self.reason = made, ""
                    self.num_made += 1
            return self.client

    def ask(self, call: Callable[[], list[int]], *allowed: int) -> list[int]:
        """The codes a call answers, none where it does not; failures are counted."""
        try:
            codes = call()
        except CallNotDoneError as error:
            problem, codes = str(error), []
        else:
            fine = WORKING_CODES.union(allowed)
            wrong = [code for code in codes if code < 0 and code not in fine]
            problem = f"the library answered {wrong[0]}" if wrong else ""
            if not codes:
                problem = "the library answered nothing"
        if self._is_closed:
            return codes
        self.reason = problem
        if problem:
            with self._counting:
                self.num_failures += 1
            self._leave_if_dead()
        else:
            self._failing_since_s = None
        return codes

    def close(self) -> None:
        self._is_closed = True
        with self._connecting:
            self._leave("closed")

    def _leave_if_dead(self) -> None:
        """After a failure: an owner that was started again needs a new connection, and so does a
        library that does not find its owner again by itself."""
        now_s = self._now_s()
        with self._connecting:
            if self._failing_since_s is None:
                self._failing_since_s = now_s
            try:
                is_new = read_endpoints(self._path) != self.endpoints
            except OSError:
                return
            is_lost = now_s - self._failing_since_s >= RENEW_S
            if self.client is not None and (is_new or is_lost):
                self._failing_since_s = None
                self._leave(
                    "the owner was started again" if is_new else "the connection is made anew"
                )

    def _leave(self, reason: str) -> None:
        client, self.client = self.client, None
        self.reason = reason
        self._when_left()
        if client is not None:
            client.close()
