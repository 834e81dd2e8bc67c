# SPDX-License-Identifier: Apache-2.0
"""The sampler against distributions and penalties worked out independently, in plain numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.sampling.params import RowSampling, SampleBatch, Sampled, philox4x32, uniform
from engine.sampling.penalties import Penalties
from engine.sampling.sampler import draw, sample

VOCAB = 50
NUM_DRAWS = 6_000


def run(
    logits: torch.Tensor,
    rows: Sequence[RowSampling],
    positions: Sequence[int] | None = None,
    bitmask: np.ndarray | None = None,
) -> Sampled:
    batch = SampleBatch(
        rows=rows,
        slots=np.arange(len(rows)),
        positions=np.array(positions if positions is not None else [0] * len(rows)),
        bitmask=bitmask,
    )
    batch.mask_ready.set()
    return sample(logits.clone(), batch)


def draw_many(logits: np.ndarray, num: int = NUM_DRAWS, **params: float) -> np.ndarray:
    """Counts per id of `num` draws of one row: same seed, positions 0, 1, 2, ..."""
    counts = np.zeros(len(logits), dtype=np.int64)
    size = 500
    row = torch.from_numpy(logits.astype(np.float32))
    for start in range(0, num, size):
        rows = [RowSampling(seed=1234, **params) for _ in range(size)]  # type: ignore[arg-type]
        result = run(row.repeat(size, 1), rows, range(start, start + size))
        counts += np.bincount(result.token_ids, minlength=len(logits))
    return counts


def expected(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """The distribution, from the definitions of the parameters, by sorting python floats."""
    scaled = [x / temperature for x in logits.tolist()]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = set(order[: top_k or len(order)])
    total = sum(weights[i] for i in kept)
    if top_p < 1.0:
        nucleus: set[int] = set()
        mass = 0.0
        for i in order:
            if i in kept and mass < top_p * total:
                nucleus.add(i)
                mass += weights[i]
        kept = nucleus
    kept = {i for i in kept if weights[i] >= min_p}
    total = sum(weights[i] for i in kept)
    return np.array([weights[i] / total if i in kept else 0.0 for i in range(len(weights))])


def chi_square_bound(degrees: int) -> float:
    """The 99.99 % quantile, by Wilson and Hilferty's approximation."""
    z = 3.719
    return float(degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.5, "top_k": 10, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_that_the_parameters_define(
    params: dict[str, float],
) -> None:
    logits = np.random.default_rng(7).normal(0, 1.5, VOCAB)
    want = expected(logits, **params)  # type: ignore[arg-type]
    counts = draw_many(logits, **params)
    assert counts[want == 0].sum() == 0, "a token outside the cut was drawn"
    inside = want > 0
    expected_counts = want[inside] * NUM_DRAWS
    statistic = float(((counts[inside] - expected_counts) ** 2 / expected_counts).sum())
    assert statistic < chi_square_bound(int(inside.sum()) - 1)


def test_a_top_p_cut_beyond_the_candidates_equals_the_one_over_the_whole_vocabulary() -> None:
    logits = np.random.default_rng(3).normal(0, 0.2, 3000)  # flat: 0.9 needs over 2000 tokens
    want = expected(logits, top_p=0.9)
    drawn = draw_many(logits, num=4000, temperature=1.0, top_p=0.9)
    assert (want > 0).sum() > 2000
    assert drawn[want == 0].sum() == 0
    edge = np.argsort(-want)[: int((want > 0).sum())][1500:]
    assert drawn[edge].sum() > 0, "the far end of the nucleus is reachable"


def test_greedy_rows_take_the_lowest_id_of_the_likeliest_whatever_else_is_set() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [7, 3]] = 5.0
    logits[1, 9] = 1.0
    rows = [RowSampling(top_k=3, top_p=0.1), RowSampling(temperature=1e-9, seed=5)]
    assert run(logits, rows).token_ids.tolist() == [3, 9]


def test_what_a_row_draws_does_not_depend_on_the_rows_beside_it() -> None:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(8, 2000, generator=generator) * 2
    rows = [
        RowSampling(temperature=0.7 + 0.1 * i, seed=100 + i, top_k=(0, 5, 700)[i % 3], top_p=top_p)
        for i, top_p in enumerate((1.0, 0.9, 0.5, 0.99, 1.0, 0.2, 0.95, 0.8))
    ]
    together = [run(logits, rows, [position] * 8).token_ids.tolist() for position in range(20)]
    for position in range(20):
        alone = [
            int(run(logits[i : i + 1], rows[i : i + 1], [position]).token_ids[0]) for i in range(8)
        ]
        assert alone == together[position]
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    shuffled = run(logits[order], [rows[i] for i in order], [3] * 8).token_ids.tolist()
    assert shuffled == [together[3][i] for i in order]


def test_one_seed_gives_the_same_tokens_again_and_another_gives_others() -> None:
    logits = torch.zeros(30, VOCAB)

    def tokens(seed: int) -> list[int]:
        rows = [RowSampling(temperature=1.0, seed=seed) for _ in range(30)]
        return run(logits, rows, range(30)).token_ids.tolist()

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(2**63 - 1) != tokens(2**31 - 1)
    assert len(set(tokens(5))) > 10, "positions draw independently"


