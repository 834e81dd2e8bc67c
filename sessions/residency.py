# SPDX-License-Identifier: Apache-2.0
"""How many tokens of each session sit in L1, L2 and L3: a fold over KV events.

Does not know: the engine, nor how pages move. A page is its chained hash (16 bytes); the engine
hands the hashes of a history out with each turn, so nothing is computed here.

Events: `stored` puts a page into a tier, `removed` takes it out of one, `moved` puts it into one
and takes it out of the others. Residency is what was last said: correctness never rests on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sessions.lease_policy import TierTokens

HASH_BYTES: Final = 16
_BITS: Final = {"l1": 1, "l2": 2, "l3": 4}


class Residency:
    """Pages by tier, and the chains of pages that are sessions. Owned by one event loop."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tiers_of: dict[bytes, int] = {}
        self._chains: dict[str, tuple[bytes, ...]] = {}

    def track(self, session_id: str, page_hashes: bytes) -> None:
        """Set the pages of a session's history, 16 bytes each, in order.

        Raises ValueError for a length that is no multiple of 16.
        """
        if len(page_hashes) % HASH_BYTES:
            raise ValueError(f"page_hashes: {len(page_hashes)} bytes, not a multiple of 16")
        known = self._chains.get(session_id, ())
        end = len(known) * HASH_BYTES
        # Hashes are chained: where the last one known is still there, all before it are.
        if known and page_hashes[end - HASH_BYTES : end] != known[-1]:
            known, end = (), 0
        new = range(end, len(page_hashes), HASH_BYTES)
        self._chains[session_id] = known + tuple(
            page_hashes[start : start + HASH_BYTES] for start in new
        )

    def forget(self, session_id: str) -> None:
        """Stop tracking a session."""
        self._chains.pop(session_id, None)

    def apply(self, kind: str, tier: str, page_hash: bytes) -> None:
        """Fold one event in. Raises ValueError for a kind or tier that does not exist."""
        bit = _BITS.get(tier)
        if bit is None:
            raise ValueError(f"tier: {tier!r} is not one of {', '.join(_BITS)}")
        tiers = self._tiers_of.get(page_hash, 0)
        if kind == "stored":
            tiers |= bit
        elif kind == "moved":
            tiers = bit
        elif kind == "removed":
            tiers &= ~bit
        else:
            raise ValueError(f"kind: {kind!r} is not one of stored, moved, removed")
        if tiers:
            self._tiers_of[page_hash] = tiers
        else:
            self._tiers_of.pop(page_hash, None)

    def clear(self) -> None:
        """Forget where pages are; the sessions stay tracked."""
        self._tiers_of.clear()

    def clear_tier(self, tier: str) -> None:
        """A tier lost everything (L1 when the engine restarts)."""
        keep = ~_BITS[tier]
        left = ((page, tiers & keep) for page, tiers in self._tiers_of.items())
        self._tiers_of = {page: tiers for page, tiers in left if tiers}

    def tokens(self, session_id: str) -> TierTokens:
        """Tokens of the session by tier, up to its first page that is nowhere.

        What lies behind such a page is of no use: a prefix is used from its head on.
        """
        pages = [0, 0, 0]
        for page_hash in self._chains.get(session_id, ()):
            tiers = self._tiers_of.get(page_hash, 0)
            if not tiers:
                break
            for index, bit in enumerate(_BITS.values()):
                pages[index] += bool(tiers & bit)
        l1, l2, l3 = (num_pages * self._page_size for num_pages in pages)
        return TierTokens(l1=l1, l2=l2, l3=l3)

    def shared_tokens(self, session_id: str) -> int:
        """Tokens of the session's head that another tracked session has too."""
        chain = self._chains.get(session_id, ())
        shared = 0
        for other_id, other in self._chains.items():
            if other_id != session_id:
                shared = max(shared, _common_pages(chain, other))
        return shared * self._page_size

    @property
    def num_pages(self) -> int:
        """Pages known to be somewhere."""
        return len(self._tiers_of)


def _common_pages(left: tuple[bytes, ...], right: tuple[bytes, ...]) -> int:
    # Hashes are chained: the first difference is the end, so it can be searched by halves.
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCost:
    """Byte-seconds a session has held in each tier, and when that was last added up."""

    l1_byte_s: float = 0.0
    l2_byte_s: float = 0.0
    l3_byte_s: float = 0.0
    sampled_at_ms: int = 0

    @property
    def total(self) -> float:
        """Byte-seconds in all tiers."""
        return self.l1_byte_s + self.l2_byte_s + self.l3_byte_s

    def added(self, other: TierCost) -> TierCost:
        """Both together."""
        return TierCost(
            l1_byte_s=self.l1_byte_s + other.l1_byte_s,
            l2_byte_s=self.l2_byte_s + other.l2_byte_s,
            l3_byte_s=self.l3_byte_s + other.l3_byte_s,
            sampled_at_ms=max(self.sampled_at_ms, other.sampled_at_ms),
        )

    def plus(self, resident: TierTokens, kv_bytes_per_token: int, now_ms: int) -> TierCost:
        """The cost at `now_ms`, if `resident` held since the last sample; time never runs back."""
        elapsed_s = max(0, now_ms - self.sampled_at_ms) / 1000 if self.sampled_at_ms else 0.0
        weight = kv_bytes_per_token * elapsed_s
        return TierCost(
            l1_byte_s=self.l1_byte_s + resident.l1 * weight,
            l2_byte_s=self.l2_byte_s + resident.l2 * weight,
            l3_byte_s=self.l3_byte_s + resident.l3 * weight,
            sampled_at_ms=max(now_ms, self.sampled_at_ms),
        )
