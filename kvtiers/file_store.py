# SPDX-License-Identifier: Apache-2.0
"""L3 in a local directory: the embedded default.

Does not know: what pages mean, deadlines (kvtiers.deadline_store), other processes.

Layout: `lock` (flock: one process owns the directory), segment files that only grow, and a
snapshot of the index that saves a scan. What is on disk is a cache: puts go to the page cache and
survive the death of this process, `flush` makes them survive a power cut, and whatever was torn
or changed is found out by the object's own sums when it is read, and is a miss.

Quota: live objects take at most three quarters of it. When they would take more, the least
recently used go, tails before heads (kvtiers.file_store_index). When the files would take more
than the quota, the segment with the fewest live bytes is compacted: its live records are copied
to the end and the file is deleted. As no more than 3/4 of the bytes are live, no more than 3 bytes
are ever copied for 1 that is put; with sessions that come and go it is near none.

Locks: `_writing` is held while files change; `_indexing`, taken after it and held for
microseconds, while the index does. Readers take the second alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtiers.deadlines import CallNotDoneError, DeadlineThreads
from kvtiers.file_store_index import PageIndex
from kvtiers.file_store_segments import (
    NO_PARENT,
    RECORD_HEADER_BYTES,
    Record,
    SegmentFiles,
    record_bytes,
)
from kvtiers.file_store_snapshot import load_snapshot, save_snapshot
from kvtiers.objects import is_sealed_for, key_hash, verify
from kvtiers.store import (
    StoreState,
    StoreStatus,
    check_batch,
    new_counters,
    resolve_parents,
)

MIN_SEGMENT_BYTES = 64 << 10
MAX_SEGMENT_BYTES = 128 << 20
SEGMENTS_PER_QUOTA = 32
LIVE_SHARE = 0.75
RETRY_S = 1.0  # how long a full disk, or a directory that another process owns, is left alone
RECORDS_PER_SAVE = 50_000
LOCK_FILE = "lock"
SNAPSHOT_FILE = "index"


class FileStore:
    """Opens at once; where it cannot, it is down, says why, and tries again every second.

    Args:
        quota_bytes: what the segment files may take together.
        now_s: a clock that never goes back, for retries alone.
    """

    kind = "file"

    def __init__(
        self,
        directory: Path,
        quota_bytes: int,
        layout_fingerprint: str,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._quota_bytes = quota_bytes
        self._layout = layout_fingerprint
        self._now_s = now_s
        self._writing = threading.Lock()
        self._indexing = threading.Lock()
        self._flushing = DeadlineThreads("file-store-flush", max_stuck=1)
        self._counters = new_counters("evicted", "compacted_bytes")
        segment = min(MAX_SEGMENT_BYTES, quota_bytes // SEGMENTS_PER_QUOTA)
        self._segment_bytes = max(MIN_SEGMENT_BYTES, segment)
        # A compaction needs a segment's worth of files while it copies.
        self._file_limit = quota_bytes - min(self._segment_bytes, quota_bytes // 4)
        self._live_limit = int(LIVE_SHARE * self._file_limit)
        self._index = PageIndex()
        self._files: SegmentFiles | None = None
        self._lock_fd = -1
        self._seq = 0
        self._unsaved_segments = 0
        self._is_closed = False
        self._retry_at_s = -1e9
        self._down_reason = ""
        self._write_problem = ""
        self._is_open()

    def probe(self, keys: Sequence[str]) -> int:
        if not self._is_open():
            return 0
        hashes = [key_hash(key) for key in keys]
        with self._indexing:
            missing = (at for at, hashed in enumerate(hashes) if hashed not in self._index)
            return next(missing, len(hashes))

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        check_batch(keys, blobs, writable=False)
        follows = [key_hash(key) if key else NO_PARENT for key in resolve_parents(keys, parents)]
        if not self._is_open():
            return [False] * len(keys)
        views = [blob.cast("B") for blob in blobs]
        hashes = [key_hash(key) for key in keys]
        with self._writing:
            self._leave_deleted()
            fits = self._make_room(hashes, follows, views)
            kept = [
                is_sealed_for(blob, key, self._layout)
                and (
                    hashed in self._index or (hashed in fits and self._write(hashed, parent, blob))
                )
                for key, hashed, parent, blob in zip(keys, hashes, follows, views, strict=True)
            ]
        with self._indexing:
            self._index.touch(
                hashed for hashed, is_kept in zip(hashes, kept, strict=True) if is_kept
            )
            self._counters["puts"] += sum(kept)
            self._counters["refused_puts"] += len(kept) - sum(kept)
        return kept

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        check_batch(keys, into, writable=True)
        hits = [False] * len(keys)
        if not self._is_open():
            return hits
        hashes = [key_hash(key) for key in keys]
        views = [buffer.cast("B") for buffer in into]
        waiting: Sequence[int] = range(len(keys))
        # A second round finds records that a compaction moved between look-up and open.
        for _ in range(2):
            moved: list[int] = []
            for segment, group in self._locate(waiting, hashes, views).items():
                moved += self._read_group(segment, group, keys, views, hits)
            waiting = moved
        with self._indexing:
            self._index.touch(hashed for hashed, is_hit in zip(hashes, hits, strict=True) if is_hit)
            self._counters["hits"] += sum(hits)
            self._counters["misses"] += len(hits) - sum(hits)
        return hits

    def remove(self, keys: Sequence[str]) -> int:
        if not self._is_open():
            return 0
        num_removed = 0
        with self._writing:
            files = self._files
            for hashed in dict.fromkeys(key_hash(key) for key in keys):
                with self._indexing:
                    record = self._index.find(hashed)
                    if record is None or files is None:
                        continue
                    self._index.discard(record)
                try:
                    files.erase(record)
                    num_removed += 1
                except OSError as error:
                    self._note_write_problem(error)
        return num_removed

    def flush(self, timeout_s: float) -> bool:
        if not self._is_open():
            return False
        try:
            return self._flushing.run(self._flush, timeout_s)
        except CallNotDoneError:
            return False

    def status(self) -> StoreStatus:
        state, reason = StoreState.UP, ""
        if self._files is None:
            state, reason = StoreState.DOWN, self._down_reason
        elif self._write_problem:
            state, reason = StoreState.DEGRADED, self._write_problem
        return StoreStatus(
            kind=self.kind,
            state=state,
            reason=reason,
            used_bytes=self._files.used_bytes if self._files is not None else 0,
            capacity_bytes=self._quota_bytes,
            num_objects=len(self._index),
            counters=dict(self._counters),
        )

    def close(self) -> None:
        self._is_closed = True
        with self._writing:
            if self._files is None:
                return
            self._save_snapshot(self._files)
            self._shut("closed")
        self._flushing.close()

    # Opening

    def _is_open(self) -> bool:
        if self._files is not None:
            return True
        with self._writing:
            if self._files is not None or self._is_closed or self._now_s() < self._retry_at_s:
                return self._files is not None
            try:
                self._open()
            except OSError as error:
                self._retry_at_s = self._now_s() + RETRY_S
                self._shut(str(error))
            return self._files is not None

    def _open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock_fd = os.open(
            self._directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another process owns {self._directory}") from None
        files = SegmentFiles(self._directory, self._segment_bytes)
        snapshot = load_snapshot(self._directory / SNAPSHOT_FILE)
        records = [
            record
            for record in snapshot.records
            if record.end <= min(files.sizes.get(record.segment, 0), snapshot.ends[record.segment])
        ]
        for segment in list(files.sizes):
            records += files.scan(segment, snapshot.ends.get(segment, 0))
        known = len(snapshot.records)
        records[known:] = sorted(records[known:], key=lambda record: record.seq)
        with self._indexing:
            for record in records:
                older = self._index.find(record.key_hash)
                if older is None or older.seq < record.seq:
                    self._index.add(record)
            self._index.settle()
        self._seq = 1 + max((record.seq for record in records), default=0)
        self._files, self._down_reason = files, ""
        with contextlib.suppress(OSError):
            self._make_room([], [], [])  # the quota may be smaller than last time
            self._reclaim(files, 0)

    def _shut(self, reason: str) -> None:
        if self._files is not None:
            self._files.seal_active()
        self._files, self._down_reason = None, reason
        if self._lock_fd >= 0:
            os.close(self._lock_fd)  # which gives the flock back
            self._lock_fd = -1
        with self._indexing:
            self._index = PageIndex()

    # Writing; all under `_writing`

    def _make_room(
        self, hashes: Sequence[bytes], follows: Sequence[bytes], blobs: Sequence[memoryview]
    ) -> set[bytes]:
        """Evict for these objects; returns those of the new ones that fit, heads first.

        What the new ones follow is used now: it must not go to make room for them.
        """
        with self._indexing:
            in_use = self._index.touch([*hashes, *follows])
            room = self._live_limit - self._index.bytes_of(in_use)
            fits: set[bytes] = set()
            needed = 0
            for hashed, blob in zip(hashes, blobs, strict=True):
                if hashed in in_use or hashed in fits:
                    continue
                if needed + record_bytes(len(blob)) > room:
                    break
                needed += record_bytes(len(blob))
                fits.add(hashed)
            while self._index.live_bytes + needed > self._live_limit:
                self._evict_oldest()
        return fits

    def _write(self, hashed: bytes, parent: bytes, blob: memoryview) -> bool:
        """Write an object; False where it cannot be written."""
        files = self._files
        if files is None or self._now_s() < self._retry_at_s:
            return False
        try:
            self._reclaim(files, record_bytes(len(blob)))
            active = files.active
            record = files.append(hashed, parent, self._next_seq(), blob)
        except OSError as error:
            self._note_write_problem(error)
            return False
        self._write_problem = ""
        with self._indexing:
            self._index.add(record)
        if files.active != active:
            self._save_now_and_then(files)
        return True

    def _reclaim(self, files: SegmentFiles, num_bytes: int) -> None:
        """Delete or compact segments until the files have room for so much more."""
        while files.used_bytes + num_bytes > self._file_limit:
            self._reclaim_segment(files)

    def _evict_oldest(self) -> None:
        """Under `_indexing`."""
        record = self._index.oldest()
        if record is not None:
            self._index.discard(record)
            self._counters["evicted"] += 1

    def _reclaim_segment(self, files: SegmentFiles) -> None:
        """Give back the segment that holds the least; one full of live records loses one first."""
        live = self._index.live_by_segment
        sealed = [segment for segment in files.sizes if segment != files.active]
        if not sealed:
            files.seal_active()
            return
        segment = min(sealed, key=lambda name: live.get(name, 0))
        if live.get(segment, 0) >= files.sizes[segment] > 0:
            with self._indexing:
                self._evict_oldest()
            return
        for record in self._index.records_of(segment):
            self._move(files, record)
        files.drop(segment)

    def _move(self, files: SegmentFiles, record: Record) -> None:
        try:
            blob = files.read_whole(record)
        except OSError:
            blob = None  # damaged or deleted: it goes
        if blob is None:
            with self._indexing:
                self._index.discard(record)
            return
        copy = files.append(record.key_hash, record.parent_hash, self._next_seq(), blob)
        with self._indexing:
            self._index.add(copy)
            self._counters["compacted_bytes"] += copy.num_bytes

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _leave_deleted(self) -> None:
        """Somebody deleted what is written to: go on in a new file, or a new directory."""
        if self._files is None:
            return
        with contextlib.suppress(OSError):
            self._files.leave_deleted()
            if os.fstat(self._lock_fd).st_nlink == 0:
                self._shut("the directory was deleted")

    def _note_write_problem(self, error: OSError) -> None:
        self._write_problem = f"cannot write: {error.strerror or error}"
        self._retry_at_s = self._now_s() + RETRY_S
        with self._indexing:
            self._counters["failures"] += 1

    def _flush(self) -> bool:
        with self._writing:
            files = self._files
            if files is None:
                return False
            try:
                files.sync()
            except OSError as error:
                self._note_write_problem(error)
                return False
            return self._save_snapshot(files)

    def _save_now_and_then(self, files: SegmentFiles) -> None:
        """With each new segment, so that a scan is short; less often where the index is large."""
        self._unsaved_segments += 1
        if self._unsaved_segments * RECORDS_PER_SAVE > len(self._index):
            self._save_snapshot(files)

    def _save_snapshot(self, files: SegmentFiles) -> bool:
        self._unsaved_segments = 0
        with self._indexing:
            records = list(self._index.in_order())
        try:
            save_snapshot(self._directory / SNAPSHOT_FILE, files.sizes, records)
        except OSError:  # it only saves a scan
            return False
        return True

    # Reading; no lock but `_indexing`

    def _locate(
        self, positions: Sequence[int], hashes: Sequence[bytes], views: Sequence[memoryview]
    ) -> dict[str, list[tuple[Record, int]]]:
        """Records of these positions by segment, in file order."""
        groups: dict[str, list[tuple[Record, int]]] = {}
        with self._indexing:
            for position in positions:
                record = self._index.find(hashes[position])
                if record is not None and record.blob_bytes == len(views[position]):
                    groups.setdefault(record.segment, []).append((record, position))
        for group in groups.values():
            group.sort(key=lambda pair: pair[0].offset)
        return groups

    def _read_group(
        self,
        segment: str,
        group: list[tuple[Record, int]],
        keys: Sequence[str],
        views: Sequence[memoryview],
        hits: list[bool],
    ) -> list[int]:
        """Read records of one segment; returns positions to look up again: their file is gone."""
        try:
            fd = os.open(self._directory / segment, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._forget_deleted(segment)
            return [position for _, position in group]
        except OSError:
            self._count_failure()
            return []
        try:
            for record, position in group:
                hits[position] = self._read(fd, record, keys[position], views[position])
        finally:
            os.close(fd)
        return []

    def _read(self, fd: int, record: Record, key: str, view: memoryview) -> bool:
        try:
            num_bytes = os.preadv(fd, [view], record.offset + RECORD_HEADER_BYTES)
        except OSError:
            self._count_failure()
            num_bytes = -1
        if num_bytes == len(view) and verify(view, key, self._layout):
            return True
        with self._indexing:
            self._index.discard(record)
            self._counters["bad_reads"] += num_bytes >= 0
        return False

    def _forget_deleted(self, segment: str) -> None:
        """A file that vanished while the index points to it was deleted by somebody else."""
        with self._indexing:
            self._index.discard_segment(segment)

    def _count_failure(self) -> None:
        with self._indexing:
            self._counters["failures"] += 1
