# SPDX-License-Identifier: Apache-2.0
"""4-bit formats, bit for bit, against decoders written from the format definitions."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from kernels.errors import KernelInputError
from kernels.reference.quant import (
    W4Weight,
    decode_e2m1,
    dequantize_w4,
    encode_e2m1,
    pack_codes,
    quantize_w4,
    unpack_codes,
)
from kernels.w4_layout import interleave_rows, tile_w4, tile_w4_gate_up, untile_w4

FORMATS = ("nvfp4", "mxfp4", "mxint4")


def e2m1_value(code: int) -> float:
    """Sign, two exponent bits with bias 1, one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def e4m3_value(code: int) -> float:
    """Four exponent bits with bias 7, three mantissa bits; 0x7f is NaN."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 0:
        return mantissa / 8 * 2.0**-6
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def exact(weight: W4Weight) -> W4Weight:
    """The same codes under power-of-two global scales: any order of products is then exact."""
    if weight.format != "nvfp4":
        return weight
    factors = 2.0 ** -torch.arange(1.0, weight.global_scale.numel() + 1)
    return dataclasses.replace(weight, global_scale=factors)


def decode_by_hand(weight: W4Weight, row: int, col: int) -> float:
    """One element of an expert-less weight, from its bytes alone."""
    fmt = weight.format
    byte = int(weight.packed[row, col // 2])
    code = byte >> 4 if col % 2 else byte & 15
    if fmt == "nvfp4":
        raw = weight.scales.view(torch.uint8)
        scale = e4m3_value(int(raw[row, col // 16]))
        return e2m1_value(code) * scale * float(weight.global_scale)
    scale = 2.0 ** (int(weight.scales[row, col // 32]) - 127)
    if fmt == "mxfp4":
        return e2m1_value(code) * scale
    return (code - 16 if code > 7 else code) * scale


def test_e2m1_codes_decode_as_the_format_says() -> None:
    decoded = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert decoded.tolist() == [e2m1_value(code) for code in range(16)]


def test_e2m1_rounds_to_nearest_with_ties_to_even() -> None:
    values = [e2m1_value(code) for code in range(8)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    # A tie goes to the neighbour whose mantissa bit is 0, that is the even code.
    ties = [code if code % 2 == 0 else code + 1 for code in range(7)]
    assert encode_e2m1(torch.tensor(middles)).tolist() == ties
    just_below = [math.nextafter(m, 0.0) - 1e-6 for m in middles]
    just_above = [m + 1e-6 for m in middles]
    assert encode_e2m1(torch.tensor(just_below)).tolist() == list(range(7))
    assert encode_e2m1(torch.tensor(just_above)).tolist() == list(range(1, 8))
    assert encode_e2m1(torch.tensor([-100.0, 100.0])).tolist() == [15, 7]


def test_codes_survive_packing_with_the_even_column_in_the_low_nibble() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)[None]
    packed = pack_codes(codes)
    assert int(packed[0, 0]) == 0x10
    assert torch.equal(unpack_codes(packed), codes)


@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantised_weights_equal_an_independent_decode(fmt: str) -> None:
    torch.manual_seed(3)
    original = torch.randn(5, 64) * torch.logspace(-3, 2, 5)[:, None]
    weight = quantize_w4(original, fmt)
    decoded = dequantize_w4(weight)
    wanted = [[decode_by_hand(weight, row, col) for col in range(64)] for row in range(5)]
    torch.testing.assert_close(decoded, torch.tensor(wanted), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("fmt", "bound"), [("nvfp4", 0.13), ("mxfp4", 0.17), ("mxint4", 0.15)])
def test_quantisation_error_of_gaussian_weights_stays_in_the_formats_range(
    fmt: str, bound: float
) -> None:
    torch.manual_seed(1)
    original = torch.randn(64, 512)
    error = (dequantize_w4(quantize_w4(original, fmt)) - original).norm() / original.norm()
    assert 0.02 < float(error) < bound


@pytest.mark.parametrize("fmt", FORMATS)
def test_all_zero_weights_stay_zero(fmt: str) -> None:
    weight = quantize_w4(torch.zeros(2, 64, 64), fmt)
    assert torch.equal(dequantize_w4(weight), torch.zeros(2, 64, 64))
    assert torch.equal(untile_w4(tile_w4(weight)), torch.zeros(2, 64, 64))


def test_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(KernelInputError, match="format: got int3; allowed: mxfp4 or mxint4"):
        quantize_w4(torch.zeros(2, 32), "int3")


def test_columns_that_do_not_fill_a_group_are_refused() -> None:
    with pytest.raises(KernelInputError, match=r"weight.shape\[-1\]: got 40; .* multiple of 16"):
        quantize_w4(torch.zeros(2, 40), "nvfp4")


@pytest.mark.parametrize("fmt", FORMATS)
def test_tiles_hold_exactly_the_weights_they_were_made_from(fmt: str) -> None:
    torch.manual_seed(7)
    spread = torch.logspace(-2, 1, 128)[None, :, None]
    weight = exact(quantize_w4(torch.randn(3, 128, 192) * spread, fmt))
    assert torch.equal(untile_w4(tile_w4(weight)), dequantize_w4(weight))


@pytest.mark.parametrize("fmt", FORMATS)
def test_gate_and_up_rows_interleave_by_eight_and_keep_their_own_factor(fmt: str) -> None:
    torch.manual_seed(8)
    gate = exact(quantize_w4(torch.randn(2, 64, 128), fmt))
    up = exact(quantize_w4(torch.randn(2, 64, 128) * 37.0, fmt))
    tiled = untile_w4(tile_w4_gate_up(gate, up))
    wanted = interleave_rows(dequantize_w4(gate), dequantize_w4(up))
    assert torch.equal(wanted[:, :8], dequantize_w4(gate)[:, :8])
    assert torch.equal(wanted[:, 8:16], dequantize_w4(up)[:, :8])
    assert torch.equal(tiled, wanted)


def test_a_word_of_a_tile_lies_where_the_layout_says() -> None:
    codes = torch.zeros(1, 64, 64, dtype=torch.uint8)
    codes[0, 37, 22] = 0b1101  # warp 2, row 5 of it, word 1, lane c 1, third pair, even column
    weight = quantize_w4(torch.ones(1, 64, 64), "nvfp4")
    weight = dataclasses.replace(weight, packed=pack_codes(codes))
    words = tile_w4(weight).codes
    assert (words != 0).nonzero().tolist() == [[0, 0, 0, 2, 4 * 5 + 1, 1]]
    # sign, exponent, mantissa of the third pair: bits 9, 2, 1, 0
    assert int(words[0, 0, 0, 2, 21, 1]) == (1 << 9) | (1 << 2) | (0 << 1) | 1


def test_shapes_that_do_not_divide_into_tiles_are_refused() -> None:
    weight = quantize_w4(torch.zeros(1, 48, 64), "nvfp4")
    with pytest.raises(KernelInputError, match="weight.shape: got .* multiples of 64"):
        tile_w4(weight)
