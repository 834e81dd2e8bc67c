# SPDX-License-Identifier: Apache-2.0
"""A linear layer's weight in fp8 with one scale per 128 x 128 block. Does not know: files, kernels.

Source: the weight layout of DeepSeek-V3 (arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.errors import KernelInputError

BLOCK = 128
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """`values` e4m3 [N, K]; `scales` fp32 [ceil(N / 128), ceil(K / 128)]: weight = value * scale.

    Raises:
        KernelInputError: if the shapes do not fit together.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        blocks = tuple(-(-size // BLOCK) for size in self.values.shape)
        if tuple(self.scales.shape) != blocks:
            raise KernelInputError("scales.shape", list(self.scales.shape), f"{list(blocks)}")

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return (self.values.shape[0], self.values.shape[1])

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [N, K] in `dtype`."""
        num_rows, num_cols = self.shape
        wide = self.scales.repeat_interleave(BLOCK, 1)[:, :num_cols]
        wide = wide.repeat_interleave(BLOCK, 0)[:num_rows]
        return (self.values.float() * wide).to(dtype)

    def rows(self, order: torch.Tensor) -> Fp8Weight | None:
        """Return the weight with its rows gathered; None where a row would leave its block."""
        places = torch.arange(order.numel(), device=order.device)
        if bool((order // BLOCK != places // BLOCK).any()):
            return None
        bytes_ = self.values.view(torch.uint8)[order]
        return Fp8Weight(values=bytes_.view(self.values.dtype), scales=self.scales)


def concat_fp8(parts: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """Return the weights' rows one below the other; None where a block would hold two of them."""
    if any(part.shape[0] % BLOCK for part in parts[:-1]):
        return None
    values = torch.cat([part.values.view(torch.uint8) for part in parts])
    return Fp8Weight(
        values=values.view(parts[0].values.dtype),
        scales=torch.cat([part.scales for part in parts]),
    )


def quantize_fp8(weight: torch.Tensor) -> Fp8Weight:
    """Return a weight [N, K] in fp8, each block scaled by its largest magnitude."""
    num_rows, num_cols = weight.shape
    pads = (0, -num_cols % BLOCK, 0, -num_rows % BLOCK)
    blocks = torch.nn.functional.pad(weight.float(), pads)
    blocks = blocks.view(-(-num_rows // BLOCK), BLOCK, -(-num_cols // BLOCK), BLOCK)
    top = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(top > 0, top / E4M3_MAX, 1.0)
    coded = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    rows = coded.view(torch.uint8).reshape(blocks.shape[0] * BLOCK, -1)
    values = rows[:num_rows, :num_cols].contiguous().view(torch.float8_e4m3fn)
    return Fp8Weight(values=values, scales=scales)
