# SPDX-License-Identifier: Apache-2.0
"""The block formats of ggml: sizes, and expansion to fp32. numpy only.

Does not know: files, tensors' names. Values follow each other in storage order.
Source: ggml block layouts (ggml-common.h, ggml-quants.c of the ggml project), read as a format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    name: str
    block_len: int  # values a block
    block_bytes: int


BLOCK_FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat(name="F32", block_len=1, block_bytes=4),
    1: BlockFormat(name="F16", block_len=1, block_bytes=2),
    2: BlockFormat(name="Q4_0", block_len=32, block_bytes=18),
    3: BlockFormat(name="Q4_1", block_len=32, block_bytes=20),
    6: BlockFormat(name="Q5_0", block_len=32, block_bytes=22),
    7: BlockFormat(name="Q5_1", block_len=32, block_bytes=24),
    8: BlockFormat(name="Q8_0", block_len=32, block_bytes=34),
    12: BlockFormat(name="Q4_K", block_len=256, block_bytes=144),
    13: BlockFormat(name="Q5_K", block_len=256, block_bytes=176),
    14: BlockFormat(name="Q6_K", block_len=256, block_bytes=210),
    30: BlockFormat(name="BF16", block_len=1, block_bytes=2),
}
BLOCK_BYTES = {form.name: form.block_bytes for form in BLOCK_FORMATS.values()}


def dequantise_blocks(raw: Bytes, format_name: str) -> Floats:
    """Expand the stored bytes of whole blocks to fp32 [num_values]."""
    blocks = raw.reshape(-1, BLOCK_BYTES[format_name])
    return np.ascontiguousarray(_EXPANDERS[format_name](blocks)).reshape(-1)


def half_of(blocks: Bytes, start: int) -> Floats:
    """The fp16 at byte `start` of every block, as fp32 [N, 1]."""
    column = np.ascontiguousarray(blocks[:, start : start + 2])
    return column.view("<f2").astype(np.float32)


def nibbles(packed: Bytes) -> Floats:
    """[N, 16] bytes -> [N, 32]: low halves are values 0-15, high halves 16-31."""
    out = np.empty((packed.shape[0], packed.shape[1] * 2), dtype=np.float32)
    half = packed.shape[1]
    out[:, :half] = packed & 0x0F
    out[:, half:] = packed >> 4
    return out


def fifth_bits(packed: Bytes) -> NDArray[np.uint8]:
    """[N, 4] bytes, bit i of the little-endian word belongs to value i -> [N, 32] of 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").copy()


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return (nibbles(blocks[:, 2:]) - 8.0) * half_of(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    values = nibbles(blocks[:, 4:])
    values *= half_of(blocks, 0)
    values += half_of(blocks, 2)
    return values


def _q5_0(blocks: Bytes) -> Floats:
    return (nibbles(blocks[:, 6:]) + fifth_bits(blocks[:, 2:6]) - 16.0) * half_of(blocks, 0)


def _q5_1(blocks: Bytes) -> Floats:
    values = nibbles(blocks[:, 8:]) + fifth_bits(blocks[:, 4:8])
    return values * half_of(blocks, 0) + half_of(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * half_of(blocks, 0)


def k_scales(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """The 6-bit scales and minima of the 8 sub-blocks of Q4_K and Q5_K, each [N, 8]."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 0x0F) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales, minima


def _q4_k(blocks: Bytes) -> Floats:
    """256 values: 8 sub-blocks of 32, each with a 6-bit scale and a 6-bit minimum."""
    quants = blocks[:, 16:].reshape(-1, 4, 32)
    return _k_values(blocks, np.stack([quants & 0x0F, quants >> 4], axis=2))


def _q5_k(blocks: Bytes) -> Floats:
    """As Q4_K; bit i of byte j of the 32 behind the scales is the fifth bit of value 32 i + j."""
    quants = blocks[:, 48:].reshape(-1, 4, 32)
    fours = np.stack([quants & 0x0F, quants >> 4], axis=2).reshape(-1, 8, 32)
    fifth = np.stack([(blocks[:, 16:48] >> bit) & 1 for bit in range(8)], axis=1)
    return _k_values(blocks, fours | (fifth << 4))


def _k_values(blocks: Bytes, codes: Bytes) -> Floats:
    scales, minima = k_scales(blocks)
    step, offset = half_of(blocks, 0) * scales, half_of(blocks, 2) * minima
    values = codes.reshape(-1, 8, 32).astype(np.float32)
    expanded: Floats = values * step[:, :, None] - offset[:, :, None]
    return expanded


def _q6_k(blocks: Bytes) -> Floats:
    """256 values in two halves of 128: 4 low bits, 2 high bits, an 8-bit scale per 16."""
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    nibbles = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    top = np.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2)
    values = (nibbles | (top << 4)).astype(np.float32) - 32.0
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * half_of(blocks, 208)
    expanded: Floats = values.reshape(-1, 16, 16) * scales[:, :, None]
    return expanded


_EXPANDERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
