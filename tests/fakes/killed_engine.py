# SPDX-License-Identifier: Apache-2.0
"""`python -m engine.process` that kills itself (SIGKILL) in the middle of one kind of move.

The environment variable KILL_AT says which, and at which of its calls: `fetch:3`. Half of what the
call writes is written by then.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from engine.process import main
from kvtiers import file_store_segments
from kvtiers.device_memory import Body, HostMemory, Wait
from kvtiers.file_store import FileStore
from kvtiers.file_store_pages import DirectoryPages
from kvtiers.file_store_segments import Record
from kvtiers.host_pool import HostPool, PageName

KILL_AT = "MOORAGE_TEST_KILL_AT"
PHASES = (
    "write_back",  # L1 to L2: half a page is copied
    "seal",  # L2 has the page's bytes and its name, not yet the header that vouches for them
    "store",  # L2 to L3: half an object is in the file
    "probe",
    "fetch",  # L3 to L2: half an object is in its slot
    "load_back",  # L2 to L1: half a page is copied
    "adopt",  # a start, over what another one left
)


class Death:
    """Counts calls of the phase; the last one is told to die."""

    def __init__(self, phase: str, calls: int) -> None:
        self.phase = phase
        self.left = calls

    def is_due(self, phase: str) -> bool:
        if phase == self.phase:
            self.left -= 1
        return phase == self.phase and self.left == 0


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives SIGKILL")


def arm(death: Death) -> None:
    """Replace what carries out the phase by what dies in it."""
    read, write, finish = HostMemory.read, HostMemory.write, HostPool.finish
    probe, read_object = FileStore.probe, FileStore._read
    surely_lacks = FileStore.surely_lacks  # the same question, answered without a thread
    survivors, write_all = HostPool.survivors, file_store_segments._write_all

    def dying_read(self: HostMemory, pages: Sequence[int], into: Sequence[Body]) -> None:
        if death.is_due("write_back"):
            half = len(into[0]) // 2
            into[0][:half] = self._pages[pages[0]][:half]
            die()
        read(self, pages, into)

    def dying_write(self: HostMemory, pages: Iterable[tuple[int, Body]]) -> Wait | None:
        if death.is_due("load_back"):
            for page, body in pages:
                self._pages[page][: len(body) // 2] = body[: len(body) // 2]
                die()
        return write(self, pages)

    def dying_finish(self: HostPool, page: int, page_hash: bytes, name: PageName | None) -> None:
        if death.is_due("seal"):
            self.write_record(page, name)
            die()
        finish(self, page, page_hash, name)

    def dying_write_all(fd: int, parts: list[memoryview], offset: int) -> None:
        if death.is_due("store"):
            whole = b"".join(parts)
            os.pwrite(fd, whole[: len(whole) // 2], offset)
            die()
        write_all(fd, parts, offset)

    def dying_probe(self: FileStore, keys: Sequence[str]) -> int:
        if death.is_due("probe"):
            die()
        return probe(self, keys)

    def dying_surely_lacks(self: FileStore, key: str) -> bool:
        if death.is_due("probe"):
            die()
        return surely_lacks(self, key)

    def dying_read_object(
        self: FileStore, pages: DirectoryPages, fd: int, record: Record, key: str, view: memoryview
    ) -> bool:
        if death.is_due("fetch"):
            os.preadv(fd, [view[: len(view) // 2]], record.blob_offset)
            die()
        return read_object(self, pages, fd, record, key, view)

    def dying_survivors(self: HostPool) -> Iterator[tuple[int, PageName]]:
        for found in survivors(self):
            if death.is_due("adopt"):
                die()
            yield found

    HostMemory.read = dying_read  # type: ignore[method-assign]
    HostMemory.write = dying_write  # type: ignore[method-assign]
    HostPool.finish = dying_finish  # type: ignore[method-assign]
    HostPool.survivors = dying_survivors  # type: ignore[method-assign]
    FileStore.surely_lacks = dying_surely_lacks  # type: ignore[method-assign]
    FileStore.probe = dying_probe  # type: ignore[method-assign]
    FileStore._read = dying_read_object  # type: ignore[method-assign]
    file_store_segments._write_all = dying_write_all


if __name__ == "__main__":
    name, _, calls = os.environ.get(KILL_AT, "").partition(":")
    if name:
        assert name in PHASES
        arm(Death(name, int(calls)))
    sys.exit(main())
