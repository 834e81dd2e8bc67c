# SPDX-License-Identifier: Apache-2.0
"""4-bit weight formats in plain torch: quantise, dequantise. Does not know: kernels, files.

A weight [..., N, K] becomes codes (two per byte along K, the even column in the low nibble), one
scale per group of columns, and for nvfp4 one fp32 factor per matrix:

    nvfp4    e2m1 code, e4m3 scale per 16, fp32 global: w = code * scale * global
    mxfp4    e2m1 code, e8m0 scale per 32:              w = code * 2^(scale - 127)
    mxint4   int4 code (two's complement), e8m0 scale per 32

Source: OCP Microscaling Formats v1.0 (e2m1, e8m0, group of 32); NVFP4 as in NVIDIA ModelOpt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.errors import KernelInputError

GROUP_OF_FORMAT = {"nvfp4": 16, "mxfp4": 32, "mxint4": 32}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class W4Weight:
    """A quantised weight as checkpoints store it.

    `packed` uint8 [..., N, K / 2]; `scales` [..., N, K / group], float8_e4m3fn for nvfp4 else
    uint8 e8m0; `global_scale` fp32 [...] (ones where the format has none).
    """

    format: str
    packed: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that it stands for."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 codes 0..15, [..., K], from [..., K / 2]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Inverse of unpack_codes."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e2m1 number, ties to the even mantissa, saturating; uint8 codes."""
    magnitude = x.abs().float()
    # Midpoints between neighbours; at a tie the code with mantissa bit 0 wins.
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index in range(7):
        middle = (E2M1_VALUES[index] + E2M1_VALUES[index + 1]) / 2
        above = magnitude > middle if index % 2 == 0 else magnitude >= middle
        code += above.to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return fp32 values of e2m1 codes."""
    table = torch.tensor(
        E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=codes.device
    )
    return table[codes.long()]


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Return 2^(s - 127) in fp32; 255 is NaN."""
    value = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    return torch.where(scales == 255, torch.nan, value)


def quantize_w4(weight: torch.Tensor, fmt: str) -> W4Weight:
    """Quantise a weight [..., N, K]; leading axes (experts) get their own global scale.

    Raises:
        KernelInputError: if the format is unknown or K is not a multiple of its group.
    """
    if fmt not in GROUP_OF_FORMAT:
        raise KernelInputError("format", fmt, " or ".join(sorted(GROUP_OF_FORMAT)))
    group = GROUP_OF_FORMAT[fmt]
    if weight.shape[-1] % group:
        raise KernelInputError("weight.shape[-1]", weight.shape[-1], f"a multiple of {group}")
    w = weight.float().reshape(*weight.shape[:-1], -1, group)
    amax = w.abs().amax(dim=-1)
    lead = weight.shape[:-2]
    ones = torch.ones(lead, dtype=torch.float32, device=weight.device)
    if fmt == "nvfp4":
        top = weight.float().abs().amax(dim=(-2, -1))
        global_scale = torch.where(top > 0, top / (E2M1_MAX * E4M3_MAX), ones)
        scales = (amax / E2M1_MAX / global_scale[..., None, None]).to(torch.float8_e4m3fn)
        step = scales.float() * global_scale[..., None, None]
        scaled = torch.where(step[..., None] > 0, w / step[..., None], 0.0)
        return W4Weight(
            format=fmt,
            packed=pack_codes(encode_e2m1(scaled).flatten(-2)),
            scales=scales,
            global_scale=global_scale,
        )
    # Smallest power of two under which the largest of the group still fits.
    limit = E2M1_MAX if fmt == "mxfp4" else 7.0
    exponent = torch.ceil(torch.log2(torch.clamp(amax, min=2.0**-120) / limit))
    scales = (exponent + 127).clamp(0, 254).to(torch.uint8)
    scaled = w / decode_e8m0(scales)[..., None]
    if fmt == "mxfp4":
        codes = encode_e2m1(scaled)
    else:
        codes = (torch.round(scaled).clamp(-8, 7).to(torch.int8) & 15).to(torch.uint8)
    return W4Weight(
        format=fmt, packed=pack_codes(codes.flatten(-2)), scales=scales, global_scale=ones
    )


def dequantize_w4(weight: W4Weight) -> torch.Tensor:
    """Return the fp32 weight [..., N, K]."""
    codes = unpack_codes(weight.packed)
    if weight.format == "mxint4":
        signed = codes.to(torch.int8)
        values = torch.where(signed > 7, signed - 16, signed).float()
    else:
        values = decode_e2m1(codes)
    if weight.format == "nvfp4":
        step = weight.scales.float() * weight.global_scale[..., None, None]
    else:
        step = decode_e8m0(weight.scales)
    group = GROUP_OF_FORMAT[weight.format]
    grouped = values.reshape(*values.shape[:-1], -1, group) * step[..., None]
    return grouped.flatten(-2)
