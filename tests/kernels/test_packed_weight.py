# SPDX-License-Identifier: Apache-2.0
"""Block-quantised weights: what is refused, and what row operations keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import ops
from kernels.cases import random_blocks
from kernels.errors import KernelInputError


def weight(num_rows: int, num_cols: int = 64, seed: int = 0) -> ops.PackedWeight:
    return random_blocks(num_rows, num_cols, "q4_1", torch.Generator().manual_seed(seed))


def test_rows_gathers_the_rows_of_the_dequantised_matrix() -> None:
    packed = weight(6)
    order = torch.tensor([4, 0, 0, 5])
    assert torch.equal(packed.rows(order).dequantise(), packed.dequantise()[order])


def test_concat_rows_stacks_matrices_of_one_format() -> None:
    first, second = weight(3, seed=1), weight(5, seed=2)
    stacked = ops.concat_rows([first, second])
    assert isinstance(stacked, ops.PackedWeight)
    assert torch.equal(stacked.dequantise(), torch.cat((first.dequantise(), second.dequantise())))


def test_concat_rows_refuses_mixed_formats_and_widths() -> None:
    with pytest.raises(KernelInputError, match=r"q4_1.*fp32"):
        ops.concat_rows([weight(2), torch.zeros(2, 64)])
    with pytest.raises(KernelInputError, match="one number of columns"):
        ops.concat_rows([weight(2), weight(2, num_cols=96)])


@pytest.mark.parametrize(
    ("num_bytes", "block_format", "num_cols", "field"),
    [
        (40, "q5_0", 64, "block_format"),
        (40, "q4_1", 48, "num_cols"),
        (40, "q4_1", 0, "num_cols"),
        (41, "q4_1", 64, "blocks"),
        (0, "q8_0", 64, "blocks"),
    ],
)
def test_pack_linear_names_the_argument_it_refuses(
    num_bytes: int, block_format: str, num_cols: int, field: str
) -> None:
    with pytest.raises(KernelInputError) as caught:
        ops.pack_linear(np.zeros(num_bytes, dtype=np.uint8), block_format, num_cols)
    assert caught.value.field == field
    assert caught.value.code == "kernel_input"


def test_a_read_only_array_is_taken_without_a_warning() -> None:
    blocks = np.zeros(40, dtype=np.uint8)
    blocks.flags.writeable = False
    assert ops.pack_linear(blocks, "q4_1", 64).shape == (1, 64)