def test_ties_at_a_top_k_cut_are_all_kept() -> None:
    logits = np.zeros(VOCAB)
    logits[[4, 8, 15]] = 3.0
    counts = draw_many(logits, num=2000, temperature=1.0, top_k=2)
    assert set(np.flatnonzero(counts)) == {4, 8, 15}


def test_penalties_have_their_hand_computed_values() -> None:
    row = np.array([2.0, -1.0, 0.5, 3.0, -2.0, 1.0], dtype=np.float32)
    penalties = Penalties(
        repetition=2.0,
        presence=0.25,
        frequency=0.5,
        prompt_ids=np.array([0, 1], dtype=np.int32),
        output_ids=np.array([3, 3, 4], dtype=np.int32),
    )
    penalties.apply(row)
    # seen {0, 1, 3, 4}: halved if positive, doubled if negative; output 3 twice, 4 once
    assert row.tolist() == [1.0, -2.0, 0.5, 1.5 - 1.0 - 0.25, -4.0 - 0.5 - 0.25, 1.0]
    penalties.add(2)
    row = np.array([2.0, -1.0, 0.5, 3.0, -2.0, 1.0], dtype=np.float32)
    penalties.apply(row)
    assert row.tolist() == [1.0, -2.0, 0.25 - 0.5 - 0.25, 0.25, -4.75, 1.0]


def test_a_frequency_penalty_makes_a_greedy_row_go_round() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    penalties = Penalties(
        repetition=1.0,
        presence=0.0,
        frequency=0.15,
        prompt_ids=np.empty(0, dtype=np.int32),
        output_ids=np.empty(0, dtype=np.int32),
    )
    rows = [RowSampling(penalties=penalties)]
    # 0 is 1 - .15 * n0, 1 is .9 - .15 * n1
    assert [int(run(logits, rows, [i]).token_ids[0]) for i in range(5)] == [0, 1, 0, 1, 0]


def test_bias_bans_and_min_new_tokens_act_on_their_row_only() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 1] = 4.0
    rows = [
        RowSampling(bias_ids=np.array([2]), bias=np.array([5.0], dtype=np.float32)),
        RowSampling(banned_ids=np.array([1, 0])),
        RowSampling(stop_ids=np.array([1]), min_new_tokens=3),
        RowSampling(),
    ]
    assert run(logits, rows, [0, 0, 2, 0]).token_ids.tolist() == [2, 2, 0, 1]
    assert run(logits, rows, [0, 0, 3, 0]).token_ids.tolist() == [2, 2, 1, 1]


def test_a_bitmask_confines_greedy_and_random_rows() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 1] = 9.0
    bitmask = np.full((3, 2), -1, dtype=np.int32)
    bitmask[0] = [1 << 5, 0]
    bitmask[1] = [0, 1 << 2]  # id 34
    rows = [RowSampling(), RowSampling(temperature=1.0, seed=1), RowSampling()]
    assert run(logits, rows, bitmask=bitmask).token_ids.tolist() == [5, 34, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_nan_infinite_or_fully_masked_logits_fail_alone(temperature: float) -> None:
    logits = torch.zeros(5, VOCAB)
    logits[:, 3] = 2.0
    logits[1, 40] = torch.nan
    logits[2, 41] = torch.inf
    logits[3] = -torch.inf
    logits[4, 10:] = -torch.inf  # a model may forbid tokens
    rows = [RowSampling(temperature=temperature, top_k=1, seed=1) for _ in range(5)]
    assert run(logits, rows).token_ids.tolist() == [3, -1, -1, -1, 3]


def test_a_mask_does_not_hide_a_nan() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 40] = torch.nan
    bitmask = np.array([[1 << 5, 0]], dtype=np.int32)
    assert run(logits, [RowSampling()], bitmask=bitmask).token_ids.tolist() == [-1]


def test_logprobs_are_the_models_own_before_temperature_and_masks() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 5.0, 0.0]])
    rows = [
        RowSampling(num_logprobs=2, banned_ids=np.array([3])),
        RowSampling(),
        RowSampling(num_logprobs=0, temperature=0.01, seed=1),
    ]
    result = run(logits, rows)
    log_total = math.log(sum(math.exp(x) for x in (1, 2, 3, 4)))
    assert sorted(result.logprobs) == [0, 2]
    first = result.logprobs[0]
    assert result.token_ids[0] == 2
    assert first.logprob == pytest.approx(3 - log_total, abs=1e-6)
    assert first.top_ids == (3, 2)
    assert first.top_logprobs == pytest.approx((4 - log_total, 3 - log_total), abs=1e-6)
    log_total = math.log(2 * math.e + math.exp(5) + 1)
    assert result.logprobs[2].logprob == pytest.approx(5 - log_total, abs=1e-6)
    assert result.logprobs[2].top_ids == ()


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], want: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == want


def test_uniforms_are_uniform() -> None:
    numbers = np.array([uniform(42, position) for position in range(20_000)])
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert float(((counts - 400) ** 2 / 400).sum()) < chi_square_bound(49)


def test_a_draw_at_either_end_falls_on_a_token_that_may_be_drawn() -> None:
    row = RowSampling(temperature=1.0)
    for vocab_size in (5, 256, 700, 1024):
        values = np.full(vocab_size, -np.inf, dtype=np.float32)
        values[[1, 3]] = [0.1, 0.3]
        for chance, token_id in ((0.0, 1), (1 - 2**-53, 3), (1.0, 3)):
            assert draw(values, 0.3, row, chance) == token_id
