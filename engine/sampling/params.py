# SPDX-License-Identifier: Apache-2.0
"""What the sampler needs to know of a request and of a step; and the random numbers it draws.

Randomness is a pure function of (seed, output position): Philox4x32-10, so a token does not depend
on the batch it was sampled in, nor on which life of its request sampled it. Does not know: the
wire, the scheduler, which of a request's tokens were prompt.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.api import TokenLogprobs
from engine.sampling.penalties import Penalties

# Below this the distribution is its maximum to fp32 precision: such rows are greedy.
MIN_TEMPERATURE = 1e-5

ALREADY_SET = threading.Event()  # shared by every step that has no masks to wait for
ALREADY_SET.set()

_NO_IDS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(slots=True, kw_only=True, eq=False)
class RowSampling:
    """How to sample one request. Built by the loop; after that the executor's thread owns it."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1
    penalties: Penalties | None = None
    bias_ids: NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)
    bias: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    banned_ids: NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)
    # Banned too while fewer than min_new_tokens were sampled.
    stop_ids: NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)
    min_new_tokens: int = 0

    @property
    def is_greedy(self) -> bool:
        """The likeliest token, always."""
        return self.temperature < MIN_TEMPERATURE


@dataclass(slots=True, kw_only=True, eq=False)
class SampleBatch:
    """The rows of a step that sample, in the order of its logits [S, vocab].

    `bitmask` [S, ceil(vocab / 32)] int32 is filled by the loop while the forward runs; nobody
    reads it before `mask_ready` is set. Rows without a grammar hold -1 (everything allowed).
    """

    rows: Sequence[RowSampling]
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]  # output tokens of the request before this one
    draft_places: NDArray[np.int64] | None = None  # drafts before it in its row; None: all 0
    bitmask: NDArray[np.int32] | None = None
    mask_ready: threading.Event = ALREADY_SET


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One token per row of a SampleBatch; -1 where the row's logits allowed none (NaN, inf)."""

    token_ids: NDArray[np.int32]
    logprobs: dict[int, TokenLogprobs]  # by row, for rows that asked
    drafts: NDArray[np.int32] | None = None  # what the model guesses behind each


_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32 over 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK32
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & _MASK32
        k0 = (k0 + _WEYL[0]) & _MASK32
        k1 = (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, made of a 64-bit seed and an output position."""
    words = philox4x32((position & _MASK32, position >> 32, 0, 0), (seed & _MASK32, seed >> 32))
    return ((words[0] >> 5) * (1 << 26) + (words[1] >> 6)) / (1 << 53)
