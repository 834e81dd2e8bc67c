# SPDX-License-Identifier: Apache-2.0
"""Leases as peers know them: the names they chose, and who hears when a lease changes.

Does not know: pages, budgets (the scheduler decides), steps.
"""

from __future__ import annotations

import itertools

import numpy as np

from _scheduler import Scheduler
from engine import api
from engine.errors import RequestError
from engine.loop.outbox import Outbox
from engine.transport import unpack_ids

MAX_TTL_MS = 1 << 40
MAX_LEASES = 65_536
ENDED = ("denied", "expired")
TIERS = ("l1", "l2", "l3")


class LeaseDesk:
    """Between peers and the scheduler's lease book. One thread."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox) -> None:
        self._scheduler = scheduler
        self._outbox = outbox
        self._numbers = itertools.count(1)
        self._number_of: dict[str, int] = {}
        self._holders: dict[int, tuple[str, bytes]] = {}

    def lease(self, peer: bytes, message: api.LeasePrefix, now_ms: int) -> api.LeaseReply:
        """Grant what can be.

        Raises: ValueError for broken ids, a wrong ttl, too many leases, a tier there is not.
        """
        if message.tier not in TIERS:
            raise RequestError("tier", message.tier, ", ".join(TIERS))
        if not 0 < message.ttl_ms <= MAX_TTL_MS:
            raise RequestError("ttl_ms", message.ttl_ms, f"1 to {MAX_TTL_MS}")
        if message.lease_id not in self._number_of and len(self._holders) >= MAX_LEASES:
            raise RequestError("lease_id", message.lease_id, f"at most {MAX_LEASES} leases")
        token_ids = unpack_ids(message.token_ids).astype(np.int32)
        number = self._number_of.get(message.lease_id) or next(self._numbers)
        grant = self._scheduler.lease(
            lease_id=number,
            token_ids=token_ids,
            until_ms=now_ms + message.ttl_ms,
            tenant=message.tenant,
            salt=message.salt,
            tier=message.tier,
        )
        if grant.state == "denied":
            self._forget(number)
        else:
            self._number_of[message.lease_id] = number
            self._holders[number] = (message.lease_id, peer)
        return api.LeaseReply(
            query_id=message.query_id,
            state=grant.state,
            tokens_requested=grant.tokens_requested,
            tokens_granted=grant.tokens_granted,
            reason=grant.reason,
        )

    def release(self, lease_id: str) -> None:
        """End a lease, if there is one."""
        number = self._number_of.get(lease_id)
        if number is not None:
            self._scheduler.release(number)
            self._forget(number)

    def tell(self) -> None:
        """Tell holders what became of their leases since the last call."""
        told = False
        for event in self._scheduler.drain_lease_events():
            holder = self._holders.get(event.lease_id)
            if holder is None:
                continue
            lease_id, peer = holder
            change = api.LeaseChanged(
                lease_id=lease_id, kind=event.kind, num_tokens=event.num_tokens
            )
            self._outbox.reply(peer, change)
            told = True
            if event.kind in ENDED or (event.kind == "revoked" and not event.num_tokens):
                self._forget(event.lease_id)
        if told:
            self._outbox.flush()

    def _forget(self, number: int) -> None:
        lease_id, _ = self._holders.pop(number, ("", b""))
        self._number_of.pop(lease_id, None)
