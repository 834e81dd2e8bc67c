# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of sampled tokens and of the likeliest ones.

They are the model's own: taken before temperature, penalties, bias, bans and grammar, so a token
that a grammar forced shows how unlikely the model found it. Does not know: how a token was chosen.
"""

from __future__ import annotations

import torch

from engine.api import TokenLogprobs


class LogprobRows:
    """The model's distribution for the rows that asked, kept before the logits are changed."""

    def __init__(self, logits: torch.Tensor, num_logprobs: list[int]) -> None:
        """`logits` [S, vocab] fp32; `num_logprobs` [S], -1 for rows that did not ask."""
        self._rows = [r for r, num in enumerate(num_logprobs) if num >= 0]
        self._num = num_logprobs
        self._logprobs = torch.log_softmax(logits[self._rows], dim=-1) if self._rows else None

    def gather(self, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        """By row: its token's log-probability and the likeliest ids; failed rows are left out."""
        result: dict[int, TokenLogprobs] = {}
        if self._logprobs is None:
            return result
        for index, row in enumerate(self._rows):
            if token_ids[row] >= 0:
                result[row] = _one(self._logprobs[index], token_ids[row], self._num[row])
        return result


def _one(logprobs: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    chosen = float(logprobs[token_id])
    if num_top == 0:
        return TokenLogprobs(logprob=chosen)
    top = torch.topk(logprobs, min(num_top, logprobs.numel()))
    # topk leaves the order of equals open; the lower id goes first.
    pairs = sorted(
        zip(top.values.tolist(), top.indices.tolist(), strict=True), key=lambda p: (-p[0], p[1])
    )
    return TokenLogprobs(
        logprob=chosen,
        top_ids=tuple(token_id for _, token_id in pairs),
        top_logprobs=tuple(value for value, _ in pairs),
    )
