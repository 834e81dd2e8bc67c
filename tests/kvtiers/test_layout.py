# SPDX-License-Identifier: Apache-2.0
"""Sizes and offsets of a page against the tensor they describe."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtiers.errors import TierConfigError
from kvtiers.layout import PageLayout

_SMOLLM2 = PageLayout(num_layers=30, page_size=64, num_kv_heads=3, head_dim=64, dtype="bfloat16")


def test_the_default_model_needs_the_documented_bytes_a_token() -> None:
    assert _SMOLLM2.token_bytes == 23_040
    assert _SMOLLM2.page_bytes == 64 * 23_040
    assert _SMOLLM2.layer_bytes == 64 * 23_040 // 30
    assert replace(_SMOLLM2, dtype="float32").page_bytes == 2 * _SMOLLM2.page_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plane_offsets_are_those_of_the_pool_tensor(dtype: torch.dtype) -> None:
    layout = PageLayout(
        num_layers=3, page_size=4, num_kv_heads=2, head_dim=8, dtype=str(dtype).split(".")[1]
    )
    pool = torch.zeros(layout.pool_shape(5), dtype=dtype)
    assert pool.nbytes == 5 * layout.page_bytes
    for layer in range(3):
        for is_value in (False, True):
            plane = pool[2, layer, int(is_value)]
            start = (plane.storage_offset() - pool[2].storage_offset()) * pool.element_size()
            assert layout.plane_offset(layer, is_value) == start
            assert layout.plane_bytes == plane.nbytes


def test_the_fingerprint_differs_with_every_field_and_is_stable() -> None:
    others = [
        replace(_SMOLLM2, num_layers=31),
        replace(_SMOLLM2, page_size=32),
        replace(_SMOLLM2, num_kv_heads=4),
        replace(_SMOLLM2, head_dim=128),
        replace(_SMOLLM2, dtype="float32"),
    ]
    prints = [layout.fingerprint() for layout in [_SMOLLM2, *others]]
    assert len(set(prints)) == len(prints)
    assert all(len(text) == 32 and int(text, 16) >= 0 for text in prints)
    assert replace(_SMOLLM2).fingerprint() == prints[0]
    # Stored pages are found by it: it may change only with LAYOUT_VERSION.
    assert prints[0] == "93fcb5622f0695fe483c139952f3e12a"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "int8"}, r"layout\.dtype = 'int8': allowed: float32 \| bfloat16"),
        ({"page_size": 0}, r"layout\.page_size = 0"),
        ({"num_layers": -1}, r"layout\.num_layers = -1"),
    ],
)
def test_a_size_that_cannot_be_is_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(TierConfigError, match=said):
        replace(_SMOLLM2, **changes)  # type: ignore[arg-type]
