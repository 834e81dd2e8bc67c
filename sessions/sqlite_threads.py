# SPDX-License-Identifier: Apache-2.0
"""A SQLite file behind two threads: one writes, one reads; the event loop does not wait for it.

Does not know: tables. The one thing done in the caller's own thread is `read_here`, for a few rows
whose pages are in memory: two changes of thread cost several times what such a read does. Writes
that wait together share one commit, hence one fsync: each runs in its own savepoint, so one that
fails takes nothing with it, and none is acknowledged before the commit has returned.

Owned by the writer thread: the write connection. Owned by the reader thread: the read connection.
Owned by the caller's thread: a second read connection, which waits for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sessions.errors import SessionError, StoreCorrupt, StoreError, StoreFull, StoreUnavailable

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_MAX_GROUP = 64


@dataclass(slots=True)
class _Job:
    work: Work[Any]
    future: Future[Any]


class SqliteThreads:
    """Runs functions on a database, each in the thread it belongs to."""

    def __init__(self, path: Path, *, timeout_ms: int, max_bytes: int = 0) -> None:
        self._path = path
        self._timeout_ms = timeout_ms
        self._max_bytes = max_bytes
        self._writes: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_open = False
        self._here: sqlite3.Connection | None = None
        self.write_error: StoreError | None = (
            None  # of the last group of writes, None: it went well
        )

    async def open(self, prepare: Work[None]) -> None:
        """Connect both threads; `prepare` runs first on the write connection, outside any
        transaction. Raises `StoreError`."""
        if self._is_open:
            return
        for loop, ready in ((self._write_loop, prepare), (self._read_loop, _nothing)):
            started: Future[None] = Future()
            thread = threading.Thread(
                target=loop, args=(ready, started), name="sessions-sqlite", daemon=True
            )
            thread.start()
            self._threads.append(thread)
            self._is_open = True
            try:
                await asyncio.wrap_future(started)
            except BaseException:
                await self.close()
                raise
        self._here = self._connect(timeout_ms=0)

    async def close(self) -> None:
        """Finish what is queued, close the file; idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if self._here is not None:
            self._here.close()
            self._here = None
        self._writes.put(None)
        self._reads.put(None)
        threads, self._threads = self._threads, []
        for thread in threads:
            await asyncio.to_thread(thread.join)

    async def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction and return its result once that is on disk."""
        return await self._submit(self._writes, work)

    async def read(self, work: Work[T]) -> T:
        """Run `work`, which only reads, against everything committed so far."""
        return await self._submit(self._reads, work)

    async def read_here(self, work: Work[T]) -> T:
        """As `read`, for a few rows that are in the system's memory, in the caller's thread.

        Where that does not succeed at once (the file is locked, say), it is a `read`.
        """
        if self._here is not None:
            try:
                return work(self._here)
            except (sqlite3.Error, OSError):
                pass
        return await self.read(work)

    async def _submit(self, jobs: queue.SimpleQueue[_Job | None], work: Work[T]) -> T:
        if not self._is_open:
            raise StoreUnavailable("the session store is not open")
        loop = asyncio.get_running_loop()
        # An answer of its own: a caller that gives up does not undo a write that is under way.
        answer: asyncio.Future[T] = loop.create_future()
        future: Future[T] = Future()
        future.add_done_callback(lambda done: _hand_over(done, answer, loop))
        timer = loop.call_later(2 * self._timeout_ms / 1000, self._give_up, answer)
        jobs.put(_Job(work, future))
        try:
            return await answer
        finally:
            timer.cancel()

    def _give_up(self, answer: asyncio.Future[T]) -> None:
        if not answer.done():
            limit_ms = 2 * self._timeout_ms
            answer.set_exception(
                StoreUnavailable(
                    f"the session store gave no answer in {limit_ms} ms ({self._path})"
                )
            )

    def _connect(self, timeout_ms: int | None = None) -> sqlite3.Connection:
        limit_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        connection = sqlite3.connect(
            self._path, timeout=limit_ms / 1000, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA foreign_keys = OFF")
        return connection

    def _write_loop(self, prepare: Work[None], started: Future[None]) -> None:
        connection = _start(self._open_for_writing, prepare, started, self._path)
        if connection is None:
            return
        running = True
        while running:
            jobs: list[_Job] = []
            job = self._writes.get()
            while job is not None and len(jobs) < _MAX_GROUP - 1 and not self._writes.empty():
                jobs.append(job)
                job = self._writes.get()
            if job is None:
                running = False
            else:
                jobs.append(job)
            jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if jobs:
                self._run_group(connection, jobs)
        connection.close()

    def _open_for_writing(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = self._connect()
        mode = self._switch_to_wal(connection)
        if mode != "wal":
            raise StoreUnavailable(f"{self._path}: the file system offers no WAL (got {mode})")
        connection.execute("PRAGMA synchronous = FULL")
        # A deleted transcript is overwritten, not only unlinked.
        connection.execute("PRAGMA secure_delete = ON")
        if self._max_bytes:
            page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {max(1, self._max_bytes // page_bytes)}")
        return connection

    def _switch_to_wal(self, connection: sqlite3.Connection) -> str:
        # The busy time-out does not cover this switch: two processes that create the file at once
        # both try it, and one is told at once that the file is locked.
        deadline_s = time.monotonic() + self._timeout_ms / 1000
        while True:
            try:
                return str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > deadline_s:
                    raise
            time.sleep(random.uniform(0.002, 0.02))

    def _read_loop(self, prepare: Work[None], started: Future[None]) -> None:
        connection = _start(self._connect, prepare, started, self._path)
        if connection is None:
            return
        while (job := self._reads.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                job.future.set_result(job.work(connection))
            except BaseException as error:
                job.future.set_exception(describe(error, self._path))
        connection.close()

    def _run_group(self, connection: sqlite3.Connection, jobs: list[_Job]) -> None:
        outcomes: list[tuple[Any, BaseException | None]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                outcomes.append(_run_in_savepoint(connection, job.work))
            connection.execute("COMMIT")
            self.write_error = None
        except BaseException as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            outcomes = [(None, error)] * len(jobs)
            described = describe(error, self._path)
            self.write_error = described if isinstance(described, StoreError) else None
        for job, (result, failure) in zip(jobs, outcomes, strict=True):
            if failure is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(describe(failure, self._path))


def _hand_over(done: Future[T], answer: asyncio.Future[T], loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
        loop.call_soon_threadsafe(_settle, done, answer)


def _settle(done: Future[T], answer: asyncio.Future[T]) -> None:
    if answer.done():  # given up
        return
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(error)


def describe(error: BaseException, path: Path) -> BaseException:
    """The session error that says what a failure of SQLite means; others pass unchanged."""
    if isinstance(error, SessionError) or not isinstance(error, sqlite3.Error | OSError):
        return error
    text = f"{path}: {error}"
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    failure: StoreError
    if code == sqlite3.SQLITE_FULL:
        failure = StoreFull(f"{text} (hint: free disk space or raise sessions.sqlite_max_bytes)")
    elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        failure = StoreCorrupt(f"{text} (hint: restore the file from a backup)")
    elif code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        failure = StoreUnavailable(f"{text} (hint: the file and its directory must be writable)")
    elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        failure = StoreUnavailable(f"{text} (hint: another process holds the file's write lock)")
    else:
        failure = StoreUnavailable(text)
    failure.__cause__ = error
    return failure


def _start(
    connect: Callable[[], sqlite3.Connection],
    prepare: Work[None],
    started: Future[None],
    path: Path,
) -> sqlite3.Connection | None:
    connection = None
    try:
        connection = connect()
        prepare(connection)
    except BaseException as error:
        if connection is not None:
            connection.close()
        started.set_exception(describe(error, path))
        return None
    started.set_result(None)
    return connection


def _run_in_savepoint(
    connection: sqlite3.Connection, work: Work[Any]
) -> tuple[Any, BaseException | None]:
    connection.execute("SAVEPOINT job")
    try:
        result = work(connection)
    except BaseException as error:
        if not connection.in_transaction:
            raise  # SQLite gave the whole transaction up (disk full): nobody's write happened
        connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")
        return None, error
    connection.execute("RELEASE job")
    return result, None


def _nothing(connection: sqlite3.Connection) -> None:
    return None
