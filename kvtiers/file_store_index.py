# SPDX-License-Identifier: Apache-2.0
"""Which objects a file store has, where, and in which order they may go (kvtiers.page_order).

Does not know: files, locks.

Invariants, beside those of the order: `live_by_segment` has sums over the records held.
"""

from __future__ import annotations

from kvtiers.file_store_segments import Record
from kvtiers.page_order import PageOrder


class PageIndex(PageOrder[Record]):
    """Records by key hash, the one to go first in front."""

    def __init__(self) -> None:
        super().__init__()
        self._hashes: dict[str, set[bytes]] = {}
        self.live_by_segment: dict[str, int] = {}

    def discard_segment(self, segment: str) -> int:
        """Forget all records of a segment; how many there were."""
        records = self.records_of(segment)
        for record in records:
            self.discard(record)
        return len(records)

    def records_of(self, segment: str) -> list[Record]:
        """What is held of a segment, in file order."""
        held = [self._pages[key_hash] for key_hash in self._hashes.get(segment, ())]
        return sorted(held, key=lambda record: record.offset)

    def _count(self, page: Record, sign: int) -> None:
        super()._count(page, sign)
        hashes = self._hashes.setdefault(page.segment, set())
        if sign > 0:
            hashes.add(page.key_hash)
        else:
            hashes.discard(page.key_hash)
        left = self.live_by_segment.get(page.segment, 0) + sign * page.num_bytes
        self.live_by_segment[page.segment] = left
        if not left and not hashes:
            del self.live_by_segment[page.segment], self._hashes[page.segment]
