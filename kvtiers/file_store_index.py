# SPDX-License-Identifier: Apache-2.0
"""Which objects a file store has, where, and in which order they may go.

Does not know: files, locks. The order is least recently used first, with one rule on top: a page
stands before (goes before) every page it follows. Using a page uses all the pages before it, so
whatever stands first has no page that still needs it, and heads never go before tails.

Where sessions take turns in a loop larger than the store, the least recently used page is always
the next one wanted. While it is so (kvtiers.file_store_reuse), a page that was lost and is put
again stands on probation: it goes before all others until it is read. So what others read again
stays, and is read in the next round too.

Invariants: `live_bytes` and `live_by_segment` are sums over the records held; for every record
whose parent is held, the record stands before its parent; of a page that is not on probation
none before it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import chain as chained

from kvtiers.file_store_reuse import ReuseHistory
from kvtiers.file_store_segments import Record


class PageIndex:
    """Records by key hash, the one to go first in front."""

    def __init__(self) -> None:
        self._records: dict[bytes, Record] = {}
        self._proven: OrderedDict[bytes, None] = OrderedDict()
        self._probation: OrderedDict[bytes, None] = OrderedDict()  # all of it goes first
        self._num_followers: dict[bytes, int] = {}  # by the page they follow, held or not
        self._reuse = ReuseHistory()
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
        if old is None:
            self._place(record)
        self._follow(record, +1)
        self._hashes.setdefault(record.segment, set()).add(record.key_hash)
        self._count(record, +1)

    def discard(self, record: Record) -> bool:
        """Forget a record, unless its key has another one by now."""
        if self._records.get(record.key_hash) is not record:
            return False
        self._leave(record)
        del self._records[record.key_hash]
        self._proven.pop(record.key_hash, None)
        self._probation.pop(record.key_hash, None)
        self._reuse.forget(record.key_hash)
        return True

    def evict(self, spared: Collection[bytes] = ()) -> bool:
        """Let the record go that stands first, none of these; whether there was one."""
        record = self.oldest()
        if record is not None and record.key_hash in spared:
            # Those in use stand last, so all of probation is in use.
            record = self._first(self._proven)
        if record is None:
            return False
        self._reuse.lose(record.key_hash, len(self))
        return self.discard(record)

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
        return (self._records[key_hash] for key_hash in chained(self._probation, self._proven))

    def oldest(self) -> Record | None:
        """The record to go first; no record held follows it."""
        return self._first(self._probation) or self._first(self._proven)

    def bytes_of(self, key_hashes: Iterable[bytes]) -> int:
        """What these take in their files."""
        return sum(self._records[key_hash].num_bytes for key_hash in key_hashes)

    def touch(self, key_hashes: Iterable[bytes], *, proves: bool = True) -> set[bytes]:
        """These were used now, and so were all pages before them; returns those held of both.

        proves: they were read, which ends their probation.
        """
        hashes = list(key_hashes)
        if proves:
            for key_hash in hashes:
                if key_hash in self._records:
                    self._reuse.note(self._reuse.age(key_hash), len(self))
        return self._renew(reversed(hashes), proves=proves)

    def settle(self) -> None:
        """Restore the rule after records were added in the order of their last use."""
        self._renew(reversed(list(self._records)), proves=True)

    def _renew(self, newest_first: Iterable[bytes], *, proves: bool) -> set[bytes]:
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
            self._reuse.use(key_hash)
            if proves and key_hash in self._probation:
                del self._probation[key_hash]
                self._proven[key_hash] = None
            line = self._probation if key_hash in self._probation else self._proven
            line.move_to_end(key_hash)
        return seen

    def _place(self, record: Record) -> None:
        """A page that was not held: on probation, or behind all others."""
        key_hash = record.key_hash
        is_doubtful = self._came_back_late(key_hash) or record.parent_hash in self._probation
        if is_doubtful and key_hash not in self._num_followers:
            self._probation[key_hash] = None
            self._reuse.use(key_hash)
            return
        self._proven[key_hash] = None
        self._reuse.use(key_hash)
        if is_doubtful:
            self._renew([key_hash], proves=True)

    def _came_back_late(self, key_hash: bytes) -> bool:
        distance = self._reuse.find_lost(key_hash)
        if distance is None:
            return False
        self._reuse.note(distance, len(self))
        # What has waited longer than this one was away is likely dead, and goes first.
        waiting = next(iter(self._proven), None)
        has_waited = self._reuse.age(waiting) if waiting is not None else 0
        return self._reuse.is_looping(len(self)) and distance >= has_waited

    def _first(self, line: OrderedDict[bytes, None]) -> Record | None:
        key_hash = next(iter(line), None)
        return None if key_hash is None else self._records[key_hash]

    def _follow(self, record: Record, sign: int) -> None:
        left = self._num_followers.get(record.parent_hash, 0) + sign
        if left:
            self._num_followers[record.parent_hash] = left
        else:
            del self._num_followers[record.parent_hash]

    def _leave(self, record: Record) -> None:
        self._follow(record, -1)
        self._hashes[record.segment].discard(record.key_hash)
        self._count(record, -1)

    def _count(self, record: Record, sign: int) -> None:
        change = sign * record.num_bytes
        self.live_bytes += change
        left = self.live_by_segment.get(record.segment, 0) + change
        self.live_by_segment[record.segment] = left
        if not left and not self._hashes[record.segment]:
            del self.live_by_segment[record.segment], self._hashes[record.segment]
