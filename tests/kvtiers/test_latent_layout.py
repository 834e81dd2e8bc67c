# SPDX-License-Identifier: Apache-2.0
"""The bytes of a page of latents, and where kernels find its planes."""

from __future__ import annotations

import pytest
import torch

from kernels.latent_planes import decode_rows, encode_latents, latent_planes
from kvtiers.device_pool import DevicePool
from kvtiers.errors import TierConfigError
from kvtiers.layout import LatentLayout


def _layout(dtype: str, latent_dim: int = 512) -> LatentLayout:
    return LatentLayout(
        num_layers=27, page_size=64, latent_dim=latent_dim, rope_dim=64, dtype=dtype
    )


def test_a_token_takes_656_bytes_a_layer_in_fp8_and_1152_in_bf16() -> None:
    assert _layout("fp8").token_bytes == 27 * 656
    assert _layout("bfloat16").token_bytes == 27 * 1152
    assert _layout("fp8").fingerprint() != _layout("bfloat16").fingerprint()


def test_latents_in_groups_of_another_length_are_refused_in_fp8() -> None:
    with pytest.raises(TierConfigError, match="multiple of 128"):
        _layout("fp8", latent_dim=96)
    assert _layout("bfloat16", latent_dim=96).row_bytes == 320


def test_planes_of_a_layer_lie_within_its_own_bytes() -> None:
    layout = _layout("fp8")
    pool = DevicePool(layout, 2, torch.device("cpu"))
    assert tuple(pool.kv.shape) == (2, 27, layout.layer_bytes)
    planes = latent_planes(pool.kv[:, 26], 512, 64)
    planes.values.view(torch.uint8).fill_(0x38)  # 1.0
    planes.scales.fill_(2.0)
    planes.rope.fill_(3.0)
    rows = decode_rows(planes, torch.tensor([1]), torch.float32)
    assert torch.equal(rows[0, :, :512], torch.full((64, 512), 2.0))
    assert torch.equal(rows[0, :, 512:], torch.full((64, 64), 3.0))
    assert int(pool.kv[:, :26].count_nonzero()) == 0


def test_a_scale_is_the_least_power_of_two_under_which_its_group_fits() -> None:
    latents = torch.zeros(4, 256)
    latents[0, 0] = 448.0
    latents[1, 0] = 448.5
    latents[2, 255] = -3.0
    values, scales = encode_latents(latents)
    assert scales[0].tolist() == [1.0, 1.0]
    assert scales[1].tolist() == [2.0, 1.0]
    assert scales[2].tolist() == [1.0, 2.0**-7]  # 3 / 448 = 0.0067
    assert float(values[2, 255].float() * scales[2, 1]) == -3.0
    latents[3, 7] = float("nan")
    _, scales = encode_latents(latents)
    assert bool(scales[3, 0].isnan()) and float(scales[3, 1]) == 1.0
