# SPDX-License-Identifier: Apache-2.0
"""Random calls of the linear ops of a decoder layer, for `python -m kernels verify` and `bench`.

Does not know: implementations. Weights are dense, 4-bit or fp8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kernels.cases import Case
from kernels.fp8_weight import Fp8Weight
from kernels.ops.linear import LinearWeight, linear, linear_add, norm_linear, swiglu_linear
from kernels.reference.quant import quantize_w4
from kernels.w4_layout import tile_w4_linear, tile_w4_swiglu

KINDS = ("dense", "nvfp4", "mxfp4", "mxint4", "fp8_block")
_ROWS, _COLS = 128, 192


def _weight(
    kind: str, generator: torch.Generator, is_gate_up: bool, dtype: torch.dtype
) -> LinearWeight:
    values: torch.Tensor = torch.randn(_ROWS, _COLS, generator=generator) * _COLS**-0.5
    if kind == "dense":
        return values.to(dtype)
    if kind == "fp8_block":
        scales = torch.rand(1, 2, generator=generator) + 0.5
        return Fp8Weight(values=values.to(torch.float8_e4m3fn), scales=scales)
    first, second = (quantize_w4(half, kind) for half in values.chunk(2))
    return tile_w4_swiglu(first, second) if is_gate_up else tile_w4_linear([first, second])


def layer_run(
    family: str,
    kind: str,
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    place: Callable[[Any], Any] = lambda value: value,
) -> torch.Tensor:
    """One call; `place` puts a tensor or a weight where the call is made."""
    generator = torch.Generator().manual_seed(num_tokens)
    weight = place(_weight(kind, generator, family == "swiglu_linear", dtype))
    x = place(torch.randn(num_tokens, _COLS, generator=generator).to(dtype))
    gain = place(torch.rand(_COLS, generator=generator) + 0.5)
    residual = place(torch.randn(num_tokens, _ROWS, generator=generator).to(dtype))
    if family == "linear":
        return linear(x, weight)
    if family == "norm_linear":
        return norm_linear(x, gain, 1e-6, weight)
    if family == "linear_add":
        return linear_add(x, weight, residual)
    return swiglu_linear(x, gain, 1e-6, weight)


def layer_cases() -> dict[str, list[Case]]:
    """One token, a few, and more than the kernels of few tokens take."""
    return {
        family: [
            Case(f"{kind} {num}", "fp32", functools.partial(layer_run, family, kind, num))
            for kind in KINDS
            for num in (1, 5, 33)
        ]
        for family in ("norm_linear", "linear_add", "swiglu_linear")
    }
