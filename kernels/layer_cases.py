# SPDX-License-Identifier: Apache-2.0
"""Random calls of the fused ops of a decoder layer, for `python -m kernels verify` and `bench`.

Does not know: implementations. Weights are dense, 4-bit or fp8.
"""

from __future__ import annotations

import functools

import torch

from kernels.cases import Case
from kernels.fp8_weight import Fp8Weight
from kernels.ops.linear import LinearWeight, linear_add, norm_linear, swiglu_linear
from kernels.reference.quant import quantize_w4
from kernels.w4_layout import tile_w4_linear, tile_w4_swiglu

_KINDS = ("dense", "nvfp4", "mxfp4", "mxint4", "fp8_block")
_ROWS, _COLS = 128, 192


def _weight(kind: str, generator: torch.Generator, is_gate_up: bool) -> LinearWeight:
    values: torch.Tensor = torch.randn(_ROWS, _COLS, generator=generator) * _COLS**-0.5
    if kind == "dense":
        return values
    if kind == "fp8_block":
        scales = torch.rand(1, 2, generator=generator) + 0.5
        return Fp8Weight(values=values.to(torch.float8_e4m3fn), scales=scales)
    first, second = (quantize_w4(half, kind) for half in values.chunk(2))
    return tile_w4_swiglu(first, second) if is_gate_up else tile_w4_linear([first, second])


def _run(family: str, kind: str, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    weight = _weight(kind, generator, family == "swiglu_linear")
    x = torch.randn(num_tokens, _COLS, generator=generator)
    gain = torch.rand(_COLS, generator=generator) + 0.5
    if family == "norm_linear":
        return norm_linear(x, gain, 1e-6, weight)
    if family == "linear_add":
        return linear_add(x, weight, torch.randn(num_tokens, _ROWS, generator=generator))
    return swiglu_linear(x, gain, 1e-6, weight)


def layer_cases() -> dict[str, list[Case]]:
    """One token, a few, and more than the kernels of few tokens take."""
    return {
        family: [
            Case(f"{kind} {num}", "fp32", functools.partial(_run, family, kind, num))
            for kind in _KINDS
            for num in (1, 5, 33)
        ]
        for family in ("norm_linear", "linear_add", "swiglu_linear")
    }
