# SPDX-License-Identifier: Apache-2.0
"""Sampling kernels on a GPU against their references, at the size of a real vocabulary."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from kernels.ops.draw import draw_tokens
from kernels.ops.edit import edit_rows
from kernels.selection import override
from tests.fakes.sampling_cases import ROWS, draw_case, edit_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
_VOCAB = 102400


@pytest.mark.parametrize("spread", [4.0, 1.0, 0.1])
def test_draws_are_those_of_the_reference(spread: float) -> None:
    """Sums differ in their order: a chance within 1e-6 of an edge may fall on its other side."""
    wrong = 0
    for seed in range(8):
        case = tuple(part.cuda() for part in draw_case(_VOCAB, spread, seed))
        found = {}
        for name in ("reference", "triton_search"):
            with override("draw_tokens", name):
                found[name] = draw_tokens(*case)
        wrong += int((found["reference"] != found["triton_search"]).sum())
    assert wrong <= 1, f"{wrong} of {8 * len(ROWS)} draws"


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    case = tuple(part.cuda() for part in draw_case(_VOCAB, 1.0, 5))
    with override("draw_tokens", "triton_search"):
        together = draw_tokens(*case).tolist()
        alone = [
            draw_tokens(*(part[row : row + 1] for part in case)).item() for row in range(len(ROWS))
        ]
    assert alone == together


def test_edits_are_those_of_the_reference() -> None:
    logits, edits = edit_case(_VOCAB, 3)
    on_gpu = replace(edits, **{f.name: getattr(edits, f.name).cuda() for f in fields(edits)})
    logits[4, 3] = float("nan")
    found = {}
    for name in ("reference", "triton"):
        with override("edit_rows", name):
            found[name] = edit_rows(logits.cuda(), on_gpu)
    for mine, wanted in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
