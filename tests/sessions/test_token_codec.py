# SPDX-License-Identifier: Apache-2.0
"""Token ids survive packing exactly and take only the bytes they need."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions import token_codec
from sessions.errors import StoreCorrupt

ids_lists = st.lists(st.integers(min_value=0, max_value=2**31 - 1))


@settings(deadline=None)
@given(ids_lists)
def test_ids_are_little_endian_int32(ids: list[int]) -> None:
    token_ids = token_codec.encode_ids(ids)
    assert token_ids == struct.pack(f"<{len(ids)}i", *ids)
    assert token_codec.decode_ids(token_ids) == ids
    assert token_codec.count(token_ids) == len(ids)


@settings(deadline=None)
@given(ids_lists)
def test_packed_ids_unpack_to_the_same_bytes(ids: list[int]) -> None:
    token_ids = token_codec.encode_ids(ids)
    assert token_codec.unpack(token_codec.pack(token_ids)) == token_ids


def test_negative_ids_survive() -> None:
    token_ids = token_codec.encode_ids([-1, 5, -(2**31)])
    assert token_codec.unpack(token_codec.pack(token_ids)) == token_ids


@pytest.mark.parametrize(
    ("largest", "bytes_per_id"),
    [(255, 1), (256, 2), (49_151, 2), (65_535, 2), (65_536, 3), (128_255, 3), (2**24, 4)],
)
def test_an_id_takes_as_many_bytes_as_the_largest_needs(largest: int, bytes_per_id: int) -> None:
    packed = token_codec.pack(token_codec.encode_ids([0] * 99 + [largest]))
    assert len(packed) == 1 + 100 * bytes_per_id


def test_no_ids_pack_to_one_byte() -> None:
    packed = token_codec.pack(b"")
    assert len(packed) == 1
    assert token_codec.unpack(packed) == b""


@pytest.mark.parametrize("packed", [b"", b"\x00", b"\x00ab", b"\x02abc", b"\x05abcde"])
def test_bytes_that_pack_cannot_have_written_are_corrupt(packed: bytes) -> None:
    with pytest.raises(StoreCorrupt):
        token_codec.unpack(packed)


def test_bytes_that_end_inside_an_id_are_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        token_codec.count(b"12345")
