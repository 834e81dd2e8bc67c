# SPDX-License-Identifier: Apache-2.0
"""A router's scores of many tokens by the tensor cores, nearly as exact as in fp32.

An fp32 number is the sum of three bf16 ones (24 bits are three times eight), and products of bf16
numbers are exact in fp32. So bf16 rows times the router's three terms, all in one product, are the
scores but for what the tensor cores cut from their sums: 5e-4 at most where scores spread by 45
and are sums of 2,048 products. The fp32 units take four times as long. Does not know: the choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

NUM_TERMS = 3
_terms_of: Any = WeakTensorKeyDictionary()


def router_terms(router: torch.Tensor) -> torch.Tensor:
    """bf16 [3 * E, X], the largest terms of all experts first; they sum to the router.

    Args:
        router: fp32 [E, X], never written to afterwards. Exact where a last bit is at least
            2^-133, the least that bf16 holds.
    """
    terms = _terms_of.get(router)
    if terms is None:
        rest, parts = router, []
        for _ in range(NUM_TERMS):
            parts.append(rest.to(torch.bfloat16))
            rest = rest - parts[-1].float()
        terms = torch.cat(parts)
        # What a graph captures holds nothing before a replay, so it is that graph's alone.
        if not _is_captured(router):
            _terms_of[router] = terms
    return terms


def _is_captured(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def scores_of_terms(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """fp32 [T, 3 * E]: what each term adds to the scores of x, bf16 [T, X] on a GPU."""
    terms = router_terms(router).T
    return torch.mm(x, terms, out_dtype=torch.float32)
