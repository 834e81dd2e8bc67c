# SPDX-License-Identifier: Apache-2.0
"""Pinned host buffers for the steps under way: one set a step, reused a few steps later.

An upload is read by the device later than the call returns, so a buffer must rest until its step
is over. The loop keeps two steps under way at most: with four sets, the one that comes up again
belongs to a step whose result is in. Does not know: what the numbers mean.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

NUM_SETS = 4


class HostRing:
    """`advance` begins a step's set; the views handed out last until it comes round again."""

    def __init__(
        self, device: torch.device, max_tokens: int, max_rows: int, words: int, num_params: int
    ) -> None:
        self._device = device
        self._is_pinned = device.type == "cuda"
        # A mixed step sends four numbers a token and four a row; page deltas are few.
        num_ints = 4 * max_tokens + 16 * (max_rows + 1) + 64
        self._ints = [self._host(num_ints, torch.int32) for _ in range(NUM_SETS)]
        self._longs = [self._host(3 * max_tokens + 8 * max_rows, torch.int64) for _ in self._ints]
        self._words = [self._host(max_rows * words, torch.int32) for _ in self._ints]
        self._num_params = num_params
        size = num_params * max_rows
        self._params = [self._host(size, torch.float64) for _ in self._ints]
        self._ids = [self._host(max_rows, torch.int32) for _ in self._ints]
        self._drafts = [self._host(max_rows, torch.int32) for _ in self._ints]
        self._turn = 0
        self._used = {"ints": 0, "longs": 0}

    def advance(self) -> None:
        """Begin the next step."""
        self._turn = (self._turn + 1) % NUM_SETS
        self._used = dict.fromkeys(self._used, 0)

    def ints(self, shape: tuple[int, int]) -> torch.Tensor:
        """Room for int32 of a shape, to be filled and copied by the caller."""
        num = math.prod(shape)
        return self._take("ints", self._ints[self._turn], num).view(shape)

    def params(self, size: int) -> torch.Tensor:
        """Room for fp64 [num_params, size]."""
        num = self._num_params
        return self._params[self._turn][: num * size].view(num, size)

    def token_ids(self, size: int) -> torch.Tensor:
        """Room for int32 [size], to download to."""
        return self._ids[self._turn][:size]

    def draft_ids(self, size: int) -> torch.Tensor:
        """The same for what a model drafts."""
        return self._drafts[self._turn][:size]

    def upload(self, values: NDArray[np.int64]) -> torch.Tensor:
        """int64 numbers, on the device."""
        source = torch.from_numpy(np.ascontiguousarray(values))
        held = self._take("longs", self._longs[self._turn], source.numel()).view(source.shape)
        return held.copy_(source).to(self._device, non_blocking=True)

    def upload_ints(self, values: torch.Tensor) -> torch.Tensor:
        """int32 numbers [n], on the device."""
        held = self._take("ints", self._ints[self._turn], values.numel())
        return held.copy_(values).to(self._device, non_blocking=True)

    def upload_masks(self, masks: NDArray[np.int32]) -> torch.Tensor:
        """Bitmask rows [n, words], on the device."""
        held = self._words[self._turn][: masks.size].view(masks.shape)
        return held.copy_(torch.from_numpy(masks)).to(self._device, non_blocking=True)

    def _take(self, kind: str, buffer: torch.Tensor, num: int) -> torch.Tensor:
        start = self._used[kind]
        self._used[kind] = start + num
        if start + num > buffer.numel():  # more page deltas than a step of this size can need
            return self._host(num, buffer.dtype)
        return buffer[start : start + num]

    def _host(self, num: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num, dtype=dtype, pin_memory=self._is_pinned)
