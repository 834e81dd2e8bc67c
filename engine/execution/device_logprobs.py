# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a step, found where the logits are and read when its tokens are.

The same numbers as `engine.sampling.logprobs`: the model's own, before any edit. Does not know: how
a token was chosen, streams.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.api import TokenLogprobs
from engine.sampling.params import RowSampling


class LogprobsLater:
    """Begun on the device for the rows that asked; `gather` belongs behind the step's end."""

    def __init__(
        self,
        logits: torch.Tensor,
        rows: list[RowSampling],
        logit_rows: NDArray[np.int64],
        token_ids: torch.Tensor,
    ) -> None:
        """`logits` fp32 [R, V], `token_ids` int32 [at least S], on the device; `logit_rows` [S]."""
        self._asked = [place for place, row in enumerate(rows) if row.num_logprobs >= 0]
        if not self._asked:
            return
        self._num_top = [rows[place].num_logprobs for place in self._asked]
        device = logits.device
        places = torch.from_numpy(np.stack([logit_rows[self._asked], self._asked])).to(device)
        logprobs = torch.log_softmax(logits[places[0]], dim=-1)
        chosen = token_ids[places[1]].clamp_min(0).long()
        top = torch.topk(logprobs, min(max(1, *self._num_top), logits.shape[1]), dim=-1)
        self._chosen = _to_host(logprobs.gather(1, chosen[:, None])[:, 0])
        self._top_ids = _to_host(top.indices)
        self._top_logprobs = _to_host(top.values)

    def gather(self, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        """By row; failed rows are left out. Requires: the device has passed this step."""
        found: dict[int, TokenLogprobs] = {}
        for index, place in enumerate(self._asked):
            if token_ids[place] < 0:
                continue
            # topk leaves the order of equals open; the lower id goes first.
            pairs = sorted(
                zip(self._top_logprobs[index].tolist(), self._top_ids[index].tolist(), strict=True),
                key=lambda pair: (-pair[0], pair[1]),
            )[: self._num_top[index]]
            found[place] = TokenLogprobs(
                logprob=float(self._chosen[index]),
                top_ids=tuple(token_id for _, token_id in pairs),
                top_logprobs=tuple(value for value, _ in pairs),
            )
        return found


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy under way to pinned memory, or the values themselves on a CPU."""
    if values.device.type == "cpu":
        return values
    held = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return held.copy_(values, non_blocking=True)
