# SPDX-License-Identifier: Apache-2.0
"""The plain-torch references against independently derived values."""

from __future__ import annotations

import numpy as np
import torch

from kernels import ops
from kernels.packed_weight import dequantise_rows
from kernels.selection import override


def test_rms_norm_divides_each_row_by_its_root_mean_square() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    weight = torch.tensor([1.0, 10.0])
    with override("rms_norm", "reference"):
        out = ops.rms_norm(x, weight, 0.0)
    rms = [12.5**0.5, 2.0**0.5]
    expected = torch.tensor([[3.0 / rms[0], 40.0 / rms[0]], [0.0, 20.0 / rms[1]]])
    torch.testing.assert_close(out, expected)


def test_rope_turns_the_pair_of_halves_by_the_angle_of_the_position() -> None:
    angle = 0.3
    cos_sin = torch.tensor([[1.0, 0.0], [np.cos(angle), np.sin(angle)]], dtype=torch.float32)
    q = torch.tensor([[[1.0, 0.0]]])
    k = torch.tensor([[[0.0, 1.0]]])
    v = torch.tensor([[[5.0, 6.0]]])
    pool = torch.zeros(2, 2, 4, 1, 2)
    slots = torch.tensor([6], dtype=torch.int32)
    ops.rope_kv_write(q, k, v, torch.tensor([1], dtype=torch.int32), cos_sin, pool, slots)
    torch.testing.assert_close(q[0, 0], torch.tensor([np.cos(angle), np.sin(angle)]).float())
    torch.testing.assert_close(
        pool[1, 0, 2, 0], torch.tensor([-np.sin(angle), np.cos(angle)]).float()
    )
    torch.testing.assert_close(pool[1, 1, 2, 0], torch.tensor([5.0, 6.0]))
    assert pool.count_nonzero() == 4


def test_q4_1_and_q8_0_blocks_decode_as_the_gguf_package_decodes_them() -> None:
    from gguf import GGMLQuantizationType, dequantize

    rng = np.random.default_rng(0)
    for name, kind, size in (
        ("q4_1", GGMLQuantizationType.Q4_1, 20),
        ("q8_0", GGMLQuantizationType.Q8_0, 34),
    ):
        blocks = rng.integers(0, 256, (6, 3, size), dtype=np.uint8)
        scales = rng.normal(size=(6, 3, 2)).astype(np.float16)
        blocks[..., :4] = scales.view(np.uint8).reshape(6, 3, 4)
        if name == "q8_0":
            blocks[..., 2:] = rng.integers(0, 256, (6, 3, 32), dtype=np.uint8)
        raw = blocks.reshape(6, -1)
        expected = dequantize(raw, kind)
        ours = dequantise_rows(torch.from_numpy(raw), name, 96)
        np.testing.assert_array_equal(ours.numpy(), expected)
