# SPDX-License-Identifier: Apache-2.0
"""Weights repacked for the compiled extension. Does not know: models, files."""

from __future__ import annotations

import torch

import _cpu_kernels as ext
from kernels.packed_weight import PackedWeight, Weight

PACKABLE_FORMATS = {"bf16", "q4_1", "q8_0"}


def pack(weight: Weight, chain: ext.ArenaChain) -> ext.PackedMatrix:
    """Return the weight in the extension's panels, in memory of the chain."""
    num_rows, num_cols = weight.shape
    if isinstance(weight, PackedWeight):
        raw = weight.blocks.contiguous().view(-1)
        return ext.pack(weight.format, raw.numpy(), num_rows, num_cols, chain)
    raw = weight.contiguous().view(torch.uint8).view(-1)
    return ext.pack("bf16", raw.numpy(), num_rows, num_cols, chain)


def packed_once(weight: PackedWeight) -> ext.PackedMatrix:
    """Return the weight's own panels, packed at the first call and kept with it."""
    if "cpu" not in weight.derived:
        weight.derived["cpu"] = pack(weight, ext.ArenaChain())
    found: ext.PackedMatrix = weight.derived["cpu"]
    return found
