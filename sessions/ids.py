# SPDX-License-Identifier: Apache-2.0
"""Ids of sessions, turns, items, calls and leases: time-ordered, collision-free.

Does not know: what the ids name. An id is `<prefix>_` and 26 base-32 digits: 48 bits of Unix
milliseconds, then 80 random bits. Ids of one process increase strictly, also when its clock steps
back; their text sorts as they were made.

Source: the layout is that of ULID (github.com/ulid/spec), lower-case.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time

PREFIXES = ("sess", "turn", "item", "call", "lease", "log", "batch")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_NUM_DIGITS = 26
_RANDOM_BITS = 80
_PATTERN = re.compile(rf"({'|'.join(PREFIXES)})_[{_ALPHABET}]{{{_NUM_DIGITS}}}\Z")


class _Sequence:
    """The last value handed out, guarded by a lock; a forked child starts afresh."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> int:
        now_ms = time.time_ns() // 1_000_000
        fresh = (now_ms << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS)
        with self._lock:
            if now_ms > self._last >> _RANDOM_BITS:
                self._last = fresh
            else:
                # Same millisecond (or the clock went back): a random step keeps the order and
                # stays unguessable; 2^64 such steps would fit into one millisecond's range.
                self._last += 1 + secrets.randbits(16)
            return self._last


_sequence = _Sequence()


def _reset_after_fork() -> None:
    global _sequence
    _sequence = _Sequence()


os.register_at_fork(after_in_child=_reset_after_fork)


def new_id(prefix: str) -> str:
    """Return a new id with one of `PREFIXES`, greater than every id made before in this process."""
    if prefix not in PREFIXES:
        raise ValueError(f"prefix: {prefix!r} is not one of {', '.join(PREFIXES)}")
    value = _sequence.next()
    digits = [""] * _NUM_DIGITS
    for position in range(_NUM_DIGITS - 1, -1, -1):
        digits[position] = _ALPHABET[value & 31]
        value >>= 5
    return f"{prefix}_{''.join(digits)}"


def is_id(text: str, prefix: str) -> bool:
    """Whether `text` has the form of an id with that prefix."""
    match = _PATTERN.match(text)
    return match is not None and match.group(1) == prefix
