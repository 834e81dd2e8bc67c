# SPDX-License-Identifier: Apache-2.0
"""Descriptors with which Hopper's TMA unit reads a matrix box by box. Does not know: kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernels._triton import TensorDescriptor, gl


@functools.cache
def shared_layout(bits: int) -> Any:
    """How a box of a matrix lies in shared memory; making one costs 10 us."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


def boxes(
    base: torch.Tensor, num_rows: int, width: int, box_rows: int, box_columns: int, bits: int = 16
) -> Any:
    """A matrix [num_rows, width] without gaps, from where `base` begins."""
    layout = shared_layout(bits)
    return TensorDescriptor(base, [num_rows, width], [width, 1], [box_rows, box_columns], layout)


def boxes_of(matrix: torch.Tensor, box_rows: int, box_columns: int) -> Any:
    """A bf16 matrix whose rows may be parts of wider ones."""
    shape, strides = list(matrix.shape), list(matrix.stride())
    return TensorDescriptor(matrix, shape, strides, [box_rows, box_columns], shared_layout(16))
