# SPDX-License-Identifier: Apache-2.0
"""Launches and registrations of the linear layers of a few tokens. Does not know: their insides.

Grids and constants follow from shapes alone, so a launch may be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.fp8_weight import Fp8Weight
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.sizes import cdiv, next_power_of_2
from kernels.triton.dense_rows import dense_rows_kernel
from kernels.triton.mla import use_pdl
from kernels.triton.w4_expand import w4_expand_kernel
from kernels.triton.w4_rows import w4_rows_kernel
from kernels.w4_layout import SCALE_CODES, TiledW4

W4 = {"nvfp4", "mxfp4", "mxint4"}
DENSE = {"bf16", "fp8_block"}
WAYS = 4  # warps of a program
MANY_WAYS = 8  # where the activation costs as much as the weights: sums of parts, several tokens
DENSE_TOKENS = 8  # with more, torch's product is the faster one
RowWeight = torch.Tensor | TiledW4 | Fp8Weight


def refuse_rows(call: CallSignature) -> str | None:
    """Why the kernels of few tokens cannot run a linear layer, or None."""
    if not call.trait("small_batch"):
        return "it takes few tokens only"
    if call.format("weight") in DENSE and not call.trait("up_to_8_tokens"):
        return f"it takes up to {DENSE_TOKENS} tokens where weights are not 4-bit"
    if int(call.trait("num_rows")) % 16 or int(call.trait("num_cols")) % 32:
        return "it takes rows in sixteens and columns in thirty-twos"
    return None


def _refuse_plain(call: CallSignature) -> str | None:
    return "rows are interleaved" if call.trait("interleaved") else refuse_rows(call)


def _loads(num_tokens: int) -> int:
    """Tokens of a program."""
    return 1 if num_tokens == 1 else 8 if num_tokens <= 8 else 16


def _pdl(enabled: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if enabled else {}


def _rows(
    x: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
    weight: RowWeight,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    *,
    swiglu: bool = False,
) -> torch.Tensor:
    """x [T, K], or fp32 [parts, T, K]."""
    num_parts = x.shape[0] if x.dim() == 3 else 0
    common = (
        out if residual is None else residual,
        x.shape[-2],
        x.stride(-2),
        x.stride(0) if num_parts else 0,
        0.0 if norm is None else norm[1],
    )
    gain = out if norm is None else norm[0]
    if isinstance(weight, TiledW4):
        _w4_rows(x, gain, weight, out, common, num_parts, swiglu=swiglu)
    else:
        _dense_rows(x, gain, weight, out, common, num_parts)
    return out


def _w4_rows(
    x: torch.Tensor,
    gain: torch.Tensor,
    weight: TiledW4,
    out: torch.Tensor,
    common: tuple[Any, ...],
    num_parts: int,
    *,
    swiglu: bool,
) -> None:
    residual, num_tokens, x_stride, part_stride, eps = common
    loads = _loads(num_tokens)
    blocks = weight.num_cols // 64
    ways = MANY_WAYS if num_parts or loads == 8 else WAYS
    # A second step's words are fetched while the first is multiplied: 16 tokens leave no room.
    most = 4 if loads == 16 and blocks > 32 else 32 // ways
    scale = SCALE_CODES[weight.format]
    pdl = use_pdl(x.device)
    w4_rows_kernel[(weight.num_rows // 16, cdiv(num_tokens, loads))](
        x,
        gain,
        weight.codes.view(torch.uint32),
        weight.scales.view(torch.uint32),
        weight.factors,
        residual,
        None,
        None,
        None,
        None,
        None,
        out,
        None,
        None,
        None,
        num_tokens,
        x_stride,
        part_stride,
        eps,
        K=weight.num_cols,
        N=weight.num_rows,
        TOP_K=1,
        TOKENS=max(8, loads),
        LOADS=loads,
        WAYS=ways,
        KC=min(most, next_power_of_2(cdiv(blocks, ways))),
        PARTS=num_parts,
        NORMS=gain is not out,
        ADDS=residual is not out,
        SWIGLU=swiglu,
        EXPERTS=False,
        UNSORTED=False,
        COMBINES=False,
        HAS_BEHIND=False,
        INT4=weight.format == "mxint4",
        SCALE_MUL=scale.multiply,
        SCALE_ADD=scale.add,
        PORTABLE=x.device.type != "cuda",
        USE_PDL=pdl,
        num_warps=ways,
        num_stages=1,
        **_pdl(pdl),
    )


def _dense_rows(
    x: torch.Tensor,
    gain: torch.Tensor,
    weight: torch.Tensor | Fp8Weight,
    out: torch.Tensor,
    common: tuple[Any, ...],
    num_parts: int,
) -> None:
    residual, num_tokens, x_stride, part_stride, eps = common
    loads = 1 if num_tokens == 1 else 8
    num_rows, num_cols = weight.shape
    is_scaled = isinstance(weight, Fp8Weight)
    # What a thread keeps of weights: 128 registers, half of that where it fetches ahead. Sums of
    # parts want room, so that twice the warps share them.
    most = 1024 if num_cols > 2048 else 2048
    ways = MANY_WAYS if num_parts or is_scaled else WAYS
    pdl = use_pdl(x.device)
    dense_rows_kernel[(num_rows // 16, cdiv(num_tokens, loads))](
        x,
        gain,
        weight.values if isinstance(weight, Fp8Weight) else weight,
        weight.scales if isinstance(weight, Fp8Weight) else None,
        residual,
        out,
        num_tokens,
        x_stride,
        part_stride,
        eps,
        K=num_cols,
        N=num_rows,
        TOKENS=8,
        LOADS=loads,
        WAYS=ways,
        COLS=max(512, min(most, next_power_of_2(num_cols))),
        PARTS=num_parts,
        NORMS=gain is not out,
        ADDS=residual is not out,
        SCALED=is_scaled,
        USE_PDL=pdl,
        num_warps=ways,
        num_stages=1,
        **_pdl(pdl),
    )


@register_kernel(
    "linear",
    "triton_rows",
    priority=Priority.PERFORMANT,
    device="cuda",
    min_sm=(8, 9),
    formats={"x": {"bf16"}, "weight": W4 | DENSE},
    refuses=_refuse_plain,
)
def linear(x: torch.Tensor, weight: RowWeight) -> torch.Tensor:
    """One program per 16 rows."""
    return _rows(x, None, weight, None, x.new_empty(x.shape[0], weight.shape[0]))


@register_kernel(
    "norm_linear",
    "triton_rows",
    priority=Priority.PERFORMANT,
    device="cuda",
    min_sm=(8, 9),
    formats={"x": {"bf16"}, "weight": W4 | DENSE},
    refuses=_refuse_plain,
)
def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: RowWeight,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The norm is multiplied in; the sums are scaled by 1 / rms at the end."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
    return _rows(x, (norm_weight, eps), weight, None, out)


@register_kernel(
    "linear_add",
    "triton_rows",
    priority=Priority.PERFORMANT,
    device="cuda",
    min_sm=(8, 9),
    formats={"x": {"bf16"}, "weight": W4 | DENSE},
    refuses=_refuse_plain,
)
def linear_add(x: torch.Tensor, weight: RowWeight, residual: torch.Tensor) -> torch.Tensor:
    """The residual is added before rounding."""
    return _rows(x, None, weight, residual, torch.empty_like(residual))


def linear_of_parts(parts: torch.Tensor, weight: RowWeight, residual: torch.Tensor) -> torch.Tensor:
    """residual + linear(sum of parts fp32 [P, T, K], rounded to residual's dtype)."""
    return _rows(parts, None, weight, residual, torch.empty_like(residual))


@register_kernel(
    "swiglu_linear",
    "triton_rows",
    priority=Priority.PERFORMANT,
    device="cuda",
    min_sm=(8, 9),
    formats={"x": {"bf16"}, "weight": W4},
    refuses=refuse_rows,
)
def swiglu_linear(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, gate_up: TiledW4
) -> torch.Tensor:
    """Gate and up rows of one output lie in one program."""
    out = x.new_empty(x.shape[0], gate_up.num_rows // 2)
    norm = None if norm_weight is None else (norm_weight, eps)
    return _rows(x, norm, gate_up, None, out, swiglu=True)


def expand_w4(weight: TiledW4, dtype: torch.dtype) -> torch.Tensor:
    """A linear layer's weight as a dense [N, K]; gate rows, then up rows if interleaved."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.codes.device)
    blocks = weight.num_cols // 64
    kc = min(4, next_power_of_2(cdiv(blocks, WAYS)))
    scale = SCALE_CODES[weight.format]
    w4_expand_kernel[(weight.num_rows // 16, cdiv(blocks, kc * WAYS))](
        weight.codes.view(torch.uint32),
        weight.scales.view(torch.uint32),
        weight.factors,
        out,
        K=weight.num_cols,
        N=weight.num_rows,
        KC=kc,
        INTERLEAVED=weight.is_interleaved,
        INT4=weight.format == "mxint4",
        SCALE_MUL=scale.multiply,
        SCALE_ADD=scale.add,
        PORTABLE=weight.codes.device.type != "cuda",
        num_warps=WAYS,
    )
    return out


@register_kernel(
    "linear",
    "triton_expand",
    priority=Priority.PORTABLE,
    device="cuda",
    min_sm=(8, 9),
    formats={"x": {"bf16"}, "weight": W4},
)
def linear_of_many_tokens(x: torch.Tensor, weight: TiledW4) -> torch.Tensor:
    """The weight is expanded for this call, then torch multiplies: with many tokens the product
    costs far more than the expansion."""
    return torch.nn.functional.linear(x, expand_w4(weight, x.dtype))


@register_kernel(
    "linear",
    "torch_fp8",
    priority=Priority.PORTABLE,
    formats={"weight": {"fp8_block"}},
)
def linear_of_fp8(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """As linear_of_many_tokens."""
    return torch.nn.functional.linear(x, weight.dequantise(x.dtype))
