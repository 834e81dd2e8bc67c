# SPDX-License-Identifier: Apache-2.0
"""4-bit weights in the order in which GPU threads consume them. Does not know: kernels, files.

A matrix [N, K] (both multiples of 64) is cut into tiles of 64 rows x 64 columns. A tile holds 4
warps x 32 lanes x 4 words; lane = 4 * g + c of warp w holds, in word i, the eight codes which the
tensor core's A operand wants from that lane for rows w * 16 + {g, g + 8} and columns i * 16 + 4c
+ {0, 1, 2, 3} (the compiler orders the columns of both operands alike, four to a lane). Within a
word the two columns of a pair share bit positions in the two 16-bit halves. fp4: the four pairs
(g, 4c), (g + 8, 4c), (g, 4c + 2), (g + 8, 4c + 2) lie at bits (sign, e1, e0, m) = (15, 8, 7, 6),
(12, 5, 4, 3), (9, 2, 1, 0) and (14, 11, 10, 13), so that three of them need one shift and one
mask to become bf16. int4: at nibbles 0..3, offset by 8.

Scales become one byte per 16 columns. A word holds those of rows g (low half) and g + 8 (high
half) for two neighbouring groups of columns, the even one in the low bytes; a kernel forms the
bf16 factors as `byte << shift` plus a constant, both rows at once. fp8 scales are re-encoded as
e5m3 without subnormals, e8m0 scales as exponents relative to the largest of the matrix. What that
and the code's own exponent leave over goes into one fp32 factor per matrix. Every code times its
scale is exact in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.errors import KernelInputError
from kernels.reference.quant import GROUP_OF_FORMAT, W4Weight, unpack_codes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCode:
    """Two bf16 factors in a word: bytes 0 and 2 times `multiply` plus `add`."""

    multiply: int
    add: int


SCALE_CODES = {
    "nvfp4": ScaleCode(multiply=16, add=0x6F006F00),
    "mxfp4": ScaleCode(multiply=128, add=0),
    "mxint4": ScaleCode(multiply=128, add=0),
}
_FP4_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledW4:
    """Experts' matrices [E, N, K] for the W4 kernels.

    `codes` int32 [E, N / 64, K / 64, 4, 32, 4]; `scales` int32 [E, N / 64, K / 64, 4, 8, 2];
    `factors` fp32 [E, 2]: of the gate and up rows of an interleaved matrix, else twice the same.
    The matrix of a linear layer is an E of 1 whose `factors` are [1, N / 16, 2]: 16 rows each, the
    first eight and the others.
    """

    format: str
    num_experts: int
    num_rows: int
    num_cols: int
    codes: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor
    is_interleaved: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of one matrix."""
        return (self.num_rows, self.num_cols)


