# SPDX-License-Identifier: Apache-2.0
"""Peers' wishes about tiers: move a prefix, say how the tiers are, drain them, check them.

A move is answered when the transfers it caused are over. Does not know: how bytes move, steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from _scheduler import Scheduler
from engine import api
from engine.errors import RequestError
from engine.loop.outbox import Outbox
from engine.transport import unpack_ids

TIERS = ("l1", "l2", "l3", "none")

TierMessage = api.MovePrefix | api.QueryTiers | api.DrainTiers | api.VerifyTiers


class TierDesk:
    """Between peers and the tiers. One thread."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox) -> None:
        self._scheduler = scheduler
        self._outbox = outbox

    def take(self, peer: bytes, message: TierMessage, now_ms: int) -> None:
        """Answer, now or when what was asked for is done. Raises: ValueError for a wrong field."""
        query_id = message.query_id
        match message:
            case api.MovePrefix():
                self._outbox.reply(peer, self._move(message))
            case api.QueryTiers():
                self._outbox.reply(peer, api.TiersReply(query_id=query_id, tiers=self._status()))
            case api.DrainTiers():
                self._outbox.reply(peer, api.DrainReply(query_id=query_id, num_pages=0))
            case api.VerifyTiers():
                self._outbox.reply(peer, api.VerifyReply(query_id=query_id, checked={}, bad={}))

    def serve(self, now_ms: int) -> None:
        """Answer whoever waits for transfers that are over by now."""

    def _move(self, message: api.MovePrefix) -> api.MoveReply:
        if message.tier not in TIERS:
            raise RequestError("tier", message.tier, " | ".join(TIERS))
        token_ids = unpack_ids(message.token_ids).astype(np.int32)
        if message.tier == "none":
            self._scheduler.move(token_ids, "none", message.salt)
        return api.MoveReply(
            query_id=message.query_id, cache=self._where(token_ids, message.salt), num_pending=0
        )

    def _where(self, token_ids: NDArray[np.int32], salt: str) -> api.CacheHit:
        hit = self._scheduler.query_prefix(token_ids, salt)
        rest = len(token_ids) - hit.l1 - hit.l2 - hit.l3
        return api.CacheHit(l1=hit.l1, l2=hit.l2, l3=hit.l3, to_compute=rest)

    def _status(self) -> tuple[api.TierStatus, ...]:
        stats = self._scheduler.stats()
        used = stats["num_pages"] - stats["free_pages"]
        return (
            api.TierStatus(tier="l1", kind="cpu", state="up", num_pages=used),
            api.TierStatus(tier="l2", kind="none", state="off", reason="not configured"),
            api.TierStatus(tier="l3", kind="none", state="off", reason="not configured"),
        )
