# SPDX-License-Identifier: Apache-2.0
"""Launches and registration of draws. Does not know: the insides (draw_rows.py).

Grids and constants follow from shapes alone, so a launch may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel
from kernels.sizes import cdiv, next_power_of_2
from kernels.triton.draw_rows import (
    PASSES,
    TRIALS,
    draw_choose_kernel,
    draw_masses_kernel,
    draw_peaks_kernel,
    draw_search_kernel,
    draw_weights_kernel,
)
from kernels.triton.mla import use_pdl

PIECES = 32  # programs of a row
MIN_BLOCK = 128


@register_kernel(
    "draw_tokens",
    "triton_search",
    priority=Priority.PERFORMANT,
    device="cuda",
    formats={"logits": {"fp32"}},
)
def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    chance: torch.Tensor,
    pieces: int = PIECES,
) -> torch.Tensor:
    """Sixteen launches; scratch of 0.5 MB a row. Passes of a cut that no row has end at once."""
    num, vocab = logits.shape
    block = max(MIN_BLOCK, min(1024, next_power_of_2(cdiv(vocab, pieces))))
    steps = cdiv(vocab, pieces * block)
    passes, trials = PASSES.value, TRIALS.value

    def scratch(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(num, *shape, dtype=dtype, device=logits.device)

    peaks, places = scratch(torch.float32, pieces), scratch(torch.int32, pieces)
    weights = scratch(torch.float32, pieces * steps * block)
    k_sums, p_sums = (scratch(torch.float64, passes, pieces, trials) for _ in range(2))
    k_lows, p_lows = (scratch(torch.int32, passes + 1) for _ in range(2))
    least, masses = scratch(torch.float32), scratch(torch.float64, pieces)
    out = scratch(torch.int32)
    pdl = use_pdl(logits.device)
    sizes = {"PIECES": pieces, "BLOCK": block, "STEPS": steps, "USE_PDL": pdl, "num_warps": 4}
    sizes |= {"launch_pdl": True} if pdl else {}
    grid, stride = (num, pieces), logits.stride(0)
    cuts = (k_sums, k_lows, p_sums, p_lows)
    draw_peaks_kernel[grid](logits, peaks, places, vocab, stride, **sizes)
    draw_weights_kernel[grid](logits, temperature, peaks, weights, vocab, stride, **sizes)
    for by_count in (True, False):
        for number in range(passes):
            draw_search_kernel[grid](
                temperature,
                top_k,
                top_p,
                peaks,
                weights,
                *cuts,
                vocab,
                number,
                BY_COUNT=by_count,
                **sizes,
            )
    draw_masses_kernel[grid](
        temperature, top_k, top_p, min_p, peaks, weights, *cuts, least, masses, vocab, **sizes
    )
    draw_choose_kernel[(num,)](
        temperature, chance, peaks, places, weights, least, masses, out, **sizes
    )
    return out