def _words_of_codes(codes: torch.Tensor, fmt: str) -> torch.Tensor:
    """codes uint8 [E, N, K] -> int32 words [E, N / 64, K / 64, 4, 32, 4]."""
    e, n, k = codes.shape
    # e, n64, warp, row8, g, k64, k16, c, k2, pair
    c = codes.view(e, n // 64, 4, 2, 8, k // 64, 4, 4, 2, 2).to(torch.int32)
    if fmt == "mxint4":
        c = c ^ 8
    words = torch.zeros(e, n // 64, 4, 8, k // 64, 4, 4, dtype=torch.int32, device=codes.device)
    for index in range(4):
        row8, k2 = index % 2, index // 2
        for half in range(2):
            part = c[:, :, :, row8, :, :, :, :, k2, half]
            if fmt == "mxint4":
                words |= part << (16 * half + 4 * index)
                continue
            for source, target in zip((3, 2, 1, 0), _FP4_BITS[index], strict=True):
                words |= ((part >> source) & 1) << (16 * half + target)
    # e, n64, warp, g, k64, k16, c -> e, n64, k64, warp, g, c, k16
    return words.permute(0, 1, 4, 2, 3, 6, 5).reshape(e, n // 64, k // 64, 4, 32, 4).contiguous()


def _e5m3_of_e4m3(scales: torch.Tensor) -> torch.Tensor:
    """Non-negative e4m3 numbers as e5m3 bytes, exponent bias 23, no subnormals; zero stays 0."""
    value = scales.float()
    mantissa, exponent = torch.frexp(torch.where(value > 0, value, 1.0))
    code = ((exponent - 1 + 23) << 3) | ((mantissa * 16).int() - 8)
    return torch.where(value > 0, code, 0)


def _scale_bytes(weight: W4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bytes int32 [E, N, K / 16], fp32 factors [E])."""
    if weight.format == "nvfp4":
        return _e5m3_of_e4m3(weight.scales), weight.global_scale.float() * 2.0**8
    exponents = weight.scales.int()
    top = exponents.amax(dim=(-2, -1))
    one = 253 if weight.format == "mxfp4" else 127
    code = (exponents - top[..., None, None] + one).clamp(min=1)
    factors = torch.ldexp(weight.global_scale.float(), top - 127)
    return code.repeat_interleave(2, dim=-1), factors


def _zero_where_scale_is_zero(codes: torch.Tensor, weight: W4Weight) -> torch.Tensor:
    if weight.format != "nvfp4":
        return codes
    dead = (weight.scales.float() == 0).repeat_interleave(16, dim=-1)
    return torch.where(dead, torch.zeros_like(codes), codes)


def interleave_rows(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[E, I, X], [E, I, X] -> [E, 2 I, X]: eight gate rows, eight up rows, and so on."""
    e, rows, cols = gate.shape
    both = torch.stack((gate.reshape(e, rows // 8, 8, cols), up.reshape(e, rows // 8, 8, cols)), 2)
    return both.reshape(e, rows * 2, cols)


def _tiled(
    fmt: str, codes: torch.Tensor, scale_bytes: torch.Tensor, factors: torch.Tensor
) -> TiledW4:
    e, n, k = codes.shape
    # e, n64, warp, row8, g, k64, k32, k16
    b = scale_bytes.view(e, n // 64, 4, 2, 8, k // 64, 2, 2).to(torch.int64)
    low, high = (b[:, :, :, r, ..., 0] | (b[:, :, :, r, ..., 1] << 8) for r in range(2))
    word = low | (high << 16)
    word = torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)
    return TiledW4(
        format=fmt,
        num_experts=e,
        num_rows=n,
        num_cols=k,
        codes=_words_of_codes(codes, fmt),
        # e, n64, warp, g, k64, k32 -> e, n64, k64, warp, g, k32
        scales=word.permute(0, 1, 4, 2, 3, 5).contiguous(),
        factors=factors,
    )


def _check(name: str, weight: W4Weight) -> None:
    if weight.format not in GROUP_OF_FORMAT:
        raise KernelInputError(f"{name}.format", weight.format, "/".join(sorted(GROUP_OF_FORMAT)))
    shape = weight.shape
    if len(shape) != 3 or shape[1] % 64 or shape[2] % 64:
        raise KernelInputError(f"{name}.shape", list(shape), "[E, N, K], N and K multiples of 64")


def tile_w4(weight: W4Weight) -> TiledW4:
    """Reorder experts' matrices [E, N, K] (a down projection).

    Raises:
        KernelInputError: if the shape does not divide into tiles.
    """
    _check("weight", weight)
    codes = _zero_where_scale_is_zero(unpack_codes(weight.packed), weight)
    scale_bytes, factors = _scale_bytes(weight)
    return _tiled(weight.format, codes, scale_bytes, torch.stack((factors, factors), dim=-1))


def tile_w4_gate_up(gate: W4Weight, up: W4Weight) -> TiledW4:
    """Reorder experts' gate and up matrices, [E, I, K] each, into one interleaved [E, 2 I, K].

    Raises:
        KernelInputError: if formats or shapes differ or do not divide into tiles.
    """
    _check("gate", gate)
    _check("up", up)
    if gate.format != up.format or gate.shape != up.shape:
        raise KernelInputError("up", (up.format, up.shape), f"{gate.format} {list(gate.shape)}")
    gate_bytes, gate_factors = _scale_bytes(gate)
    up_bytes, up_factors = _scale_bytes(up)
    tiled = _tiled(
        gate.format,
        interleave_rows(
            _zero_where_scale_is_zero(unpack_codes(gate.packed), gate),
            _zero_where_scale_is_zero(unpack_codes(up.packed), up),
        ),
        interleave_rows(gate_bytes, up_bytes),
        torch.stack((gate_factors, up_factors), dim=-1),
    )
    return replace(tiled, is_interleaved=True)


def tile_w4_linear(parts: Sequence[W4Weight]) -> TiledW4:
    """Reorder matrices [N_i, K] of one format, their rows one below the other, for a linear layer.

    Raises:
        KernelInputError: if formats or K differ, or a shape does not divide into tiles.
    """
    first = parts[0]
    for part in parts:
        if (part.format, part.shape[-1]) != (first.format, first.shape[-1]):
            found = (part.format, part.shape[-1])
            raise KernelInputError("parts", found, f"({first.format}, {first.shape[-1]})")
    tiled = [tile_w4(stack_w4([part])) for part in parts]
    slices = [t.factors[:, None].expand(1, t.num_rows // 16, 2) for t in tiled]
    return TiledW4(
        format=first.format,
        num_experts=1,
        num_rows=sum(t.num_rows for t in tiled),
        num_cols=first.shape[-1],
        codes=torch.cat([t.codes for t in tiled], dim=1),
        scales=torch.cat([t.scales for t in tiled], dim=1),
        factors=torch.cat(slices, dim=1).contiguous(),
    )


def tile_w4_swiglu(gate: W4Weight, up: W4Weight) -> TiledW4:
    """Reorder a linear layer's gate and up matrices, [F, K] each, into one interleaved [2 F, K].

    Raises:
        KernelInputError: if formats or shapes differ or do not divide into tiles.
    """
    tiled = tile_w4_gate_up(stack_w4([gate]), stack_w4([up]))
    factors = tiled.factors[:, None].expand(1, tiled.num_rows // 16, 2).contiguous()
    return replace(tiled, factors=factors)


def stack_w4(weights: Sequence[W4Weight]) -> W4Weight:
    """Return matrices of one format and shape as one of experts."""
    return W4Weight(
        format=weights[0].format,
        packed=torch.stack([weight.packed for weight in weights]),
        scales=torch.stack([weight.scales for weight in weights]),
        global_scale=torch.stack([weight.global_scale for weight in weights]),
    )


def untile_w4(weight: TiledW4) -> torch.Tensor:
    """Return the fp32 matrices [E, N, K], decoded bit by bit; interleaved rows stay so."""
    e, n, k = weight.num_experts, weight.num_rows, weight.num_cols
    words = weight.codes.view(e, n // 64, k // 64, 4, 8, 4, 4)
    values = torch.empty(
        e, n // 64, 4, 2, 8, k // 64, 4, 4, 2, 2, dtype=torch.float32, device=words.device
    )
    for index in range(4):
        row8, k2 = index % 2, index // 2
        for half in range(2):
            if weight.format == "mxint4":
                decoded = ((words >> (16 * half + 4 * index)) & 15).float() - 8.0
            else:
                sign, e1, e0, m = ((words >> (16 * half + bit)) & 1 for bit in _FP4_BITS[index])
                exponent = 2 * e1 + e0
                magnitude = torch.where(
                    exponent > 0, torch.ldexp(1.0 + 0.5 * m, exponent - 1), 0.5 * m
                )
                decoded = torch.where(sign > 0, -magnitude, magnitude)
            # e, n64, k64, warp, g, c, k16 -> e, n64, warp, g, k64, k16, c
            values[:, :, :, row8, :, :, :, :, k2, half] = decoded.permute(0, 1, 3, 4, 2, 6, 5)
    matrix = values.view(e, n, k)
    # e, n64, k64, warp, g, k32 -> e, n64, warp, g, k64, k32; a byte each for row8 and k16
    s = weight.scales.permute(0, 1, 3, 4, 2, 5)
    rows = [torch.stack([(s >> (16 * r + 8 * i)) & 255 for i in (0, 1)], dim=-1) for r in (0, 1)]
    code = torch.stack(rows, dim=3).reshape(e, n, k // 16)
    if weight.format == "nvfp4":
        step = torch.ldexp(1.0 + (code & 7) / 8.0, (code >> 3) - 23)
        factors = weight.factors * 2.0**-8
    else:
        one = 253 if weight.format == "mxfp4" else 127
        step = torch.ldexp(torch.ones_like(code, dtype=torch.float32), code - one)
        factors = weight.factors
    slices = factors if factors.dim() == 3 else factors[:, None, :].expand(e, n // 16, 2)
    row_factor = slices.repeat_interleave(8, dim=2).reshape(e, n)
    scaled = matrix.reshape(e, n, -1, 16) * step[..., None]
    return scaled.flatten(-2) * row_factor[..., None]
