# SPDX-License-Identifier: Apache-2.0
"""Weights of a linear layer in GGUF blocks, as the CPU kernels take them.

Does not know: files, models, names of tensors. Source: the GGUF block layouts, one block per 32
values of a row: Q4_1 = fp16 d, fp16 m, 16 nibble bytes (value = q * d + m; byte i holds element i
in its low and element i + 16 in its high nibble); Q8_0 = fp16 d, 32 int8 (value = q * d).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kernels.errors import KernelInputError
from kernels.signature import format_of

BLOCK_LEN = 32
BLOCK_BYTES = {"q4_1": 20, "q8_0": 34}


@dataclass(slots=True, kw_only=True, eq=False)
class PackedWeight:
    """Rows of quantised blocks, [num_rows, num_cols] when dequantised. Opaque to callers.

    `blocks` is the file's own layout; `derived` holds what kernels repack from it, once each.
    """

    format: str
    num_rows: int
    num_cols: int
    blocks: torch.Tensor  # uint8 [num_rows, num_cols / 32 * block bytes]
    derived: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K], as torch.nn.functional.linear names them."""
        return (self.num_rows, self.num_cols)

    def rows(self, order: torch.Tensor) -> PackedWeight:
        """Return the weight with its rows gathered in `order` (int64 [num_rows_out])."""
        return PackedWeight(
            format=self.format,
            num_rows=int(order.numel()),
            num_cols=self.num_cols,
            blocks=self.blocks[order].contiguous(),
        )

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values [num_rows, num_cols]; exact in fp32 (one multiply, one add)."""
        return dequantise_rows(self.blocks, self.format, self.num_cols).to(dtype)


Weight = torch.Tensor | PackedWeight


def dequantise_rows(blocks: torch.Tensor, block_format: str, num_cols: int) -> torch.Tensor:
    """Return fp32 [num_rows, num_cols] of raw blocks uint8 [num_rows, row_bytes]."""
    num_rows = blocks.shape[0]
    size = BLOCK_BYTES[block_format]
    cut = blocks.reshape(num_rows, num_cols // BLOCK_LEN, size)
    scale = cut[..., 0:2].contiguous().view(torch.float16).float()
    if block_format == "q8_0":
        values = cut[..., 2:].contiguous().view(torch.int8).float() * scale
    else:
        offset = cut[..., 2:4].contiguous().view(torch.float16).float()
        nibbles = cut[..., 4:]
        quants = torch.cat((nibbles & 0x0F, nibbles >> 4), dim=-1).float()
        values = quants * scale + offset
    return values.reshape(num_rows, num_cols)


def pack_linear(
    blocks: np.ndarray[Any, Any] | torch.Tensor, block_format: str, num_cols: int
) -> PackedWeight:
    """Take raw GGUF rows as one linear weight.

    Args:
        blocks: uint8, any shape that holds whole rows: num_rows * (num_cols / 32) blocks.
        block_format: "q4_1" (20 bytes a block) or "q8_0" (34 bytes).
        num_cols: K, a multiple of 32.

    Raises:
        KernelInputError: unknown format, K not a multiple of 32, bytes not a whole number of rows.
    """
    if block_format not in BLOCK_BYTES:
        raise KernelInputError("block_format", repr(block_format), " or ".join(BLOCK_BYTES))
    if num_cols <= 0 or num_cols % BLOCK_LEN:
        raise KernelInputError("num_cols", num_cols, f"a positive multiple of {BLOCK_LEN}")
    if isinstance(blocks, np.ndarray):
        # A memory-mapped file is read-only, which torch.from_numpy warns of: copy once here.
        blocks = torch.from_numpy(np.array(blocks, dtype=np.uint8, order="C", copy=True))
    if blocks.dtype != torch.uint8:
        raise KernelInputError("blocks", blocks.dtype, "uint8")
    row_bytes = num_cols // BLOCK_LEN * BLOCK_BYTES[block_format]
    if blocks.numel() == 0 or blocks.numel() % row_bytes:
        raise KernelInputError("blocks", f"{blocks.numel()} bytes", f"rows of {row_bytes} bytes")
    rows = blocks.reshape(-1, row_bytes).contiguous()
    return PackedWeight(format=block_format, num_rows=rows.shape[0], num_cols=num_cols, blocks=rows)


def concat_rows(weights: list[Weight]) -> Weight:
    """Return one weight whose rows are those of `weights` in order (fused qkv, fused gate / up).

    Raises:
        KernelInputError: if formats or K differ.
    """
    first = weights[0]
    if any(weight_format(weight) != weight_format(first) for weight in weights):
        formats = [weight_format(weight) for weight in weights]
        raise KernelInputError("weights", formats, "one format")
    if any(weight.shape[1] != first.shape[1] for weight in weights):
        shapes = [tuple(weight.shape) for weight in weights]
        raise KernelInputError("weights", shapes, "one number of columns")
    if isinstance(first, torch.Tensor):
        return torch.cat([w for w in weights if isinstance(w, torch.Tensor)])
    packed = [w for w in weights if isinstance(w, PackedWeight)]
    blocks = torch.cat([weight.blocks for weight in packed])
    return pack_linear(blocks, first.format, first.num_cols)


def weight_format(weight: Weight) -> str:
    """Return the selector's format name: a dtype's or the block layout's."""
    return format_of(weight.dtype) if isinstance(weight, torch.Tensor) else weight.format


def dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight as a dense tensor of `dtype` [N, K]; a packed one's copy is kept."""
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    key = f"dense_{format_of(dtype)}"
    if key not in weight.derived:
        weight.derived[key] = weight.dequantise(dtype)
    found: torch.Tensor = weight.derived[key]
    return found


def embed(weight: Weight, input_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows of an embedding table, [T, H] in `dtype`, without a dense copy of it."""
    if isinstance(weight, torch.Tensor):
        return weight[input_ids.long()].to(dtype)
    rows = weight.blocks[input_ids.long()]
    return dequantise_rows(rows, weight.format, weight.num_cols).to(dtype)
