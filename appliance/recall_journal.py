# SPDX-License-Identifier: Apache-2.0
"""What recall knows, on disk, so that a restarted API process still finds its answers.

Two files of bounded size: the one that is written, and the one before it. Each stands for itself:
what is built on an answer of an older file is written whole. Written without waiting for the disk:
a process may die at any time, and a torn end is cut off. Does not know: what the ids mean.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20
MAGIC = b"moorage-recall-1 "
KEY_BYTES = 32
_HEAD = struct.Struct(f"<IBI{KEY_BYTES}s{KEY_BYTES}s")  # ids' bytes, flags, crc, key, before
_IS_CLOSED, _HAS_BEFORE = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An answer: the ids it adds to `before`'s; to nothing where that is None."""

    key: bytes
    before: bytes | None
    added: bytes
    is_closed: bool


@dataclass(slots=True, kw_only=True)
class RecallJournal:
    """`model`: a fingerprint; ids of another model are worth nothing. One thread."""

    directory: Path
    model: str
    max_file_bytes: int = MAX_FILE_BYTES
    _written: set[bytes] = field(default_factory=set)  # keys in the file that is written
    _num_bytes: int = 0
    _is_writing: bool = False

    def read(self) -> Iterator[Entry]:
        """Yield what is on disk, the oldest first; then the newer file is gone on with."""
        yield from self._entries(self._old)
        for entry in self._entries(self._new):
            self._written.add(entry.key)
            yield entry
        self._is_writing = True
        if self._num_bytes:
            self._try(lambda: os.truncate(self._new, self._num_bytes))
        else:
            self._begin()

    def add(self, entry: Entry, whole: Callable[[], bytes]) -> None:
        """Append an answer; `whole` gives all its ids. Errors end the writing, and are logged."""
        if not self._is_writing:
            return
        if self._num_bytes > self.max_file_bytes:
            self._begin()
        if entry.before is not None and entry.before not in self._written:
            entry = Entry(key=entry.key, before=None, added=whole(), is_closed=entry.is_closed)
        self._try(lambda: self._append(_packed(entry)))
        self._written.add(entry.key)

    @property
    def _new(self) -> Path:
        return self.directory / "recall.new"

    @property
    def _old(self) -> Path:
        return self.directory / "recall.old"

    def _begin(self) -> None:
        """Go on in a new file; the last one is kept, the one before it is not."""
        self._written.clear()
        self._num_bytes = 0
        self._try(self._begin_file)

    def _begin_file(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._new.exists():
            self._new.replace(self._old)
        self._new.touch(mode=0o600)
        self._append(self._header)

    def _append(self, data: bytes) -> None:
        with self._new.open("ab", buffering=0) as file:
            if file.write(data) != len(data):  # the torn end is cut off at the next start
                raise OSError(f"{self._new}: written in part")
        self._num_bytes += len(data)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            logger.warning("answers are not kept on disk: %s", error)
            self._is_writing = False

    @property
    def _header(self) -> bytes:
        return MAGIC + self.model.encode() + b"\n"

    def _entries(self, path: Path) -> Iterator[Entry]:
        """The whole entries of a file; `_num_bytes` is where the last of them ends."""
        self._num_bytes = 0
        try:
            data = path.read_bytes()
        except OSError:
            return
        if not data.startswith(self._header):
            return
        at = self._num_bytes = len(self._header)
        while at + _HEAD.size <= len(data):
            size, flags, crc, key, before = _HEAD.unpack_from(data, at)
            added = data[at + _HEAD.size : at + _HEAD.size + size]
            if len(added) != size or crc != _crc(flags, key, before, added):
                logger.warning("%s: damaged at byte %d; what follows is not read", path, at)
                return
            yield Entry(
                key=key,
                before=before if flags & _HAS_BEFORE else None,
                added=added,
                is_closed=bool(flags & _IS_CLOSED),
            )
            at = self._num_bytes = at + _HEAD.size + size


def _packed(entry: Entry) -> bytes:
    flags = _IS_CLOSED * entry.is_closed | _HAS_BEFORE * (entry.before is not None)
    before = entry.before or bytes(KEY_BYTES)
    crc = _crc(flags, entry.key, before, entry.added)
    return _HEAD.pack(len(entry.added), flags, crc, entry.key, before) + entry.added


def _crc(flags: int, key: bytes, before: bytes, added: bytes) -> int:
    return zlib.crc32(added, zlib.crc32(bytes([flags]) + key + before))
