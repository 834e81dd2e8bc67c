# SPDX-License-Identifier: Apache-2.0
"""What objects in Mooncake say of themselves, read from their heads.

Does not know: connections, what to do with it. A put writes into each object's header which page
it follows, and when it was put (`kvtiers.objects.Stamp`), so whoever finds an object can tell its
place without having put it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvtiers.mooncake_client import NO_SPACE, MooncakeClient
from kvtiers.objects import HEADER_BYTES, key_hash, read_stamp

REMOVED = (0, -704)
OTHER_LENGTH = -600
# The disk tier could not read an object. One such object gives the whole call this code.
NOT_READ = -1102
BATCH = 256


class PageCalls(Protocol):
    """Calls of the library; each answers with codes, with none where it does not answer."""

    def exist(self, keys: list[str]) -> list[int]: ...

    def remove(self, keys: list[str]) -> list[int]: ...

    def heads(self, keys: list[str], into: memoryview, *, whole: bool) -> list[int]:
        """The first 256 bytes of the first of these, one after the other; codes are lengths."""
        ...


class GuardedCalls:
    """Calls of a connection, made by `ask`, which says what came of them."""

    def __init__(
        self, ask: Callable[..., list[int]], client: MooncakeClient, timeout_s: float
    ) -> None:
        self._ask = ask
        self._client = client
        self._timeout_s = timeout_s

    def exist(self, keys: list[str]) -> list[int]:
        return self._ask(lambda: self._client.exist(keys, self._timeout_s))

    def remove(self, keys: list[str]) -> list[int]:
        return self._ask(lambda: self._client.remove(keys, self._timeout_s))

    def heads(self, keys: list[str], into: memoryview, *, whole: bool) -> list[int]:
        read = partial(self._client.heads, keys, into, self._timeout_s, whole=whole)
        return self._ask(read, OTHER_LENGTH, NOT_READ)


@dataclass(slots=True, eq=False)
class MooncakePage:
    """A page that is there."""

    key: str
    key_hash: bytes
    parent_hash: bytes
    num_bytes: int
    used_ms: int
    put_number: int = 0
    """Of the puts of this engine, from 1 on; 0: it was found there."""


@dataclass(slots=True)
class FoundPages:
    """What the heads of some objects said."""

    pages: list[MooncakePage] = field(default_factory=list)
    strangers: set[str] = field(default_factory=set)
    """Objects that are no pages of ours, or none whose head can be read here."""
    num_unread: int = 0
    """Objects that cannot be read now: they are being written."""
    is_whole: bool = True
    """False: there was no time for all."""


def find_pages(calls: PageCalls, keys: Sequence[str], has_time: Callable[[], bool]) -> FoundPages:
    """Read the heads of these objects, while there is time."""
    found = FoundPages()
    waiting = list(keys)
    while waiting:
        heads = memoryview(bytearray(BATCH * HEADER_BYTES))
        codes = _read_heads(calls, waiting[:BATCH], heads) if has_time() else []
        if not codes:
            found.is_whole = False
            break
        for at, (key, code) in enumerate(zip(waiting, codes, strict=False)):
            stamp = read_stamp(_head(heads, at))
            if code in REMOVED:
                continue
            if code < 0 and code != OTHER_LENGTH:
                found.num_unread += 1
            elif stamp is None or stamp.key_hash != key_hash(key):
                found.strangers.add(key)
            else:
                found.pages.append(
                    MooncakePage(
                        key, stamp.key_hash, stamp.parent_hash, stamp.num_bytes, stamp.put_ms
                    )
                )
        waiting = waiting[len(codes) :]
    return found


def _read_heads(calls: PageCalls, keys: list[str], into: memoryview) -> list[int]:
    codes = calls.heads(keys, into, whole=False)
    for at, code in enumerate(codes):
        if code == NO_SPACE:  # only the disk has it, or the library reads no parts
            alone = calls.heads([keys[at]], _head(into, at), whole=True)
            if not alone:
                return codes[:at]
            codes[at] = alone[0]
            if codes[at] == NOT_READ and calls.remove([keys[at]]):
                codes[at] = 0  # nobody could read it
    return codes


def _head(heads: memoryview, at: int) -> memoryview:
    return heads[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]
