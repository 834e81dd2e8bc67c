# SPDX-License-Identifier: Apache-2.0
"""Prefill rows of few tokens attend in absorbed form: what the definition gives, beside rows in
the other form and decode rows, in paged KV of both kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu.prefill_layer import LayerSizes, PrefillLayers
from engine.execution.device_runner import DeviceModelRunner
from engine.layers import mla_prefill
from kernels import mla_workspace
from kernels.fixed_order import FIXED_ORDER
from kernels.ops.mla_prefill_form import absorbs_prefill
from kernels.selection import override
from kernels.step_work import StepWork
from tests.fakes.attention_by_hand import attention_by_hand
from tests.fakes.device_runner import device_runner, tiny_config
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import VOCAB_SIZE, write_tiny_deepseek


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def few_are_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with numbers of this file's steps."""
    monkeypatch.setattr(
        mla_prefill,
        "absorbs_prefill",
        lambda new, cached, *_: [n <= 20 and c >= 30 for n, c in zip(new, cached, strict=True)],
    )


_SIZES = LayerSizes(
    num_heads=2,
    nope_dim=6,
    rope_dim=4,
    v_dim=5,
    latent_dim=128,
    dtype=torch.float32,
    device="cpu",
)


def _step(specs: list[tuple[int, int]], kv: str) -> PrefillLayers:
    return PrefillLayers(specs, kv, _SIZES)


_NEW = [*range(1, 21), 33, 96]


@pytest.mark.parametrize("kv", ["plain", "fp8"])
@pytest.mark.parametrize("past", [0, 63, 64, 1000, 5000])
def test_absorbed_rows_see_their_prefix_and_themselves(past: int, kv: str) -> None:
    for new in _NEW if past < 5000 else (1, 7, 8, 9, 33, 96):
        step = _step([(past, new)], kv)
        with override("mla_prefill_form", "absorbed"):
            found = step.run()
        torch.testing.assert_close(found.double(), attention_by_hand(step), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv", ["plain", "fp8"])
def test_both_forms_write_the_same_latents(kv: str) -> None:
    pools = []
    for form in ("absorbed", "expanded"):
        step = _step([(70, 20), (5, 90)], kv)
        with override("mla_prefill_form", form):
            step.run()
        pools.append(step.pools[0])
    torch.testing.assert_close(*pools, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kv", ["plain", "fp8"])
@pytest.mark.parametrize(
    "specs",
    [
        [(200, 9), (0, 40), (64, 20), (31, 1), (100, 21), (29, 3)],
        [(0, 40), (7, 30), (64, 8)],
        [(64, 8), (0, 40), (7, 30)],
        [(64, 8), (90, 17)],
    ],
)
def test_rows_of_both_forms_share_a_step(
    few_are_absorbed: None, specs: list[tuple[int, int]], kv: str
) -> None:
    step = _step(specs, kv)
    found = step.run()
    torch.testing.assert_close(found.double(), attention_by_hand(step), rtol=1e-4, atol=1e-5)
    room = torch.full((found.shape[0] + 2, found.shape[1]), float("nan"))
    given = step.run(out=room[1:-1])
    assert given.data_ptr() == room[1:].data_ptr()
    assert torch.equal(room[1:-1], found)
    assert bool(room[[0, -1]].isnan().all())


def test_layers_share_a_step_and_read_their_own_latents(few_are_absorbed: None) -> None:
    """What the first layer made for all of them holds nothing of its own."""
    specs = [(200, 9), (0, 40)]
    steps = [_step(specs, "fp8") for _ in range(2)]
    steps[1].q, steps[1].kv = steps[1].q * 0.5, steps[1].kv.flip(0)
    work = StepWork()
    for step in steps:
        found = step.run(work=work)
        torch.testing.assert_close(found.double(), attention_by_hand(step), rtol=1e-4, atol=1e-5)


def test_a_short_row_is_not_read_before_its_own_tokens_are_written() -> None:
    """A decode kernel may begin early as far as a step writes few tokens of a row; here, it may
    not: on a GPU it would read what the kernel in front is still to write."""
    workspaces = []
    make = mla_workspace.make_mla_workspace

    def recorded(**sizes: Any) -> mla_workspace.MlaWorkspace:
        workspaces.append(make(**sizes))
        return workspaces[-1]

    step = _step([(200, 30), (64, 1)], "plain")
    with (
        mock.patch.object(mla_prefill, "make_mla_workspace", recorded),
        override("mla_prefill_form", "absorbed"),
    ):
        step.run()
    assert [workspace.may_start_early for workspace in workspaces] == [False, False]
    assert make(max_rows=1, num_heads=1, q_len=1, device="cpu").may_start_early


def test_where_nothing_was_measured_every_row_is_expanded() -> None:
    step = _step([(5000, 3)], "plain")
    assert absorbs_prefill([3], [5000], step.q, step.pools[0], step.weights.w_uk) == [False]
    with override("mla_prefill_form", "absorbed"):
        assert absorbs_prefill([3], [5000], step.q, step.pools[0], step.weights.w_uk) == [True]
    assert FIXED_ORDER["mla_prefill_form"] == "expanded"  # engine.deterministic


def _runner(directory: Path, *, pieces: bool) -> DeviceModelRunner:
    write_tiny_deepseek(directory)
    config = tiny_config(directory, page_size=16, num_pages=160, max_slots=5)
    return device_runner(config, prefill_graphs=pieces, max_tokens=300)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_model_gives_the_same_logits_in_both_forms(
    tmp_path: Path, few_are_absorbed: None, monkeypatch: pytest.MonkeyPatch, pieces: bool
) -> None:
    mixed = _runner(tmp_path, pieces=pieces)
    drivers = [PagedDriver(runner, seed=1) for runner in (_runner(tmp_path, pieces=pieces), mixed)]
    rows = [[driver.open(slot) for slot in (3, 0, 2, 1, 4)] for driver in drivers]
    generator = torch.Generator().manual_seed(1)

    def ids(num: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (num,), generator=generator).tolist()

    absorbed: list[list[bool]] = []
    chosen: Callable[..., list[bool]] = vars(mla_prefill)["absorbs_prefill"]

    def recorded(*args: Any) -> list[bool]:
        forms: list[bool] = chosen(*args)
        absorbed.append(forms)
        return forms

    steps: list[list[tuple[int, list[int]]]] = [
        [(0, ids(40)), (1, ids(35))],
        [(0, ids(9)), (2, ids(31))],  # both forms
        [(1, ids(1)), (0, ids(20)), (2, ids(3)), (3, ids(2))],
        [(3, ids(60)), (0, ids(5)), (1, [1]), (2, [2])],  # decode rows beside them
        [(0, [1]), (1, [2]), (3, [3])],
        [(0, ids(2)), (1, [4])],
    ]
    for step in steps:
        found = []
        for driver, mine, choose in zip(drivers, rows, (None, recorded), strict=True):
            with monkeypatch.context() as patch:
                if choose is None:
                    patch.setattr(
                        mla_prefill, "absorbs_prefill", lambda new, *_: [False] * len(new)
                    )
                else:
                    patch.setattr(mla_prefill, "absorbs_prefill", choose)
                found.append(driver.step([(mine[place], list(tokens)) for place, tokens in step]))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert absorbed == [
        [False, False],
        [True, False],
        [True, True, True, False],
        [False, True],
        [True],
    ]
    assert math.isfinite(float(found[1].sum()))
