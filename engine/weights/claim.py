# SPDX-License-Identifier: Apache-2.0
"""A directory that one process writes to: it holds a mark there, and lists what it places.

A process that is killed leaves its mark, which nobody holds then: the next one to claim the
directory removes what the list names. Does not know: what is written.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

MARK = "conversion.partial"


class DirectoryClaim:
    """Not thread-safe. After `take`, either `release` (what was placed stays) or `discard`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mark: IO[str] | None = None
        self._placed: list[Path] = []

    @staticmethod
    def is_free(directory: Path) -> bool:
        """Whether the directory is empty, or at least marked as one that a writer left or has."""
        return (directory / MARK).is_file() or not any(directory.iterdir())

    def take(self) -> None:
        """Hold the directory, which hours may pass over, and empty it of what a dead writer left.

        Raises:
            FileExistsError: another writer holds it, or something in it is no writer's.
            OSError: it cannot be written to.
        """
        path = self._directory / MARK
        is_new = not path.exists()
        mark = path.open("a+", encoding="utf-8")
        try:
            _lock(mark, is_new)
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(mark.fileno())):
                raise FileExistsError(f"{path}: another writer has just ended")
            mark.seek(0)
            left = {self._directory / line for line in mark.read().splitlines()}
            found = {*self._directory.iterdir()} - {path}
            if found - left:
                if is_new:  # so the directory is as it was
                    path.unlink()
                raise FileExistsError(f"{self._directory}: holds what no writer of ours placed")
        except BaseException:
            mark.close()
            raise
        for each in left & found:
            each.unlink()
        mark.truncate(0)
        self._mark = mark

    def place(self, name: str) -> Path:
        """Where to write the file of this name, which `discard` removes."""
        assert self._mark is not None, "claimed before anything is placed"
        self._placed.append(self._directory / name)
        self._mark.write(f"{name}\n")
        self._mark.flush()
        return self._placed[-1]

    def release(self) -> None:
        """Leave what was placed as it is."""
        if self._mark is not None:
            (self._directory / MARK).unlink(missing_ok=True)  # an interrupt may have come behind it
            self._mark.close()
            self._mark = None

    def discard(self) -> None:
        """Remove what was placed; the mark last, as it names the rest."""
        for path in self._placed:
            path.unlink(missing_ok=True)
        self.release()


def _lock(mark: IO[str], is_new: bool) -> None:
    """Until the process ends, however it does."""
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(f"{mark.name}: another writer holds it") from None
    except OSError:  # file systems without locks: whose mark it is nobody can tell
        if not is_new:
            raise FileExistsError(f"{mark.name}: another writer's, dead or alive") from None
