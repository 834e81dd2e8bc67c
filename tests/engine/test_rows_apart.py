# SPDX-License-Identifier: Apache-2.0
"""Decode rows beside a short prefill, computed apart: the same logits, each where it is looked for,
whichever rows sample. Here the device is the CPU and the decode graph is called, not captured."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.execution import device_launcher, rows_apart
from engine.execution.batch import ForwardBatch
from engine.execution.row_order import reordered
from kvtiers.layered_load import LayeredLoad
from tests.engine.test_prefill_pieces import _ids, _runner
from tests.fakes.paged_driver import PagedDriver

Parts = list[tuple[int, list[int]]]


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch_of(lens: list[int], past: list[int], sampled: list[int]) -> ForwardBatch:
    """Tokens, positions and slots that tell where they came from."""
    ends = torch.tensor([0, *lens]).cumsum(0).tolist()
    return ForwardBatch(
        step_id=1,
        input_ids=ints(list(range(ends[-1]))),
        positions=ints([1000 + i for i in range(ends[-1])]),
        slot_mapping=ints([2000 + i for i in range(ends[-1])]),
        row_indptr=ints(ends),
        row_slots=ints([10 + i for i in range(len(lens))]),
        seq_lens=ints([p + n for p, n in zip(past, lens, strict=True)]),
        sample_rows=ints(sampled),
        page_table=torch.empty(0),
        page_copies=torch.empty(0, 3),
    )


def test_both_parts_hold_the_rows_of_the_step_and_samples_find_their_logits() -> None:
    rng = random.Random(3)
    for _ in range(200):
        num_prefill, num_decode = rng.randrange(1, 4), rng.randrange(1, 5)
        lens = [rng.randrange(1, 9) for _ in range(num_prefill)] + [1] * num_decode
        past = [rng.randrange(50) for _ in lens]
        sampled = [row for row in range(len(lens)) if rng.random() < 0.6]
        batch = batch_of(lens, past, sampled)
        prefill, decode = rows_apart.part_rows(batch, num_prefill)
        for name in ("input_ids", "positions", "slot_mapping", "row_slots", "seq_lens"):
            both = torch.cat((getattr(prefill, name), getattr(decode, name)))
            assert torch.equal(both, getattr(batch, name)), name
        assert decode.row_indptr.tolist() == list(range(num_decode + 1))
        assert prefill.row_indptr.diff().tolist() == lens[:num_prefill]
        # Logits as the two parts leave them: decode row i at i, or where another order has it;
        # sampled prefill rows from 40 on.
        order = list(range(num_decode))
        rng.shuffle(order)
        plain = (decode, list(range(num_decode)))
        for now, rows in (plain, (reordered(decode, np.array(order)), order)):
            logits = {place: num_prefill + row for place, row in enumerate(rows)}
            logits |= {40 + place: row for place, row in enumerate(prefill.sample_rows.tolist())}
            places = rows_apart.places_apart(batch.sample_rows, num_prefill, 40, now.sample_rows)
            assert [logits[place] for place in places.tolist()] == sampled


def test_what_is_long_waits_for_pages_or_has_no_decode_rows_stays_together() -> None:
    def apart(lens: list[int], past: list[int]) -> bool:
        return rows_apart.are_better_apart(batch_of(lens, past, []), sum(n > 1 for n in lens))

    assert apart([800, 1, 1], [30_000, 5, 60_000])  # decode rows may be as long as they like
    assert apart([1024, 1], [31_744, 9])
    assert not apart([1024, 1], [31_745, 9])  # one pair of tokens more
    assert not apart([1025, 1], [0, 9])
    assert apart([500, 524, 1], [100, 100, 9]) and not apart([500, 525, 1], [100, 100, 9])
    assert not apart([800], [30_000])
    waits = batch_of([80, 1], [64, 9], [])
    object.__setattr__(waits, "loads", (LayeredLoad(3),))
    assert not rows_apart.are_better_apart(waits, 1)


@pytest.mark.parametrize("pieces", [False, True])
def test_apart_and_together_give_the_same_logits_and_the_same_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: bool
) -> None:
    together, apart = (_runner(tmp_path, pieces=pieces) for _ in range(2))
    drivers = [PagedDriver(runner, seed=1) for runner in (together, apart)]
    rows = [[driver.open(slot) for slot in (3, 0, 2, 1)] for driver in drivers]
    steps: list[tuple[Parts, list[int]]] = [
        ([(0, _ids(40, 1))], [0]),
        ([(1, _ids(120, 2)), (2, _ids(8, 3)), (0, [9])], [0, 1, 2]),
        ([(3, _ids(127, 4)), (0, [1]), (2, [4])], [1, 2]),  # a chunk in the middle of a prompt
        ([(3, _ids(20, 7)), (0, [1]), (1, [2]), (2, [3])], [0, 1, 3]),
        ([(1, _ids(5, 8)), (3, _ids(9, 9)), (0, [3])], []),
        ([(0, [4]), (1, [5]), (2, [6])], [0, 1, 2]),
    ]
    num_apart = 0

    def count_apart(batch: ForwardBatch, num_prefill: int) -> bool:
        nonlocal num_apart
        is_apart = rows_apart.are_better_apart(batch, num_prefill)
        num_apart += is_apart
        return is_apart

    for parts, sampled in steps:
        found = []
        for is_apart, driver, mine in zip((False, True), drivers, rows, strict=True):
            rule = count_apart if is_apart else (lambda batch, num_prefill: False)
            monkeypatch.setattr(device_launcher, "are_better_apart", rule)
            found.append(
                driver.step([(mine[place], list(t)) for place, t in parts], sample=sampled)
            )
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert num_apart == 4
    torch.testing.assert_close(apart.kv_pool[:-1], together.kv_pool[:-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pieces", [False, True])
def test_eager_runs_cut_steps_as_graphs_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: bool
) -> None:
    """Another cut is other kernels, so other bits on a device."""
    passes: tuple[list[tuple[str, int]], ...] = [], []
    drivers = []
    for eager, mine in zip((False, True), passes, strict=True):
        runner = _runner(tmp_path, pieces=pieces, eager=eager)
        drivers.append(PagedDriver(runner, seed=1))
        for name in ("forward", "forward_in_pieces"):
            real = getattr(runner._launcher._model, name)

            def counted(
                ids: torch.Tensor, *rest: Any, note: Any = mine, name: str = name, real: Any = real
            ) -> Any:
                note.append((name, len(ids)))
                return real(ids, *rest)

            monkeypatch.setattr(runner._launcher._model, name, counted)
    rows = [[driver.open(slot) for slot in range(4)] for driver in drivers]
    steps: list[Parts] = [
        [(0, _ids(40, 1))],
        [(1, _ids(30, 2)), (0, [5])],
        [(2, _ids(3, 3)), (3, _ids(64, 4)), (0, [6]), (1, [7])],
        [(0, _ids(20, 5)), (1, [8]), (2, [9])],
        [(0, [1]), (1, [2])],
    ]
    for parts in steps:
        captured, eager_run = (
            driver.step([(mine[place], list(tokens)) for place, tokens in parts])
            for driver, mine in zip(drivers, rows, strict=True)
        )
        assert torch.equal(captured, eager_run)
    assert passes[0] == passes[1]
    assert len(passes[0]) > len(steps)
