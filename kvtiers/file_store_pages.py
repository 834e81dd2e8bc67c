# SPDX-License-Identifier: Apache-2.0
"""The pages of one directory: files and index kept in step, within a quota.

Does not know: keys (only their hashes), whole stores, who owns the directory.

Quota: live records take at most three quarters of it. When they would take more, some go, tails
before heads (kvtiers.page_order). When the files would take more than the quota, the segment
with the fewest live bytes is compacted: its live records are copied to the end and the file is
deleted. As no more than 3/4 of the bytes are live, no more than 3 bytes are ever copied for 1 that
is put; with sessions that come and go it is near none.

Locks: `writing` is held by whoever changes files. The index has a lock of its own, taken after
it and held for microseconds; readers take that one alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

from kvtiers.file_store_index import PageIndex
from kvtiers.file_store_segments import Record, SegmentFiles, record_bytes
from kvtiers.file_store_snapshot import load_snapshot, save_snapshot

MIN_SEGMENT_BYTES = 64 << 10
MAX_SEGMENT_BYTES = 128 << 20
SEGMENTS_PER_QUOTA = 32
LIVE_SHARE = 0.75
RECORDS_PER_SAVE = 50_000
SNAPSHOT_FILE = "index"


class DirectoryPages:
    """Opens the directory's pages. Methods that write raise OSError.

    Raises OSError where the files cannot be read.
    """

    def __init__(self, directory: Path, quota_bytes: int) -> None:
        self.directory = directory
        self.writing = threading.Lock()
        self.num_evicted = 0
        self.compacted_bytes = 0
        segment_bytes = min(MAX_SEGMENT_BYTES, quota_bytes // SEGMENTS_PER_QUOTA)
        segment_bytes = max(MIN_SEGMENT_BYTES, segment_bytes)
        # A compaction needs a segment's worth of files while it copies.
        self._file_limit = quota_bytes - min(segment_bytes, quota_bytes // 4)
        self._live_limit = int(LIVE_SHARE * self._file_limit)
        self._indexing = threading.Lock()
        self._index = PageIndex()
        self._files = SegmentFiles(directory, segment_bytes)
        self._unsaved_segments = 0
        self._seq = self._load()
        with contextlib.suppress(OSError):
            self.make_room([], [], [])  # the quota may be smaller than last time
            self._reclaim(0)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key_hash: bytes) -> bool:
        return key_hash in self._index

    @property
    def used_bytes(self) -> int:
        return self._files.used_bytes

    def count_leading(self, key_hashes: Sequence[bytes]) -> int:
        """The length of the leading run that is here."""
        with self._indexing:
            missing = (at for at, hashed in enumerate(key_hashes) if hashed not in self._index)
            return next(missing, len(key_hashes))

    def touch(self, key_hashes: Sequence[bytes], *, were_read: bool) -> None:
        """These were used now."""
        with self._indexing:
            self._index.touch(key_hashes, proves=were_read)

    def locate(
        self, key_hashes: Sequence[bytes], sizes: Sequence[int], positions: Sequence[int]
    ) -> dict[str, list[tuple[Record, int]]]:
        """Records of these positions by segment, in file order; those of other sizes left out."""
        groups: dict[str, list[tuple[Record, int]]] = {}
        with self._indexing:
            for position in positions:
                record = self._index.find(key_hashes[position])
                if record is not None and record.blob_bytes == sizes[position]:
                    groups.setdefault(record.segment, []).append((record, position))
        for group in groups.values():
            group.sort(key=lambda pair: pair[0].offset)
        return groups

    def forget(self, record: Record) -> None:
        """A record that was found damaged."""
        with self._indexing:
            self._index.discard(record)

    def forget_segment(self, segment: str) -> None:
        """A file that somebody else deleted. One that was compacted has no records by then."""
        with self._indexing:
            self._index.discard_segment(segment)

    # Under `writing`

    def make_room(
        self, key_hashes: Sequence[bytes], follows: Sequence[bytes], sizes: Sequence[int]
    ) -> set[bytes]:
        """Evict for these objects; returns those of the new ones that fit, heads first.

        What the new ones follow is used now: it must not go to make room for them.
        """
        with self._indexing:
            taken = [record_bytes(size) for size in sizes]
            fits, evicted = self._index.make_room(key_hashes, follows, taken, self._live_limit)
            self.num_evicted += len(evicted)
        return fits

    def write(self, key_hash: bytes, parent_hash: bytes, blob: memoryview) -> None:
        """Append an object that `make_room` had room for."""
        self._reclaim(record_bytes(len(blob)))
        active = self._files.active
        record = self._files.append(key_hash, parent_hash, self._next_seq(), blob)
        with self._indexing:
            self._index.add(record)
        if self._files.active != active:
            self._save_now_and_then()

    def erase(self, key_hash: bytes) -> bool:
        """Forget an object and zero its headers; whether it was there."""
        with self._indexing:
            record = self._index.find(key_hash)
            if record is None:
                return False
            self._index.discard(record)
        self._files.erase(record)
        return True

    def leave_deleted(self) -> None:
        """Go on in a new file where somebody deleted the one that is written to."""
        self._files.leave_deleted()

    def sync(self) -> None:
        """Make all that was written survive a power cut."""
        self._files.sync()

    def save(self) -> None:
        """Write the snapshot of the index."""
        self._unsaved_segments = 0
        with self._indexing:
            records = list(self._index.in_order())
        save_snapshot(self.directory / SNAPSHOT_FILE, self._files.sizes, records)

    def close(self) -> None:
        self._files.seal_active()

    # Inner parts

    def _load(self) -> int:
        """Fill the index from the snapshot and from what the segments have beyond it."""
        files = self._files
        snapshot = load_snapshot(self.directory / SNAPSHOT_FILE)
        known = [
            record
            for record in snapshot.records
            if record.end <= min(files.sizes.get(record.segment, 0), snapshot.ends[record.segment])
        ]
        found: list[Record] = []
        for segment in list(files.sizes):
            found += files.scan(segment, snapshot.ends.get(segment, 0))
        records = known + sorted(found, key=lambda record: record.seq)
        for record in records:
            older = self._index.find(record.key_hash)
            if older is None or older.seq < record.seq:
                self._index.add(record)
        self._index.settle()
        return max((record.seq for record in records), default=0)

    def _reclaim(self, num_bytes: int) -> None:
        """Delete or compact segments until the files have room for so much more."""
        while self._files.used_bytes + num_bytes > self._file_limit:
            self._reclaim_segment()

    def _reclaim_segment(self) -> None:
        """Give back the segment that holds the least; one full of live records loses one first."""
        files, live = self._files, self._index.live_by_segment
        sealed = [segment for segment in files.sizes if segment != files.active]
        if not sealed:
            files.seal_active()
            return
        segment = min(sealed, key=lambda name: live.get(name, 0))
        if live.get(segment, 0) >= files.sizes[segment] > 0:
            with self._indexing:
                self.num_evicted += self._index.evict() is not None
            return
        with self._indexing:
            records = self._index.records_of(segment)
        for record in records:
            self._move(record)
        files.drop(segment)

    def _move(self, record: Record) -> None:
        try:
            blob = self._files.read_whole(record)
        except OSError:  # damaged or deleted: it goes
            self.forget(record)
            return
        copy = self._files.append(record.key_hash, record.parent_hash, self._next_seq(), blob)
        with self._indexing:
            self._index.add(copy)
        self.compacted_bytes += copy.num_bytes

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _save_now_and_then(self) -> None:
        """With each new segment, so that a scan is short; less often where the index is large."""
        self._unsaved_segments += 1
        if self._unsaved_segments * RECORDS_PER_SAVE > len(self._index):
            with contextlib.suppress(OSError):  # it only saves a scan
                self.save()
