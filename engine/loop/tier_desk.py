# SPDX-License-Identifier: Apache-2.0
"""Peers' wishes about tiers: move a prefix, say how the tiers are, drain them, check them.

Whoever asked for a move or a drain hears when the transfers it caused are over. Does not know: how
bytes move, steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from _scheduler import Scheduler
from engine import api
from engine.errors import RequestError
from engine.loop.outbox import Outbox
from engine.loop.store_checks import StoreCheck
from engine.loop.tier_plane import TierPlane, Verification
from engine.loop.tier_report import TierReporter
from engine.transport import unpack_ids

TIERS = ("l1", "l2", "l3", "none")
MOVE_ANSWER_MS = 30_000
MOVE_STUCK_MS = 3_000  # no page nearer for so long: the answer says how far it is
LOOK_EVERY_MS = 100
CHECK_MS = 1_000  # a store that does not say what it has is believed to have it
MAX_TIMEOUT_MS = 600_000
MAX_VERIFIED_PAGES = 1 << 20

TierMessage = api.MovePrefix | api.QueryTiers | api.DrainTiers | api.VerifyTiers


@dataclass(slots=True, kw_only=True, eq=False)
class _Move:
    peer: bytes
    query_id: str
    token_ids: NDArray[np.int32]
    tier: str
    salt: str
    deadline_ms: int
    look_at_ms: int
    acks_seen: int
    check: StoreCheck | None = None
    check_until_ms: int = 0
    least_pending: int = 1 << 62
    stuck_at_ms: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Drain:
    peer: bytes
    query_id: str
    deadline_ms: int
    pages_before: float
    lost_before: float
    is_flushing: bool = False
    is_flushed: bool | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Check:
    peer: bytes
    query_id: str
    result: Verification


class TierDesk:
    """Between peers and the tiers. One thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        outbox: Outbox,
        plane: TierPlane | None,
        reporter: TierReporter,
        page_size: int,
    ) -> None:
        self._scheduler = scheduler
        self._outbox = outbox
        self._plane = plane
        self._reporter = reporter
        self._page_size = page_size
        self._moves: list[_Move] = []
        self._drains: list[_Drain] = []
        self._checks: list[_Check] = []

    def take(self, peer: bytes, message: TierMessage, now_ms: int) -> None:
        """Answer, now or when what was asked for is done. Raises: ValueError for a wrong field."""
        match message:
            case api.MovePrefix():
                self._begin_move(peer, message, now_ms)
            case api.QueryTiers():
                tiers = self._reporter.status()
                self._outbox.reply(peer, api.TiersReply(query_id=message.query_id, tiers=tiers))
            case api.DrainTiers():
                self._begin_drain(peer, message, now_ms)
            case api.VerifyTiers():
                self._begin_verify(peer, message)

    def serve(self, now_ms: int) -> None:
        """Answer whoever waits for transfers that are over by now. Call it after each plan."""
        if self._moves:
            self._moves = [move for move in self._moves if not self._try_move(move, now_ms)]
        if self._drains:
            self._drains = [drain for drain in self._drains if not self._try_drain(drain, now_ms)]
        if self._checks:
            self._checks = [check for check in self._checks if not self._try_check(check)]

    @property
    def next_deadline_ms(self) -> int | None:
        """When `serve` has something to do, whether or not anything was acked."""
        deadlines = [min(move.deadline_ms, move.look_at_ms) for move in self._moves]
        deadlines += [drain.deadline_ms for drain in self._drains]
        return min(deadlines, default=None)

    # Moves --------------------------------------------------------------------------------

    def _begin_move(self, peer: bytes, message: api.MovePrefix, now_ms: int) -> None:
        if message.tier not in TIERS:
            raise RequestError("tier", message.tier, " | ".join(TIERS))
        token_ids = unpack_ids(message.token_ids).astype(np.int32)
        plane, check = self._plane, None
        if plane is not None:
            last = plane.names.note(token_ids, message.salt)
            if message.tier == "l3" and plane.transfers.store is not None:
                check = plane.check_l3(last)
        move = _Move(
            peer=peer,
            query_id=message.query_id,
            token_ids=token_ids,
            tier=message.tier,
            salt=message.salt,
            deadline_ms=now_ms + MOVE_ANSWER_MS,
            look_at_ms=now_ms,
            acks_seen=-1,
            check=check,
            check_until_ms=now_ms + CHECK_MS,
        )
        self._moves.append(move)

    def _try_move(self, move: _Move, now_ms: int) -> bool:
        """Answer a move that is over; False: it goes on."""
        plane = self._plane
        num_acks = 0 if plane is None else plane.num_acks
        if num_acks == move.acks_seen and now_ms < min(move.look_at_ms, move.deadline_ms):
            return False
        move.acks_seen, move.look_at_ms = num_acks, now_ms + LOOK_EVERY_MS
        if move.check is not None and not move.check.is_done and now_ms < move.check_until_ms:
            return False  # what leaves L1 must be where it is thought to be
        try:
            num_pending = self._order(move)
        except ValueError as error:  # what the scheduler does not take costs its sender an answer
            refusal = api.QueryRefused(
                query_id=move.query_id, error_code="invalid_request", error_message=str(error)
            )
            self._outbox.reply(move.peer, refusal)
            return True
        if num_pending < move.least_pending:
            move.least_pending = num_pending
            move.stuck_at_ms = min(move.deadline_ms, now_ms + MOVE_STUCK_MS)
        if num_pending and now_ms < move.stuck_at_ms:
            return False
        self._outbox.reply(
            move.peer,
            api.MoveReply(
                query_id=move.query_id,
                cache=self._where(move.token_ids, move.salt),
                num_pending=num_pending,
            ),
        )
        return True

    def _order(self, move: _Move) -> int:
        """Have the prefix moved, or ask how far that is: pages that are not there yet."""
        plane = self._plane
        is_nowhere = plane is None or (move.tier == "l3" and plane.transfers.store is None)
        if is_nowhere and move.tier != "none":
            return 0  # there is nowhere to go
        result = self._scheduler.move(move.token_ids, move.tier, move.salt)
        return -(-result.tokens_pending // self._page_size)

    def _where(self, token_ids: NDArray[np.int32], salt: str) -> api.CacheHit:
        hit = self._scheduler.query_prefix(token_ids, salt)
        rest = len(token_ids) - hit.l1 - hit.l2 - hit.l3
        return api.CacheHit(l1=hit.l1, l2=hit.l2, l3=hit.l3, to_compute=rest)

    # Drains -------------------------------------------------------------------------------

    def _begin_drain(self, peer: bytes, message: api.DrainTiers, now_ms: int) -> None:
        if not 0 <= message.timeout_ms <= MAX_TIMEOUT_MS:
            raise RequestError("timeout_ms", message.timeout_ms, f"0 to {MAX_TIMEOUT_MS}")
        if self._plane is None:
            self._outbox.reply(peer, api.DrainReply(query_id=message.query_id, num_pages=0))
            return
        pages, lost = self._reporter.lowered()
        self._drains.append(
            _Drain(
                peer=peer,
                query_id=message.query_id,
                deadline_ms=now_ms + message.timeout_ms,
                pages_before=pages,
                lost_before=lost,
            )
        )

    def _try_drain(self, drain: _Drain, now_ms: int) -> bool:
        """Answer a drain that is over; False: it goes on."""
        plane = self._plane
        assert plane is not None
        is_late = now_ms >= drain.deadline_ms
        if not is_late and plane.num_in_flight:
            return False
        if not is_late and not drain.is_flushing:
            drain.is_flushing = True

            def flushed(is_flushed: bool) -> None:
                drain.is_flushed = is_flushed

            plane.transfers.flush((drain.deadline_ms - now_ms) / 1000, flushed)
        if not is_late and drain.is_flushed is None:
            return False
        pages, lost = self._reporter.lowered()
        self._outbox.reply(
            drain.peer,
            api.DrainReply(
                query_id=drain.query_id,
                num_pages=int(pages - drain.pages_before),
                num_lost=int(lost - drain.lost_before),
                num_pending=plane.num_in_flight,
                is_flushed=drain.is_flushed is True,
            ),
        )
        return True

    # Checks -------------------------------------------------------------------------------

    def _begin_verify(self, peer: bytes, message: api.VerifyTiers) -> None:
        if not 0 <= message.max_pages <= MAX_VERIFIED_PAGES:
            raise RequestError("max_pages", message.max_pages, f"0 to {MAX_VERIFIED_PAGES}")
        plane, query_id = self._plane, message.query_id
        if plane is None:
            empty = {"l2": 0, "l3": 0}
            self._outbox.reply(peer, api.VerifyReply(query_id=query_id, checked=empty, bad=empty))
            return
        check = plane.verify(message.max_pages)
        self._checks.append(_Check(peer=peer, query_id=query_id, result=check))

    def _try_check(self, check: _Check) -> bool:
        """Answer a check that is over; False: it goes on."""
        if not check.result.is_done:
            return False
        found = check.result.found
        reply = api.VerifyReply(
            query_id=check.query_id,
            checked={tier: result.num_checked for tier, result in found.items()},
            bad={tier: result.num_bad for tier, result in found.items()},
        )
        self._outbox.reply(check.peer, reply)
        return True
