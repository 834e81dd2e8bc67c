# SPDX-License-Identifier: Apache-2.0
"""L3 in a local directory: the embedded default.

Does not know: what pages mean, deadlines (kvtiers.deadline_store), how files are laid out
(kvtiers.file_store_pages and below).

One process owns a directory: it holds a lock on the file `lock`. What is on disk is a cache: puts
go to the page cache and survive the death of this process, `flush` makes them survive a power
cut, and whatever was torn or changed is found out by the object's own sums when it is read, and is
a miss.
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
from kvtiers.file_store_pages import DirectoryPages
from kvtiers.file_store_segments import Record
from kvtiers.objects import is_sealed_for, key_hash, verify
from kvtiers.page_order import NO_PARENT
from kvtiers.store import (
    StoreState,
    StoreStatus,
    check_batch,
    new_counters,
    resolve_parents,
)

RETRY_S = 1.0  # how long a full disk, or a directory that another process owns, is left alone
LOCK_FILE = "lock"


class FileStore:
    """Where it cannot open, it is down, says why, and tries again every second.

    Args:
        quota_bytes: what the segment files may take together.
        opens_now: False: the first call opens it (a directory may hang, a scan may take long).
        now_s: a clock that never goes back, for retries alone.
    """

    kind = "file"

    def __init__(
        self,
        directory: Path,
        quota_bytes: int,
        layout_fingerprint: str,
        *,
        opens_now: bool = True,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._quota_bytes = quota_bytes
        self._layout = layout_fingerprint
        self._now_s = now_s
        self._opening = threading.Lock()
        self._counting = threading.Lock()
        self._flushing = DeadlineThreads("file-store-flush", max_stuck=1)
        self._counters = new_counters("evicted", "compacted_bytes")
        self._pages: DirectoryPages | None = None
        self._lock_fd = -1
        self._is_closed = False
        self._retry_at_s = -1e9
        self._down_reason = "not open yet"
        self._write_problem = ""
        if opens_now:
            self._open()

    def probe(self, keys: Sequence[str]) -> int:
        pages = self._open()
        return 0 if pages is None else pages.count_leading([key_hash(key) for key in keys])

    def surely_lacks(self, key: str) -> bool:
        pages = self._pages
        return pages is not None and key_hash(key) not in pages

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        check_batch(keys, blobs, writable=False)
        follows = [key_hash(key) if key else NO_PARENT for key in resolve_parents(keys, parents)]
        kept = [False] * len(keys)
        pages = self._open()
        if pages is not None:
            views = [blob.cast("B") for blob in blobs]
            hashes = [key_hash(key) for key in keys]
            with pages.writing:
                self._leave_deleted(pages)
                fits = pages.make_room(hashes, follows, [len(view) for view in views])
                for at, (key, hashed, view) in enumerate(zip(keys, hashes, views, strict=True)):
                    if is_sealed_for(view, key, self._layout):
                        kept[at] = hashed in pages or (
                            hashed in fits and self._write(pages, hashed, follows[at], view)
                        )
            pages.touch(
                [hashed for hashed, is_kept in zip(hashes, kept, strict=True) if is_kept],
                were_read=False,
            )
        self._count(puts=sum(kept), refused_puts=len(kept) - sum(kept))
        return kept

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        check_batch(keys, into, writable=True)
        hits = [False] * len(keys)
        pages = self._open()
        if pages is not None:
            hashes = [key_hash(key) for key in keys]
            views = [buffer.cast("B") for buffer in into]
            sizes = [len(view) for view in views]
            waiting: Sequence[int] = range(len(keys))
            # A second round finds records that a compaction moved between look-up and open.
            for _ in range(2):
                moved: list[int] = []
                for segment, group in pages.locate(hashes, sizes, waiting).items():
                    moved += self._read_group(pages, segment, group, keys, views, hits)
                waiting = moved
            pages.touch(
                [hashed for hashed, is_hit in zip(hashes, hits, strict=True) if is_hit],
                were_read=True,
            )
        self._count(hits=sum(hits), misses=len(hits) - sum(hits))
        return hits

    def remove(self, keys: Sequence[str]) -> int:
        pages = self._open()
        if pages is None:
            return 0
        num_removed = 0
        with pages.writing:
            for key in dict.fromkeys(keys):
                if self._pages is not pages:
                    break
                try:
                    num_removed += pages.erase(key_hash(key))
                except OSError as error:
                    self._note_write_problem(error)
        return num_removed

    def flush(self, timeout_s: float) -> bool:
        pages = self._open()
        if pages is None:
            return False
        try:
            return self._flushing.run(lambda: self._flush(pages), timeout_s)
        except CallNotDoneError:
            return False

    def status(self) -> StoreStatus:
        pages = self._pages
        state, reason = StoreState.UP, ""
        if pages is None:
            state, reason = StoreState.DOWN, self._down_reason
        elif self._write_problem:
            state, reason = StoreState.DEGRADED, self._write_problem
        counters = dict(self._counters)
        if pages is not None:
            counters["evicted"] += pages.num_evicted
            counters["compacted_bytes"] += pages.compacted_bytes
        return StoreStatus(
            kind=self.kind,
            state=state,
            reason=reason,
            used_bytes=pages.used_bytes if pages is not None else 0,
            capacity_bytes=self._quota_bytes,
            num_objects=len(pages) if pages is not None else 0,
            counters=counters,
        )

    def close(self) -> None:
        self._is_closed = True
        with self._opening:
            pages = self._pages
            if pages is None:
                return
            with pages.writing:
                with contextlib.suppress(OSError):
                    pages.save()
                self._shut("closed")
        self._flushing.close()

    def _open(self) -> DirectoryPages | None:
        """The pages, opened where they are not; None where that cannot be done now."""
        pages = self._pages
        if pages is not None:
            return pages
        with self._opening:
            if self._pages is None and not self._is_closed and self._now_s() >= self._retry_at_s:
                try:
                    self._own_directory()
                    self._pages = DirectoryPages(self._directory, self._quota_bytes)
                    self._down_reason = ""
                except OSError as error:
                    self._retry_at_s = self._now_s() + RETRY_S
                    self._shut(str(error))
            return self._pages

    def _own_directory(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock_fd = os.open(self._directory / LOCK_FILE, flags, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another process owns {self._directory}") from None

    def _shut(self, reason: str) -> None:
        pages, self._pages, self._down_reason = self._pages, None, reason
        if pages is not None:
            pages.close()
            self._count(evicted=pages.num_evicted, compacted_bytes=pages.compacted_bytes)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)  # which gives the lock back
            self._lock_fd = -1

    # Writing; under `pages.writing`

    def _write(self, pages: DirectoryPages, hashed: bytes, parent: bytes, blob: memoryview) -> bool:
        if self._pages is not pages or self._now_s() < self._retry_at_s:
            return False
        try:
            pages.write(hashed, parent, blob)
        except OSError as error:
            self._note_write_problem(error)
            return False
        self._write_problem = ""
        return True

    def _leave_deleted(self, pages: DirectoryPages) -> None:
        """Somebody deleted what is written to: go on in a new file, or a new directory."""
        if self._pages is pages:
            with contextlib.suppress(OSError):
                pages.leave_deleted()
                if os.fstat(self._lock_fd).st_nlink == 0:
                    self._shut("the directory was deleted")

    def _note_write_problem(self, error: OSError) -> None:
        self._write_problem = f"cannot write: {error.strerror or error}"
        self._retry_at_s = self._now_s() + RETRY_S
        self._count(failures=1)

    def _flush(self, pages: DirectoryPages) -> bool:
        with pages.writing:
            if self._pages is not pages:
                return False
            try:
                pages.sync()
                pages.save()
            except OSError as error:
                self._note_write_problem(error)
                return False
        return True

    # Reading; takes no lock but the index's

    def _read_group(
        self,
        pages: DirectoryPages,
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
            pages.forget_segment(segment)
            return [position for _, position in group]
        except OSError:
            self._count(failures=1)
            return []
        try:
            for record, position in group:
                hits[position] = self._read(pages, fd, record, keys[position], views[position])
        finally:
            os.close(fd)
        return []

    def _read(
        self, pages: DirectoryPages, fd: int, record: Record, key: str, view: memoryview
    ) -> bool:
        try:
            num_bytes = os.preadv(fd, [view], record.blob_offset)
        except OSError:
            self._count(failures=1)
            pages.forget(record)
            return False
        if num_bytes == len(view) and verify(view, key, self._layout):
            return True
        pages.forget(record)
        self._count(bad_reads=1)
        return False

    def _count(self, **changes: int) -> None:
        with self._counting:
            for name, change in changes.items():
                self._counters[name] += change
