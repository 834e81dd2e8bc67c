# SPDX-License-Identifier: Apache-2.0
"""Segment files: records appended one after the other, found again by a scan.

Does not know: which record is worth keeping, who reads them. One writer at a time (the store's
write lock); readers open files by name on their own.

A record is a header of 64 bytes and a blob, padded to 4,096 so that a scan can go on behind a
damaged header:
  [0, 4) magic   [4, 8) version   [8, 24) key hash   [24, 40) hash of the key before it, or zero
  [40, 48) length of the blob     [48, 56) sequence number     [56, 64) xxh3-64 of [0, 56)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvtiers.objects import HEADER_BYTES

RECORD_HEADER_BYTES = 64
ALIGN_BYTES = 4096
SUFFIX = ".pages"

_MAGIC = b"MRSG"
_VERSION = 1
_FIELDS = struct.Struct("<4sI16s16sQQ")
_SUM = struct.Struct("<Q")
_PADDING = bytes(ALIGN_BYTES)


@dataclass(frozen=True, slots=True)
class Record:
    """Where an object lies, and which page it follows."""

    key_hash: bytes
    parent_hash: bytes
    seq: int
    segment: str
    offset: int
    blob_bytes: int

    @property
    def blob_offset(self) -> int:
        return self.offset + RECORD_HEADER_BYTES

    @property
    def num_bytes(self) -> int:
        """What it takes in its file."""
        return record_bytes(self.blob_bytes)

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


def record_bytes(blob_bytes: int) -> int:
    """What a blob takes in a segment: header, blob, padding."""
    return -(-(RECORD_HEADER_BYTES + blob_bytes) // ALIGN_BYTES) * ALIGN_BYTES


class SegmentFiles:
    """The segments of one directory; `sizes` has each with its length, oldest first.

    Every method that writes raises OSError and leaves no half record behind where it can.
    """

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self.sizes: dict[str, int] = {}
        self.used_bytes = 0
        self._fd = -1
        self._active = ""
        self._unsynced: set[str] = set()
        self._next_number = 1
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            self.sizes[path.name] = path.stat().st_size
            self.used_bytes += self.sizes[path.name]
            with contextlib.suppress(ValueError):
                self._next_number = max(self._next_number, int(path.name.split("-")[0]) + 1)

    @property
    def active(self) -> str:
        """The segment that is written to now; "" before the first write."""
        return self._active

    def append(self, key_hash: bytes, parent_hash: bytes, seq: int, blob: memoryview) -> Record:
        """Write a record at the end of the active segment, or of a new one if it is full."""
        num_bytes = record_bytes(len(blob))
        if not self._active or self.sizes[self._active] + num_bytes > self._segment_bytes:
            self._roll()
        offset = self.sizes[self._active]
        fields = _FIELDS.pack(_MAGIC, _VERSION, key_hash, parent_hash, len(blob), seq)
        header = fields + _SUM.pack(xxh3_64_intdigest(fields))
        padding = _PADDING[: num_bytes - RECORD_HEADER_BYTES - len(blob)]
        try:
            _write_all(self._fd, [memoryview(header), blob, memoryview(padding)], offset)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, offset)
            if offset:  # a new file may do where this one has grown too large
                self.seal_active()
            raise
        self.sizes[self._active] = offset + num_bytes
        self.used_bytes += num_bytes
        self._unsynced.add(self._active)
        return Record(key_hash, parent_hash, seq, self._active, offset, len(blob))

    def read_whole(self, record: Record) -> memoryview:
        """The blob of a record, in new memory; raises OSError where it is not all there."""
        with open(self._directory / record.segment, "rb", buffering=0) as file:
            blob = memoryview(bytearray(record.blob_bytes))
            if os.preadv(file.fileno(), [blob], record.blob_offset) != record.blob_bytes:
                raise OSError("a record is shorter than its header says")
            return blob

    def erase(self, record: Record) -> None:
        """Zero a record's headers in place, so that no scan and no read finds it again."""
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self._directory / record.segment, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _write_all(
                    fd, [memoryview(bytes(RECORD_HEADER_BYTES + HEADER_BYTES))], record.offset
                )
            finally:
                os.close(fd)
            self._unsynced.add(record.segment)

    def drop(self, segment: str) -> None:
        """Delete a segment; one that is gone already only leaves the books."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._directory / segment)
        self.used_bytes -= self.sizes.pop(segment, 0)
        self._unsynced.discard(segment)

    def seal_active(self) -> None:
        """The next append begins a new segment."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._active = -1, ""

    def leave_deleted(self) -> None:
        """Stop writing to an active segment whose file somebody deleted."""
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
            gone = self._active
            self.seal_active()
            self.drop(gone)

    def sync(self) -> None:
        """fdatasync every segment written since the last time, then the directory."""
        for segment in list(self._unsynced):
            with contextlib.suppress(FileNotFoundError):
                _sync_path(self._directory / segment)
            self._unsynced.discard(segment)
        _sync_path(self._directory)

    def scan(self, segment: str, start: int) -> Iterator[Record]:
        """Records from `start` on; behind a damaged one the scan goes on where the next begins.

        What lies after the last whole record (a write cut short) is cut off.
        """
        fd = os.open(self._directory / segment, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            offset = end = start
            while offset < size:
                record = _parse(os.pread(fd, RECORD_HEADER_BYTES, offset), segment, offset)
                if record is not None and record.end <= size:
                    yield record
                    offset = end = record.end
                else:
                    offset += ALIGN_BYTES
            if end < size:
                os.ftruncate(fd, end)
                self.used_bytes += end - self.sizes[segment]
                self.sizes[segment] = end
        finally:
            os.close(fd)

    def _roll(self) -> None:
        self.seal_active()
        # The random part: a name is never used twice, whatever an old snapshot remembers.
        name = f"{self._next_number:08d}-{secrets.token_hex(4)}{SUFFIX}"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        self._fd = os.open(self._directory / name, flags, 0o600)
        self._next_number += 1
        self._active = name
        self.sizes[name] = 0


def _parse(raw: bytes, segment: str, offset: int) -> Record | None:
    if len(raw) < RECORD_HEADER_BYTES:
        return None
    if _SUM.unpack_from(raw, _FIELDS.size)[0] != xxh3_64_intdigest(raw[: _FIELDS.size]):
        return None
    magic, version, key_hash, parent_hash, blob_bytes, seq = _FIELDS.unpack_from(raw)
    if magic != _MAGIC or version != _VERSION:
        return None
    return Record(key_hash, parent_hash, seq, segment, offset, blob_bytes)


def _write_all(fd: int, parts: list[memoryview], offset: int) -> None:
    """pwritev until all is written; a disk that fills up says so on the second call."""
    left = [part.cast("B") for part in parts if len(part)]
    while left:
        written = os.pwritev(fd, left, offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def _sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
