# SPDX-License-Identifier: Apache-2.0
"""Random calls of the sampling kernels, for the interpreter and for a GPU."""

from __future__ import annotations

import torch

from kernels.ops.edit import RowEdits

# temperature, top_k, top_p, min_p: greedy, free, each cut alone, and together
ROWS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 1, 0.5, 0.0),
    (2.0, 0, 1.0, 0.05),
    (0.9, 50, 0.8, 0.01),
    (1.0, 10_000, 0.3, 0.2),
)


def draw_case(vocab: int, spread: float, seed: int) -> tuple[torch.Tensor, ...]:
    """Rows of every kind, a seventh of the tokens forbidden."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(ROWS), vocab, generator=generator) * spread
    logits[:, ::7] = float("-inf")
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*ROWS, strict=True))
    chance = torch.rand(len(ROWS), generator=generator, dtype=torch.float64)
    return logits, temperature, top_k.int(), top_p, min_p, chance


def edit_case(vocab: int, seed: int) -> tuple[torch.Tensor, RowEdits]:
    """Four samples of five rows over six slots: neutral, penalised, biased, all of it."""
    generator = torch.Generator().manual_seed(seed)

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    counts = ints(8, 6, vocab) | 1
    counts[:, ::3] = 0
    bias = torch.randn(6, vocab, generator=generator)
    bias[[0, 2]] = 0.0
    edits = RowEdits(
        rows=torch.tensor([4.0, 0.0, 2.0, 3.0], dtype=torch.float64),
        slots=torch.tensor([2.0, 0.0, 5.0, 1.0], dtype=torch.float64),
        repetition=torch.tensor([1.0, 1.5, 1.0, 0.5]),
        presence=torch.tensor([0.0, 0.25, 0.0, -1.0]),
        frequency=torch.tensor([0.0, 0.5, 0.0, 0.125]),
        masks=torch.randint(-(2**31), 2**31, (6, -(-vocab // 32)), generator=generator).int(),
        counts=counts,
        bias=bias,
    )
    return torch.randn(5, vocab, generator=generator) * 3, edits
