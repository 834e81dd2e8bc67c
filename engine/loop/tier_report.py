# SPDX-License-Identifier: Apache-2.0
"""How the tiers are: sizes, states and counters, for people and for metrics.

Does not know: who asks, how a page moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from _scheduler import Scheduler
from engine import api
from kvtiers.store import StoreState
from kvtiers.transfer import TransferEngine
from kvtiers.transfer_queues import MoveKind

_INTO = {
    "l1": (MoveKind.LOAD_BACK,),
    "l2": (MoveKind.WRITE_BACK, MoveKind.FETCH),
    "l3": (MoveKind.STORE,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """What does not change while the engine lives."""

    device_kind: str  # cpu | cuda
    page_bytes: int  # 0: the model runner shows no pool
    l2_reason: str = ""  # why there is no L2
    l3_reason: str = ""  # why there is no L3


class TierReporter:
    """Reads the scheduler's and the transfers' counts. One thread."""

    def __init__(
        self, scheduler: Scheduler, transfers: TransferEngine | None, facts: TierFacts
    ) -> None:
        self._scheduler = scheduler
        self._transfers = transfers
        self._facts = facts

    def status(self) -> tuple[api.TierStatus, ...]:
        """L1, L2 and L3, in this order."""
        stats = self._scheduler.stats()
        return (self._l1(stats), self._l2(stats), self._l3(stats))

    def stats(self) -> dict[str, float]:
        """By the names StatsReply carries; empty where there is one tier only."""
        if self._transfers is None:
            return {}
        named = self._transfers.counters()
        store = self._transfers.store
        if store is not None:
            status = store.status()
            named["l3_up"] = float(status.state is StoreState.UP)
            named["l3_used_bytes"] = float(status.used_bytes)
            named["l3_capacity_bytes"] = float(status.capacity_bytes)
            named["l3_objects"] = float(status.num_objects)
            named.update({f"l3_{name}": float(n) for name, n in status.counters.items()})
        return named

    def lowered(self) -> tuple[float, float]:
        """Pages that came down a tier since the start, and pages that could not."""
        if self._transfers is None:
            return 0.0, 0.0
        named = self._transfers.rates.as_dict()
        return (
            named["write_back_pages"] + named["store_pages"],
            named["write_back_lost"] + named["store_lost"],
        )

    def _l1(self, stats: dict[str, int]) -> api.TierStatus:
        used = stats["num_pages"] - stats["free_pages"]
        return api.TierStatus(
            tier="l1",
            kind=self._facts.device_kind,
            state="up",
            used_bytes=used * self._facts.page_bytes,
            capacity_bytes=stats["num_pages"] * self._facts.page_bytes,
            num_pages=used,
            counters={"evicted_pages": float(stats["evicted_pages"]), **self._moves("l1")},
        )

    def _l2(self, stats: dict[str, int]) -> api.TierStatus:
        if self._transfers is None:
            return api.TierStatus(tier="l2", kind="none", state="off", reason=self._facts.l2_reason)
        pool = self._transfers.pool
        used = stats["num_l2_pages"] - stats["free_l2_pages"]
        return api.TierStatus(
            tier="l2",
            kind="shared_memory" if pool.region.is_shared else "private_memory",
            state="up",
            used_bytes=used * pool.shape.slot_bytes,
            capacity_bytes=pool.num_slots * pool.shape.slot_bytes,
            num_pages=used,
            counters=self._moves("l2"),
        )

    def _l3(self, stats: dict[str, int]) -> api.TierStatus:
        store = self._transfers.store if self._transfers is not None else None
        if store is None:
            return api.TierStatus(tier="l3", kind="none", state="off", reason=self._facts.l3_reason)
        status = store.status()
        counters = {name: float(count) for name, count in status.counters.items()}
        return api.TierStatus(
            tier="l3",
            kind=status.kind,
            state=status.state.value,
            reason=status.reason,
            used_bytes=status.used_bytes,
            capacity_bytes=status.capacity_bytes,
            num_pages=status.num_objects,
            counters={**counters, **self._moves("l3")},
        )

    def _moves(self, tier: str) -> dict[str, float]:
        """What came into a tier, by kind of move."""
        if self._transfers is None:
            return {}
        prefixes = tuple(f"{kind.name.lower()}_" for kind in _INTO[tier])
        named = self._transfers.rates.as_dict()
        return {name: value for name, value in named.items() if name.startswith(prefixes)}
