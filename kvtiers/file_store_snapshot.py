# SPDX-License-Identifier: Apache-2.0
"""The index of a file store on disk: saves a scan at start, and keeps the order of use.

Does not know: whether it is still true. It may be old, torn or missing: the segments are what
counts, and whoever loads it compares. A damaged one is as good as none.

  "MRIX", version, number of segments, number of records
  per segment: length of its name, name, how far it was known
  per record, the one to go first in front: key hash, parent hash, segment, offset, length, sequence
  xxh3-64 of all before
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvtiers.file_store_segments import Record

_HEAD = struct.Struct("<4sIII")
_SEGMENT = struct.Struct("<HQ")
_RECORD = struct.Struct("<16s16sIQQQ")
_SUM = struct.Struct("<Q")
_MAGIC = b"MRIX"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`ends`: segment -> up to where `records` has all of it; records in eviction order."""

    ends: Mapping[str, int] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)


def save_snapshot(path: Path, ends: Mapping[str, int], records: Iterable[Record]) -> None:
    """Replace the snapshot as a whole; raises OSError."""
    numbers = {segment: number for number, segment in enumerate(ends)}
    packed = [
        _RECORD.pack(r.key_hash, r.parent_hash, numbers[r.segment], r.offset, r.blob_bytes, r.seq)
        for r in records
        if r.segment in numbers
    ]
    parts = [_HEAD.pack(_MAGIC, _VERSION, len(ends), len(packed))]
    for segment, end in ends.items():
        parts += [_SEGMENT.pack(len(segment), end), segment.encode("ascii")]
    raw = b"".join(parts + packed)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(raw + _SUM.pack(xxh3_64_intdigest(raw)))
    os.replace(temporary, path)


def load_snapshot(path: Path) -> Snapshot:
    """The last one saved; an empty one where there is none, or none that is whole."""
    try:
        return _parse(path.read_bytes())
    except (OSError, struct.error, ValueError, IndexError):
        return Snapshot()


def _parse(raw: bytes) -> Snapshot:
    body = raw[: -_SUM.size]
    if _SUM.unpack(raw[-_SUM.size :])[0] != xxh3_64_intdigest(body):
        return Snapshot()
    magic, version, num_segments, num_records = _HEAD.unpack_from(body)
    if magic != _MAGIC or version != _VERSION:
        return Snapshot()
    at = _HEAD.size
    ends: dict[str, int] = {}
    for _ in range(num_segments):
        name_bytes, end = _SEGMENT.unpack_from(body, at)
        at += _SEGMENT.size + name_bytes
        ends[body[at - name_bytes : at].decode("ascii")] = end
    names = list(ends)
    records = [
        Record(key_hash, parent_hash, seq, names[number], offset, blob_bytes)
        for key_hash, parent_hash, number, offset, blob_bytes, seq in _RECORD.iter_unpack(
            body[at : at + num_records * _RECORD.size]
        )
    ]
    return Snapshot(ends, records)
