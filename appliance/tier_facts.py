# SPDX-License-Identifier: Apache-2.0
"""What the engine's tiers can do now: which are up, how fast, whether L1 is short of room.

Asked of the engine, at most every other second. Does not know: sessions, decisions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from engine.api import TierStatus
from engine.client import EngineClient
from sessions.lease_policy import TierRates

FRESH_S = 2.0
ASK_S = 2.0
TIGHT_SHARE = 0.2  # of the L1 pages, free: with fewer, somebody will be evicted soon
UNMEASURED = 1e9  # tokens per second: a tier nobody has timed yet is tried
USABLE = ("up", "degraded")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """rates: tokens per second, 0 for a tier that is not there. kv_bytes_per_token 0: unknown."""

    rates: TierRates
    is_l1_tight: bool
    kv_bytes_per_token: int

    @property
    def has_l2(self) -> bool:
        return self.rates.load_l2 > 0

    @property
    def has_l3(self) -> bool:
        return self.rates.load_l3 > 0


class TierWatch:
    """Remembers the latest facts. Belongs to one event loop."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._facts: TierFacts | None = None
        self._asked_s = 0.0

    async def facts(self) -> TierFacts:
        """Return facts that are fresh enough. Raises: EngineUnavailableError."""
        now_s = time.monotonic()
        if self._facts is None or now_s - self._asked_s > FRESH_S:
            tiers = await self._client.tiers(timeout_s=ASK_S)
            stats = await self._client.stats(timeout_s=ASK_S)
            hello = self._client.hello
            page_size = hello.page_size if hello is not None else 1
            self._facts = facts_of({tier.tier: tier for tier in tiers}, stats, page_size)
            self._asked_s = now_s
        return self._facts


def facts_of(
    tiers: Mapping[str, TierStatus], stats: Mapping[str, float], page_size: int
) -> TierFacts:
    """Read the engine's answers."""
    num_pages = stats.get("num_pages", 0.0)
    l1 = tiers.get("l1")
    page_bytes = l1.capacity_bytes / num_pages if l1 is not None and num_pages else 0.0
    kv_bytes = page_bytes / page_size
    us_per_token = stats.get("prefill_us_per_token", 0.0)
    return TierFacts(
        rates=TierRates(
            prefill=1e6 / us_per_token if us_per_token else 1.0,
            load_l2=_rate(tiers.get("l2"), stats.get("load_back_bytes_per_s", 0.0), kv_bytes),
            load_l3=_rate(tiers.get("l3"), stats.get("fetch_bytes_per_s", 0.0), kv_bytes),
        ),
        is_l1_tight=stats.get("free_pages", num_pages) < TIGHT_SHARE * num_pages,
        kv_bytes_per_token=int(kv_bytes),
    )


def _rate(tier: TierStatus | None, bytes_per_s: float, kv_bytes: float) -> float:
    if tier is None or tier.state not in USABLE:
        return 0.0
    return bytes_per_s / kv_bytes if bytes_per_s and kv_bytes else UNMEASURED
