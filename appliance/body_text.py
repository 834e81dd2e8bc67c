# SPDX-License-Identifier: Apache-2.0
"""What a JSON body may spell: Unicode text in UTF-8, integers of 64 bits.

Python's reader lets halves of surrogate pairs through, and integers of any length; no store, hash
or engine could hold them. Nearly every body passes two quick looks. The others are looked at as an
array of bytes: a search by patterns either stops at each escape and digit, or goes back over a
whole string, which whoever sends it may make as long as a body may be.

Does not know: routes, requests.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException

from appliance.errors import STATUS_BY_CODE

Bytes = NDArray[np.uint8]
Places = NDArray[np.intp]

_SURROGATE = re.compile(rb"\\u[dD]")
# Shifts that add up to 18: with each, what is left stands for a run as many digits longer. An
# integer of fewer than 19 has 64 bits at most.
_TO_LONG_RUN = (1, 2, 4, 8, 3)
_DIGITS = re.compile(rb"[0-9]+")
# What stands in front of, and behind, digits that belong to a number with a point or an exponent.
_FLOAT_HEAD = re.compile(rb"(?:\.|[0-9][eE][+-]?)\Z")
_FLOAT_TAIL = re.compile(rb"\.[0-9]|[eE][+-]?[0-9]")


class BodyRefused(HTTPException):
    """A body that no route can read. The kind of error that passes the framework's body reader
    unchanged.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(STATUS_BY_CODE[code], message)
        self.code = code


def check_text(body: bytes) -> tuple[object] | None:
    """Return the body's value where it had to be read for this: nobody need read it again.

    Raises: BodyRefused, of what stands first.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise BodyRefused("invalid_json", f"the body is not UTF-8: {error.reason}") from error
    has_surrogates = b"\\" in body and _SURROGATE.search(body) is not None
    parsed = _read_strictly(body) if has_surrogates else None
    is_text = parsed is not None or not has_surrogates
    if is_text and not has_long_number(body):
        return parsed  # nearly every body
    text = np.frombuffer(body, np.uint8)
    escapes = _escapes(text)
    half = None if is_text else _first_half_pair(text, escapes)
    number = _first_wide_integer(body, text, escapes)
    if number is not None and (half is None or number[0] < half):
        at, shown = number
        raise BodyRefused(
            "invalid_value", f"{shown[:24]} at byte {at}: integers have 64 bits at most"
        )
    if half is not None:
        escape = body[half : half + 6].decode("ascii", "replace")
        raise BodyRefused(
            "invalid_json", f"the body is not Unicode text: {escape} at byte {half} stands alone"
        )
    return parsed


def has_long_number(body: bytes) -> bool:
    """Whether 19 digits follow each other anywhere. A context of token ids is mostly digits: a
    search stops at each of them."""
    return bool(_long_runs(_are_digits(np.frombuffer(body, np.uint8))).any())


def _are_digits(text: Bytes) -> NDArray[np.bool_]:
    return (text - np.uint8(ord("0"))) < 10


def _long_runs(is_run: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Where runs of 19 begin; so many places fewer than there are."""
    for shift in _TO_LONG_RUN:
        is_run = is_run[shift:] & is_run[:-shift]
    return is_run


def _read_strictly(body: bytes) -> tuple[object] | None:
    """The value a reader finds that, unlike Python's, refuses half of a surrogate pair."""
    try:
        return (msgspec.json.decode(body),)
    except (msgspec.DecodeError, RecursionError):
        return None


def _escapes(text: Bytes) -> Places:
    """Backslashes that begin an escape: each other one of those that follow each other."""
    places = np.flatnonzero(text == ord("\\"))
    begins = np.diff(places, prepend=-2) != 1
    first = places[begins][np.cumsum(begins) - 1]
    chosen: Places = places[(places - first) % 2 == 0]
    return chosen


def _first_half_pair(text: Bytes, escapes: Places) -> int | None:
    """Where the first escape of half a surrogate pair stands without its other half."""
    escapes = escapes[escapes + 3 < len(text)]
    digit = text[escapes + 3] | 0x20  # letters become small, digits stay
    is_surrogate = (text[escapes + 1] == ord("u")) & (text[escapes + 2] | 0x20 == ord("d"))
    is_low = is_surrogate & (digit >= ord("c")) & (digit <= ord("f"))
    is_high = is_surrogate & np.isin(digit, np.frombuffer(b"89ab", np.uint8))
    high, low = escapes[is_high], escapes[is_low]
    alone = np.concatenate((np.setdiff1d(high, low - 6), np.setdiff1d(low, high + 6)))
    return int(alone.min()) if alone.size else None


def _first_wide_integer(body: bytes, text: Bytes, escapes: Places) -> tuple[int, str] | None:
    """Where the first integer outside of strings and beyond 64 bits stands, and its text."""
    is_quote: Any = text == ord('"')
    is_quote[(escapes + 1)[escapes + 1 < len(text)]] = False
    is_plain = _are_digits(text) & ~np.logical_xor.accumulate(is_quote)
    long = np.flatnonzero(_long_runs(is_plain))
    for at in long[np.diff(long, prepend=-2) != 1].tolist():
        digits = _DIGITS.match(body, at)
        assert digits is not None
        head = body[max(0, at - 3) : at]
        if _FLOAT_HEAD.search(head) or _FLOAT_TAIL.match(body, digits.end()):
            continue
        shown = ("-" if head[-1:] == b"-" else "") + digits[0].decode()
        if len(digits[0]) > 20 or not -(2**63) <= int(shown) < 2**64:
            return at, shown
    return None
