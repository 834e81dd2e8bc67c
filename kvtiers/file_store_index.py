# SPDX-License-Identifier: Apache-2.0
"""Which objects a file store has, where, and in which order they may go.

Does not know: files, locks. The order is least recently used first, with one rule on top: a page
stands before (goes before) every page it follows. Using a page uses all the pages before it, so
whatever stands first has no page that still needs it, and heads never go before tails.

Invariants: `live_bytes` and `live_by_segment` are sums over the records held; for every record
whose parent is held, the record stands before its parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvtiers.file_store_segments import Record


class PageIndex:
    """Records by key hash, the one to go first in front."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, Record] = OrderedDict()
        self._hashes: dict[str, set[bytes]] = {}
        self.live_bytes = 0
        self.live_by_segment: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key_hash: bytes) -> bool:
        return key_hash in self._records

    def find(self, key_hash: bytes) -> Record | None:
        return self._records.get(key_hash)

    def add(self, record: Record) -> None:
        """Take a record in, in place of an older one of its key; it keeps that one's turn."""
        old = self._records.get(record.key_hash)
        if old is not None:
            self._leave(old)
        self._records[record.key_hash] = record
        self._hashes.setdefault(record.segment, set()).add(record.key_hash)
        self._count(record, +1)

    def discard(self, record: Record) -> bool:
        """Forget a record, unless its key has another one by now."""
        if self._records.get(record.key_hash) is not record:
            return False
        self._leave(record)
        del self._records[record.key_hash]
        return True

    def discard_segment(self, segment: str) -> int:
        """Forget all records of a segment; how many there were."""
        records = self.records_of(segment)
        for record in records:
            self.discard(record)
        return len(records)

    def records_of(self, segment: str) -> list[Record]:
        """What is held of a segment, in file order."""
        held = [self._records[key_hash] for key_hash in self._hashes.get(segment, ())]
        return sorted(held, key=lambda record: record.offset)

    def in_order(self) -> Iterator[Record]:
        """Every record, the one to go first in front."""
        return iter(self._records.values())

    def oldest(self) -> Record | None:
        """The record to go first; no record held follows it."""
        return next(iter(self._records.values()), None)

    def bytes_of(self, key_hashes: Iterable[bytes]) -> int:
        """What these take in their files."""
        return sum(self._records[key_hash].num_bytes for key_hash in key_hashes)

    def touch(self, key_hashes: Iterable[bytes]) -> set[bytes]:
        """These were used now, and so were all pages before them; returns those held of both."""
        return self._renew(reversed(list(key_hashes)))

    def settle(self) -> None:
        """Restore the rule after records were added in the order of their last use."""
        self._renew(reversed(list(self._records)))

    def _renew(self, newest_first: Iterable[bytes]) -> set[bytes]:
        """Move chains to the end so that the newest ends last and parents end behind children."""
        seen: set[bytes] = set()
        order: list[bytes] = []
        for key_hash in newest_first:
            chain: list[bytes] = []
            at = key_hash
            # A wrong parent may close a circle: `seen` ends the walk.
            while at not in seen and at in self._records:
                seen.add(at)
                chain.append(at)
                at = self._records[at].parent_hash
            order.extend(reversed(chain))
        for key_hash in reversed(order):
            self._records.move_to_end(key_hash)
        return seen

    def _leave(self, record: Record) -> None:
        self._hashes[record.segment].discard(record.key_hash)
        self._count(record, -1)

    def _count(self, record: Record, sign: int) -> None:
        change = sign * record.num_bytes
        self.live_bytes += change
        left = self.live_by_segment.get(record.segment, 0) + change
        self.live_by_segment[record.segment] = left
        if not left and not self._hashes[record.segment]:
            del self.live_by_segment[record.segment], self._hashes[record.segment]
