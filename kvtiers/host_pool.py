# SPDX-License-Identifier: Apache-2.0
"""L2: slots of host memory, one stored page each, that may outlive the process that fills them.

A slot is an object as `kvtiers.objects` seals it, so the same bytes go to L3 and over the wire.
Beside each slot lies a record of what the page is: its name, its parent's name, its tokens and
salt; a process that comes after a crash can tell the control plane what it finds. Both carry sums
and are written last, so a copy that was cut short is a page that is not there.

Range table of the region, each part at a multiple of 4096:
  [0, 4096)        what the region is: version, sizes, namespace of its keys
  [records, slots) one record a slot
  [slots, end)     the slots

Does not know: which slot is whose (the control plane does), how bytes come and go.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvtiers import objects
from kvtiers.errors import TierConfigError
from kvtiers.host_region import HostRegion
from kvtiers.keys import PAGE_HASH_BYTES, ObjectKeys
from kvtiers.layout import KvLayout

ALIGNMENT = 4096
MAX_SALT_BYTES = 1024
REGION_VERSION = 2
FEW_PAGES = 8  # are looked at sooner one by one
_MAGIC = b"MRL2"

_REGION = struct.Struct("<4sIQQQ32s")
_RECORD = struct.Struct("<16s16sII")
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageName:
    """What a full page is: how the control plane names it, and the tokens that make the name."""

    page_hash: bytes
    parent_hash: bytes
    token_ids: bytes  # int32, little-endian
    salt: str
    start: int = 0  # tokens before it


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Sizes of a region; bytes."""

    num_slots: int
    page_bytes: int
    page_size: int  # tokens

    @property
    def slot_bytes(self) -> int:
        """From one slot to the next."""
        return _aligned(objects.object_bytes(self.page_bytes))

    @property
    def record_bytes(self) -> int:
        """From one record to the next."""
        return -(-(_SUM.size + _RECORD.size + 4 * self.page_size + MAX_SALT_BYTES) // 64) * 64

    @property
    def slots_offset(self) -> int:
        """Where the first slot begins."""
        return ALIGNMENT + _aligned(self.num_slots * self.record_bytes)

    @property
    def num_bytes(self) -> int:
        """The whole region."""
        return self.slots_offset + self.num_slots * self.slot_bytes


def shape_within(num_bytes: int, layout: KvLayout, *, most_slots: int) -> PoolShape:
    """As many slots as `num_bytes` hold, at most `most_slots`; maybe none."""
    one = PoolShape(num_slots=1, page_bytes=layout.page_bytes, page_size=layout.page_size)
    # What records are rounded up by is less than one slot.
    num_slots = max(0, (num_bytes - ALIGNMENT) // (one.slot_bytes + one.record_bytes))
    shape = replace(one, num_slots=min(num_slots, most_slots))
    if shape.num_slots and shape.num_bytes > num_bytes:
        shape = replace(shape, num_slots=shape.num_slots - 1)
    return shape


class HostPool:
    """Slots in shared memory. A slot is used by one thread at a time: whoever moves its page.

    Args:
        shape: at least one slot.
        fd: a region that an older process may have left pages in; None: memory of this process.

    Raises:
        TierConfigError: no slot, or no memory for them.
    """

    def __init__(
        self, shape: PoolShape, layout: KvLayout, keys: ObjectKeys, fd: int | None = None
    ) -> None:
        if shape.num_slots < 1:
            raise TierConfigError("l2 pool", shape.num_slots, "at least one slot")
        self.shape = shape
        self._keys = keys
        self._fingerprint = layout.fingerprint()
        self.region = HostRegion(shape.num_bytes, fd)
        self._memory = self.region.memory
        whole = np.frombuffer(self._memory, np.uint8)
        start, width = shape.slots_offset, shape.slot_bytes
        body = objects.HEADER_BYTES
        slots = whole[start : start + shape.num_slots * width].reshape(-1, width)
        self._headers, self._bodies = slots[:, :body], slots[:, body : body + shape.page_bytes]
        # A page is looked at each time it is loaded; what its key hashes to does not change.
        self._key_hash = lru_cache(maxsize=2 * shape.num_slots)(
            lambda page_hash: objects.key_hash(keys.key(page_hash))
        )
        self._doubtful: set[int] = set()  # slots whose bodies nobody has summed up since the start
        self._claim_region()

    @property
    def num_slots(self) -> int:
        return self.shape.num_slots

    def slot(self, page: int) -> memoryview:
        """The object of a slot, header and body; view."""
        start = self.shape.slots_offset + page * self.shape.slot_bytes
        return self._memory[start : start + objects.object_bytes(self.shape.page_bytes)]

    def body(self, page: int) -> NDArray[np.uint8]:
        """The page's bytes in a slot; view."""
        body: NDArray[np.uint8] = self._bodies[page]
        return body

    @property
    def bodies(self) -> NDArray[np.uint8]:
        """The pages' bytes of all slots, [num_slots, page_bytes], not contiguous; view."""
        return self._bodies

    def key(self, page_hash: bytes) -> str:
        """The object key of a page, here and in L3."""
        return self._keys.key(page_hash)

    def begin(self, page: int) -> None:
        """From now on the slot holds nothing whole: its bytes are about to be written."""
        self._doubtful.discard(page)
        self._memory[self._record_at(page) : self._record_at(page) + _SUM.size] = bytes(_SUM.size)
        self.slot(page)[objects.HEADER_BYTES - _SUM.size : objects.HEADER_BYTES] = b"\xff" * 8

    def finish(self, page: int, page_hash: bytes, name: PageName | None) -> None:
        """The page's bytes are in place: seal them. Without a name a restart forgets the page."""
        self.write_record(page, name)
        objects.seal(self.slot(page), self.key(page_hash), self._fingerprint)
        self._key_hash(page_hash)  # the first load of the page will ask for it

    def write_record(self, page: int, name: PageName | None) -> None:
        """Say what the slot's page is; the slot's header still decides whether it is there."""
        if name is None:
            return
        salt = name.salt.encode("utf-8")
        if len(salt) > MAX_SALT_BYTES or len(name.token_ids) != 4 * self.shape.page_size:
            return
        fields = _RECORD.pack(name.page_hash, name.parent_hash, name.start, len(salt))
        fields += name.token_ids + salt
        start = self._record_at(page)
        self._memory[start + _SUM.size : start + _SUM.size + len(fields)] = fields
        self._memory[start : start + _SUM.size] = _SUM.pack(xxh3_64_intdigest(fields))

    def read_record(self, page: int) -> PageName | None:
        """What the slot's page is; None where that was not said whole."""
        start = self._record_at(page) + _SUM.size
        (total,) = _SUM.unpack_from(self._memory, start - _SUM.size)
        page_hash, parent_hash, first, salt_len = _RECORD.unpack_from(self._memory, start)
        tokens_at = _RECORD.size
        salt_at = tokens_at + 4 * self.shape.page_size
        if salt_len > MAX_SALT_BYTES:
            return None
        fields = bytes(self._memory[start : start + salt_at + salt_len])
        if xxh3_64_intdigest(fields) != total:
            return None
        try:
            salt = fields[salt_at:].decode("utf-8")
        except UnicodeDecodeError:
            return None
        return PageName(
            page_hash=page_hash,
            parent_hash=parent_hash,
            token_ids=fields[tokens_at:salt_at],
            salt=salt,
            start=first,
        )

    def doubt(self, page: int) -> None:
        """Sum the page's bytes up at its next use, whatever its header says."""
        self._doubtful.add(page)

    def holds(self, page: int, page_hash: bytes) -> bool:
        """Whether the slot's header is whole and speaks of this page; reads no body.

        Of a slot in doubt the body is read, once.
        """
        if page in self._doubtful:
            self._doubtful.discard(page)
            return self.is_sound(page, page_hash)
        return self.is_sealed_for(page, page_hash)

    def which_hold(self, pages: Sequence[int], page_hashes: Sequence[bytes]) -> list[bool]:
        """What `holds` says of each of these slots, all of them looked at in one go."""
        if len(pages) < FEW_PAGES:
            return [self.holds(*which) for which in zip(pages, page_hashes, strict=True)]
        headers = self._headers[list(pages)]
        hashes = [self._key_hash(page_hash) for page_hash in page_hashes]
        size = self.shape.page_bytes
        good: list[bool] = objects.are_sealed_for(headers, hashes, self._fingerprint, size).tolist()
        if self._doubtful:
            for at, (page, page_hash) in enumerate(zip(pages, page_hashes, strict=True)):
                if page in self._doubtful:
                    good[at] = self.holds(page, page_hash)
        return good

    def is_sealed_for(self, page: int, page_hash: bytes) -> bool:
        """Whether the slot's header is whole and speaks of this page."""
        return objects.is_sealed_for(self.slot(page), self.key(page_hash), self._fingerprint)

    def is_sound(self, page: int, page_hash: bytes) -> bool:
        """Whether the slot holds this page, whole and unchanged."""
        return objects.verify(self.slot(page), self.key(page_hash), self._fingerprint)

    def survivors(self) -> Iterator[tuple[int, PageName]]:
        """Slots that an older process filled whole, with what they hold; bodies are not read."""
        for page in range(self.num_slots if self.has_survivors else 0):
            name = self.read_record(page)
            if name is not None and self.is_sealed_for(page, name.page_hash):
                yield page, name

    def clear(self) -> None:
        """Forget what an older process left."""
        for page in range(self.num_slots):
            start = self._record_at(page)
            self._memory[start : start + _SUM.size] = bytes(_SUM.size)

    def _record_at(self, page: int) -> int:
        return ALIGNMENT + page * self.shape.record_bytes

    def _claim_region(self) -> None:
        """Keep what is in the region if it was made just so; else begin anew."""
        shape = self.shape
        fields = _REGION.pack(
            _MAGIC,
            REGION_VERSION,
            shape.num_slots,
            shape.page_bytes,
            shape.page_size,
            self._keys.namespace.encode(),
        )
        said = fields + _SUM.pack(xxh3_64_intdigest(fields))
        self.has_survivors = bytes(self._memory[: len(said)]) == said
        if not self.has_survivors:
            if not self.region.was_empty:
                self.clear()
            self._memory[: len(said)] = said


def kept_slots(fd: int, layout: KvLayout) -> int:
    """How many slots of this layout's size an older process made in a region; 0 where none.

    A pool of that many slots finds them again.
    """
    region_bytes = os.fstat(fd).st_size
    if region_bytes < ALIGNMENT:
        return 0
    region = HostRegion(region_bytes, fd)
    size = _REGION.size
    magic, version, num_slots, page_bytes, page_size, _ = _REGION.unpack_from(region.memory)
    (total,) = _SUM.unpack_from(region.memory, size)
    is_whole = xxh3_64_intdigest(region.memory[:size]) == total
    shape = PoolShape(num_slots=num_slots, page_bytes=page_bytes, page_size=page_size)
    is_same = (
        is_whole
        and (magic, version) == (_MAGIC, REGION_VERSION)
        and (page_bytes, page_size) == (layout.page_bytes, layout.page_size)
        and shape.num_bytes == region_bytes
    )
    return num_slots if is_same else 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


assert _RECORD.size == 2 * PAGE_HASH_BYTES + 8
