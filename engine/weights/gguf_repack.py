# SPDX-License-Identifier: Apache-2.0
"""Block formats of ggml in those that the CPU kernels take: Q4_0 and Q4_K as Q4_1, the others of
more bits as Q8_0. numpy only.

Q4_0 and Q5_0 keep their values. Of Q4_K, whose scales and minima are products of a 6-bit number
with an fp16 one, these are rounded to fp16 (by at most 2^-11). Q5_1, Q5_K and Q6_K have minima, or
scales for fewer values, that Q8_0 has not: values are rounded to 1/127 of the largest of their 32,
as activations are beside them; where the scales of a block are alike that is a quarter of Q6_K's
own step.
Does not know: files, tensors' names.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.weights.gguf_blocks import (
    BLOCK_BYTES,
    Bytes,
    Floats,
    dequantise_blocks,
    fifth_bits,
    half_of,
    k_scales,
    nibbles,
)

Halves = NDArray[np.float16]

_BLOCKS_AT_ONCE = 1 << 16


def repack_blocks(raw: Bytes, format_name: str) -> tuple[str, Bytes] | None:
    """(format of the kernels, blocks uint8 [N, block bytes], one for 32 values in storage order).

    None where there is no such form, or a scale is beyond fp16.
    """
    repack = _REPACKERS.get(format_name)
    if repack is None:
        return None
    # In pieces, as values in between take many times the memory of codes.
    step = _BLOCKS_AT_ONCE * BLOCK_BYTES[format_name]
    parts = [repack(raw[start : start + step]) for start in range(0, raw.size, step)]
    done = [part for part in parts if part is not None]
    if len(done) < len(parts):
        return None
    return done[0][0], np.concatenate([blocks for _, blocks in done])


def _q4_0(raw: Bytes) -> tuple[str, Bytes] | None:
    blocks = raw.reshape(-1, 18)
    return _as_q4_1(half_of(blocks, 0), -8.0 * half_of(blocks, 0), blocks[:, 2:])


def _q4_k(raw: Bytes) -> tuple[str, Bytes] | None:
    blocks = raw.reshape(-1, 144)
    scales, minima = k_scales(blocks)
    # 64 values lie in 32 bytes: the first 32 in their low halves. A block of Q4_1 pairs value i
    # with value i + 16.
    pairs = blocks[:, 16:].reshape(-1, 4, 32)
    codes = np.stack([pairs & 0x0F, pairs >> 4], axis=2).reshape(-1, 32)
    packed = codes[:, :16] | (codes[:, 16:] << 4)
    step, offset = half_of(blocks, 0) * scales, half_of(blocks, 2) * -minima.astype(np.float32)
    return _as_q4_1(step.reshape(-1, 1), offset.reshape(-1, 1), packed)


def _q5_0(raw: Bytes) -> tuple[str, Bytes] | None:
    blocks = raw.reshape(-1, 22)
    codes = nibbles(blocks[:, 6:]) + fifth_bits(blocks[:, 2:6]) - 16.0
    return "q8_0", _as_q8_0(blocks[:, :2], codes)


def _rounded(format_name: str) -> Callable[[Bytes], tuple[str, Bytes] | None]:
    def repack(raw: Bytes) -> tuple[str, Bytes] | None:
        values = dequantise_blocks(raw, format_name).reshape(-1, 32)
        with np.errstate(over="ignore", invalid="ignore"):
            halves = (np.abs(values).max(axis=1, keepdims=True) / 127.0).astype("<f2")
            scales = halves.astype(np.float32)
            # fp16 may have rounded down, by more where it is not normal.
            codes = np.rint(values / np.where(scales == 0.0, 1.0, scales)).clip(-127, 127)
        if not np.isfinite(halves).all():
            return None
        return "q8_0", _as_q8_0(halves, codes)

    return repack


def _as_q8_0(halves: Halves | Bytes, codes: Floats) -> Bytes:
    return np.concatenate([halves.view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=1)


def _as_q4_1(step: Floats, offset: Floats, packed: Bytes) -> tuple[str, Bytes] | None:
    # A product is no smaller than its fp16 factor, so one that is not normal in fp16 is a multiple
    # of the smallest number of fp16: exact. At the other end it may overflow.
    with np.errstate(over="ignore"):
        halves = np.concatenate([step, offset], axis=1).astype("<f2")
    if not np.isfinite(halves).all():
        return None
    return "q4_1", np.concatenate([halves.view(np.uint8), packed], axis=1)


_REPACKERS: dict[str, Callable[[Bytes], tuple[str, Bytes] | None]] = {
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _rounded("Q5_1"),
    "Q5_K": _rounded("Q5_K"),
    "Q6_K": _rounded("Q6_K"),
}
