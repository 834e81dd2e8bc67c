# SPDX-License-Identifier: Apache-2.0
"""Object keys: what must differ does, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from kvtiers.errors import TierConfigError
from kvtiers.keys import ObjectKeys
from kvtiers.layout import PageLayout

_LAYOUT = PageLayout(num_layers=2, page_size=64, num_kv_heads=3, head_dim=64, dtype="bfloat16")
_HASH = bytes(range(16))


def test_a_key_spells_namespace_and_hash() -> None:
    keys = ObjectKeys("model", _LAYOUT)
    assert keys.key(_HASH) == f"{keys.namespace}/00/000102030405060708090a0b0c0d0e0f"
    assert len(keys.namespace) == 32


def test_model_layout_and_salt_each_separate_the_same_tokens() -> None:
    layouts = [_LAYOUT, replace(_LAYOUT, dtype="float32")]
    namespaces = [
        ObjectKeys(model, layout, salt).namespace
        for model, layout, salt in product(("m1", "m2"), layouts, ("", "tenant"))
    ]
    assert len(set(namespaces)) == 8
    assert ObjectKeys("m1", _LAYOUT, "tenant").key(_HASH) == ObjectKeys(
        "m1", replace(_LAYOUT), "tenant"
    ).key(_HASH)


def test_parts_cannot_be_shifted_into_each_other() -> None:
    end = _LAYOUT.fingerprint()
    first = ObjectKeys("a", _LAYOUT, "b")
    assert first.namespace != ObjectKeys(f"a{end}", _LAYOUT, "").namespace
    assert first.namespace != ObjectKeys("", _LAYOUT, "ab").namespace


def test_hashes_laid_end_to_end_give_a_key_each() -> None:
    keys = ObjectKeys("model", _LAYOUT)
    other = bytes(16)
    assert keys.keys(_HASH + other) == [keys.key(_HASH), keys.key(other)]
    assert keys.keys(b"") == []


def test_a_hash_of_another_length_is_refused() -> None:
    keys = ObjectKeys("model", _LAYOUT)
    with pytest.raises(TierConfigError, match="page_hash = '15 bytes': allowed: 16 bytes"):
        keys.key(bytes(15))
    with pytest.raises(TierConfigError, match="page_hashes = '17 bytes'"):
        keys.keys(bytes(17))


def test_ranks_separate_the_same_tokens_and_must_be_one_of_many() -> None:
    namespaces = {
        ObjectKeys("model", _LAYOUT, rank=rank, num_ranks=ranks).namespace
        for rank, ranks in ((0, 1), (0, 2), (1, 2), (1, 12), (11, 12))
    }
    assert len(namespaces) == 5
    with pytest.raises(TierConfigError, match="rank = 2: allowed: 0 to 1"):
        ObjectKeys("model", _LAYOUT, rank=2, num_ranks=2)
