# SPDX-License-Identifier: Apache-2.0
"""Calls that may hang, with a deadline.

A call that overruns cannot be stopped: it keeps its thread, and whatever memory it reads into,
until it returns by itself. So callers hand it memory of its own, and only so many calls may be
stuck before further ones are refused at once. Does not know: stores.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class CallNotDoneError(Exception):
    """The call overran its deadline."""


class CallRefusedError(CallNotDoneError):
    """The call was never made, or has failed: it holds nothing."""


class _Job(Generic[T]):
    def __init__(self, call: Callable[[], T], when_late: Callable[[], None]) -> None:
        self.call = call
        self.when_late = when_late
        self.done = threading.Event()
        self.is_abandoned = False
        self.result: list[T] = []
        self.error: BaseException | None = None


class DeadlineThreads:
    """Threads that calls are made on; at most `max_stuck` of them hang before calls are refused."""

    def __init__(self, name: str, *, max_stuck: int = 2) -> None:
        self._name = name
        self._max_stuck = max_stuck
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job[object] | None]] = []
        self._num_stuck = 0
        self._is_closed = False

    @property
    def num_stuck(self) -> int:
        """Calls that overran and have not returned yet."""
        return self._num_stuck

    def run(
        self, call: Callable[[], T], timeout_s: float, when_late: Callable[[], None] | None = None
    ) -> T:
        """The result of `call`, or what it raised.

        Args:
            when_late: run once an overrunning call has returned after all.

        Raises:
            CallNotDoneError: it did not return in time.
            CallRefusedError: it was not made, as too many others are stuck.
        """
        job: _Job[T] = _Job(call, when_late or _nothing)
        self._submit(job)
        if not job.done.wait(timeout_s):
            with self._lock:
                if not job.done.is_set():
                    job.is_abandoned = True
                    self._num_stuck += 1
                    raise CallNotDoneError(f"no answer in {timeout_s:.1f} s")
        if job.error is not None:
            try:
                raise job.error
            finally:
                # The error names this frame, the job names the error: a circle, and what the call
                # holds would stay until some collection of garbage.
                del job
        return job.result[0]

    def close(self) -> None:
        """Let idle threads end; stuck ones end when their call returns."""
        with self._lock:
            self._is_closed = True
            for jobs in self._idle:
                jobs.put(None)
            self._idle.clear()

    def _submit(self, job: _Job[T]) -> None:
        with self._lock:
            if self._is_closed:
                raise CallRefusedError("closed")
            if self._num_stuck >= self._max_stuck:
                raise CallRefusedError(f"{self._num_stuck} calls hang")
            jobs = self._idle.pop() if self._idle else self._start_thread()
        jobs.put(job)  # type: ignore[arg-type]  # a worker runs jobs of any result type

    def _start_thread(self) -> queue.SimpleQueue[_Job[object] | None]:
        jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        # Daemon threads: a call that hangs for ever must not keep the process from ending.
        threading.Thread(target=self._work, args=(jobs,), name=self._name, daemon=True).start()
        return jobs

    def _work(self, jobs: queue.SimpleQueue[_Job[object] | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job.result.append(job.call())
            except BaseException as error:
                job.error = error
            with self._lock:
                job.done.set()
                is_late = job.is_abandoned
                self._num_stuck -= is_late
                is_last = self._is_closed
                if not is_last:
                    self._idle.append(jobs)
            if is_late:
                job.when_late()
            del job  # an idle thread must not keep the buffers of its last call alive
            if is_last:
                return


def _nothing() -> None:
    pass
