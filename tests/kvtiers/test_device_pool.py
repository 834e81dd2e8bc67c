# SPDX-License-Identifier: Apache-2.0
"""How many pages fit, and that a page's bytes are the pool's."""

from __future__ import annotations

import pytest
import torch

from kvtiers.config import DevicePoolConfig
from kvtiers.device_pool import DevicePool, count_pages
from kvtiers.errors import PoolTooSmallError, TierConfigError
from kvtiers.layout import PageLayout

_LAYOUT = PageLayout(num_layers=2, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
_PAGE_BYTES = 2 * 2 * 4 * 8 * 4


@pytest.mark.parametrize(
    ("config", "free_bytes", "expected"),
    [
        (DevicePoolConfig(pool_tokens=40), 0, 10),
        (DevicePoolConfig(pool_tokens=43), 0, 10),  # whole pages only
        (DevicePoolConfig(), 20 * _PAGE_BYTES, 10),
        (DevicePoolConfig(free_share=1.0), 20 * _PAGE_BYTES + 1, 20),
        (DevicePoolConfig(max_auto_bytes=7 * _PAGE_BYTES), 1 << 40, 7),
    ],
)
def test_pages_follow_configuration_then_memory(
    config: DevicePoolConfig, free_bytes: int, expected: int
) -> None:
    found = count_pages(config, _LAYOUT, free_bytes=free_bytes, max_context_len=8)
    assert found == expected


def test_a_pool_holds_at_least_one_whole_request() -> None:
    config = DevicePoolConfig(pool_tokens=40)
    assert count_pages(config, _LAYOUT, free_bytes=0, max_context_len=40) == 10
    with pytest.raises(PoolTooSmallError, match="one request of 41 tokens needs 11"):
        count_pages(config, _LAYOUT, free_bytes=0, max_context_len=41)
    with pytest.raises(PoolTooSmallError, match="0 MiB of free memory gives 0 KV pages"):
        count_pages(DevicePoolConfig(), _LAYOUT, free_bytes=100, max_context_len=4)


def test_what_large_steps_need_is_kept_from_the_pool_and_said_where_it_lacks() -> None:
    config, free_bytes = DevicePoolConfig(free_share=0.5), 5 << 20
    for kept_bytes, expected in ((0, 5 << 19), (3 << 20, 1 << 20), (free_bytes, 0)):
        sizes = dict(free_bytes=free_bytes, kept_bytes=kept_bytes)
        assert count_pages(config, _LAYOUT, max_context_len=0, **sizes) == expected // _PAGE_BYTES
    with pytest.raises(PoolTooSmallError, match="5 MiB of free memory less 9 MiB for large steps"):
        count_pages(config, _LAYOUT, free_bytes=free_bytes, kept_bytes=9 << 20, max_context_len=4)


def test_a_new_pool_is_zero_and_contiguous() -> None:
    pool = DevicePool(_LAYOUT, 3, torch.device("cpu"))
    assert tuple(pool.kv.shape) == _LAYOUT.pool_shape(3)
    assert pool.kv.dtype == torch.float32
    assert pool.kv.is_contiguous()
    assert int(pool.kv.count_nonzero()) == 0


def test_the_bytes_of_a_page_are_a_view_of_the_pool() -> None:
    pool = DevicePool(_LAYOUT, 3, torch.device("cpu"))
    pool.kv[1, 1, 1, 3, 0, 7] = 1.0
    raw = pool.page_bytes(1)
    assert raw.shape == (_PAGE_BYTES,)
    assert raw[-4:].tolist() == [0, 0, 0x80, 0x3F]
    raw.zero_()
    assert float(pool.kv[1, 1, 1, 3, 0, 7]) == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("pool_tokens", -1), ("free_share", 0.0), ("free_share", 1.5), ("max_auto_bytes", 0)],
)
def test_a_wrong_setting_is_named(field: str, value: float) -> None:
    with pytest.raises(TierConfigError, match=f"{field} = {value}"):
        DevicePoolConfig(**{field: value})  # type: ignore[arg-type]
