# SPDX-License-Identifier: Apache-2.0
"""Child of test_triton_kernels.py: sampling kernels with TRITON_INTERPRET=1, on a CPU."""

from __future__ import annotations

import sys

import numpy as np
import torch

from engine.execution import device_sampler as sampler
from engine.sampling.params import RowSampling, SampleBatch
from kernels.reference import draw as reference_draw
from kernels.reference import edit as reference_edit
from tests.fakes.sampling_cases import ROWS, draw_case, edit_case


def check_draw(vocab: int, spread: float, pieces: int) -> None:
    from kernels.triton.draw import draw_tokens

    case = draw_case(vocab, spread, vocab)
    found = draw_tokens(*case, pieces=pieces)
    assert found.tolist() == reference_draw.draw_tokens(*case).tolist()


def check_broken_rows() -> None:
    from kernels.triton.draw import draw_tokens

    logits, *rest = draw_case(130, 1.0, 1)
    logits[1, 5], logits[3, 6], logits[5] = float("nan"), float("inf"), float("-inf")
    found = draw_tokens(logits, *rest, pieces=2).tolist()
    assert [place for place, token in enumerate(found) if token < 0] == [1, 3, 5]


def check_chance_at_the_ends() -> None:
    from kernels.triton.draw import draw_tokens

    logits, temperature, top_k, top_p, min_p, _ = draw_case(130, 2.0, 2)
    for chance in (0.0, 1 - 2**-53):
        chances = torch.full((len(ROWS),), chance, dtype=torch.float64)
        case = (logits, temperature, top_k, top_p, min_p, chances)
        assert draw_tokens(*case, pieces=2).tolist() == reference_draw.draw_tokens(*case).tolist()


def check_ties_at_a_cut() -> None:
    from kernels.triton.draw import draw_tokens

    logits = torch.zeros(len(ROWS), 96)
    logits[:, [4, 40, 70]] = 3.0
    _, temperature, _, _, min_p, _ = draw_case(96, 1.0, 3)
    for k, p in ((2, 1.0), (0, 0.2)):
        for chance in (0.1, 0.5):
            case = (
                logits,
                torch.ones_like(temperature),
                torch.full((len(ROWS),), k, dtype=torch.int32),
                torch.full((len(ROWS),), p),
                torch.zeros_like(min_p),
                torch.full((len(ROWS),), chance, dtype=torch.float64),
            )
            found = draw_tokens(*case, pieces=2).tolist()
            assert found == reference_draw.draw_tokens(*case).tolist()
            assert set(found) <= {4, 40, 70}


def check_smallest_nuclei() -> None:
    """A nucleus holds the likeliest token, also where fp32 has no such share."""
    from kernels.triton.draw import draw_tokens

    shares = (5e-324, 1e-46, 1e-30, 1e-6)
    rows = [RowSampling(temperature=1.5, top_p=share, seed=9) for share in shares]
    slots = np.arange(len(rows))
    batch = SampleBatch(rows=rows, slots=slots, positions=slots)
    numbers = np.zeros((sampler.NUM_PARAMS, len(rows)))
    sampler.fill_params(numbers, batch, slots, slots, len(rows))
    params = torch.from_numpy(numbers)
    logits = torch.randn(len(rows), 130, generator=torch.Generator().manual_seed(4))
    found = draw_tokens(
        logits,
        params[sampler.TEMPERATURE].float(),
        params[sampler.TOP_K].int(),
        params[sampler.TOP_P].float(),
        params[sampler.MIN_P].float(),
        params[sampler.CHANCE],
        pieces=2,
    )
    assert found.tolist() == logits.argmax(dim=-1).tolist()


def check_edit(vocab: int) -> None:
    from kernels.triton.edit_rows import edit_rows

    logits, edits = edit_case(vocab, vocab)
    logits[4, 3] = float("nan")
    found, is_sound = edit_rows(logits, edits)
    wanted, was_sound = reference_edit.edit_rows(logits, edits)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert is_sound.tolist() == was_sound.tolist() == [False, True, True, True]


CHECKS = {
    "spread": lambda: check_draw(400, 3.0, 4),
    "long_pieces": lambda: check_draw(1500, 3.0, 1),
    "flat": lambda: check_draw(150, 0.2, 2),
    "broken": check_broken_rows,
    "ends": check_chance_at_the_ends,
    "ties": check_ties_at_a_cut,
    "smallest_nuclei": check_smallest_nuclei,
    "edit": lambda: check_edit(333),
}


def main() -> None:
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(f"ok {name}")


if __name__ == "__main__":
    main()
