# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding tables, with the frequency scalings we have.

Does not know: files, kernels (they take the table).
Source: RoFormer (arXiv 2104.09864); linear scaling (arXiv 2306.15595); YaRN (arXiv 2309.00071);
the llama3 scaling as the Llama 3.1 model card's reference code defines it.
"""

from __future__ import annotations

import math

import torch

from engine.models.rope_config import RopeConfig


def rope_table(
    rope: RopeConfig,
    head_dim: int,
    max_positions: int,
    freq_factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 [max_positions, head_dim]: cos of the head_dim / 2 angles, then their sin.

    Args:
        freq_factors: fp32 [head_dim / 2] divisors of the frequencies, as GGUF files carry them.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if freq_factors is not None:
        frequencies = frequencies / freq_factors.float()
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3_frequencies(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _yarn_frequencies(rope, frequencies, head_dim)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def _llama3_frequencies(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    wave_len = 2 * math.pi / frequencies
    longest_kept = rope.original_context_len / rope.high_freq_factor
    shortest_scaled = rope.original_context_len / rope.low_freq_factor
    share = (rope.original_context_len / wave_len - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - share) * frequencies / rope.factor + share * frequencies
    scaled = torch.where(wave_len > shortest_scaled, frequencies / rope.factor, between)
    return torch.where(wave_len < longest_kept, frequencies, scaled)


def _yarn_frequencies(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Kept where a wave turns often in the original context, stretched where it hardly turns."""

    def dim_of(num_rotations: float) -> float:
        wave_len = rope.original_context_len / (num_rotations * 2 * math.pi)
        return head_dim * math.log(wave_len) / (2 * math.log(rope.theta))

    low = max(math.floor(dim_of(rope.beta_fast)), 0)
    high = min(math.ceil(dim_of(rope.beta_slow)), head_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)
