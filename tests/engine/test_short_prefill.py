# SPDX-License-Identifier: Apache-2.0
"""Prefill rows of few tokens attend in absorbed form: what the definition gives, beside rows in
the other form and decode rows, in paged KV of both kinds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.execution.device_runner import DeviceModelRunner
from engine.execution.model_loading import load_model
from engine.layers import mla_prefill
from engine.layers.mla_weights import INNER_EPS, MlaWeights
from engine.models.model import StepRows
from kernels.fixed_order import FIXED_ORDER
from kernels.latent_planes import decode_rows, latent_planes, row_bytes
from kernels.ops.mla_prefill_form import absorbs_prefill
from kernels.selection import override
from kernels.step_work import StepWork
from kvtiers.device_pool import DevicePool
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import VOCAB_SIZE, write_tiny_deepseek

_H, _N, _R, _V, _C, _PAGE = 2, 6, 4, 5, 128, 64
_SCALE = 0.21


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


class _Step:
    """Rows (cached, new) over shuffled pages. What no token owns is NaN."""

    def __init__(self, specs: list[tuple[int, int]], kv: str) -> None:
        generator = torch.Generator().manual_seed(sum(past + new for past, new in specs))

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.specs = specs
        lens = [past + new for past, new in specs]
        most = max(-(-length // _PAGE) for length in lens) + 1
        num_pages = len(specs) * most + 1
        order = torch.randperm(num_pages, generator=generator)
        self.table = order[: len(specs) * most].view(-1, most).to(torch.int32)
        if kv == "fp8":
            width = _PAGE * row_bytes(_C, _R)
            self.pool = torch.full((num_pages, 2, width), 0xFF, dtype=torch.uint8)[:, 1]
        else:
            self.pool = torch.full((num_pages, 2, _PAGE, _C + _R), float("nan"))[:, 1]
        angles = torch.arange(max(lens))[:, None] * torch.tensor([1.0, 0.1])
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.weights = MlaWeights(
            q_kv_down=torch.empty(0),
            q_norm=None,
            q_up=None,
            kv_norm=torch.rand(_C, generator=generator) + 0.5,
            w_uk=draw(_H, _N, _C) * 0.3,
            w_uv=draw(_H, _V, _C) * 0.3,
            out=torch.empty(0),
        )
        for row, (past, _) in enumerate(specs):
            if past:
                self._write(row, past, draw(past, _C + _R))
        news = torch.tensor([new for _, new in specs])
        num = int(news.sum())
        # Views with gaps, as a fused projection leaves them.
        self.q = draw(num, _H * (_N + _R) + 3)[:, :-3].view(num, _H, _N + _R)
        self.kv = draw(num, _C + _R + 2)[:, :-2]
        places = [
            (row, at) for row, (past, new) in enumerate(specs) for at in range(past, past + new)
        ]
        slots, positions = torch.tensor(places).T
        pages = self.table[slots, positions // _PAGE]
        self.rows = StepRows(
            positions=positions.to(torch.int32),
            slot_mapping=(pages * _PAGE + positions % _PAGE).to(torch.int32),
            row_indptr=torch.cat((torch.zeros(1, dtype=torch.int32), news.cumsum(0))).to(
                torch.int32
            ),
            row_slots=torch.arange(len(specs), dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            page_table=self.table,
            page_size=_PAGE,
            num_prefill_rows=len(specs),
            num_prefill_tokens=num,
        )

    def _write(self, row: int, num: int, kv: torch.Tensor) -> None:
        from kernels.reference.mla_kv_write import mla_kv_write

        at = torch.arange(num)
        where = self.table[row, at // _PAGE] * _PAGE + at % _PAGE
        positions = at.to(torch.int32)
        gain = self.weights.kv_norm
        mla_kv_write(
            torch.zeros(num, 1, _R),
            kv,
            gain,
            INNER_EPS,
            positions,
            self.cos_sin,
            self.pool,
            where.to(torch.int32),
        )

    def run(self, out: torch.Tensor | None = None) -> torch.Tensor:
        return mla_prefill.prefill_values(
            self.q.clone(),
            self.kv,
            self.weights,
            self.rows,
            self.pool,
            self.cos_sin,
            _SCALE,
            StepWork(),
            out,
        )

    def by_hand(self) -> torch.Tensor:
        """Each query alone in float64, from the definition, over what the pool now holds."""
        out = []
        first = 0
        w_uk, w_uv = self.weights.w_uk.double(), self.weights.w_uv.double()
        for row, (past, new) in enumerate(self.specs):
            pages = self.table[row].long()
            if self.pool.dtype == torch.uint8:
                held = decode_rows(latent_planes(self.pool, _C, _R), pages, torch.float32)
            else:
                held = self.pool[pages]
            latents = held.flatten(0, 1)[: past + new].double()
            keys_HLN = torch.einsum("lc,hnc->hln", latents[:, :_C], w_uk)
            values_HLV = torch.einsum("lc,hvc->hlv", latents[:, :_C], w_uv)
            for at in range(new):
                q_HD = self.q[first + at].double()
                seen = past + at + 1
                cos, sin = self.cos_sin[past + at].double().chunk(2)
                low, high = q_HD[:, _N:].chunk(2, dim=-1)
                turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
                scores = torch.einsum("hln,hn->hl", keys_HLN[:, :seen], q_HD[:, :_N])
                scores += turned @ latents[:seen, _C:].T
                p_HL = (scores * _SCALE).softmax(-1)
                out.append(torch.einsum("hl,hlv->hv", p_HL, values_HLV[:, :seen]).flatten())
            first += new
        return torch.stack(out)


_NEW = [*range(1, 21), 33, 96]


@pytest.mark.parametrize("kv", ["plain", "fp8"])
@pytest.mark.parametrize("past", [0, 63, 64, 1000, 5000])
def test_absorbed_rows_see_their_prefix_and_themselves(past: int, kv: str) -> None:
    for new in _NEW if past < 5000 else (1, 7, 8, 9, 33, 96):
        step = _Step([(past, new)], kv)
        with override("mla_prefill_form", "absorbed"):
            found = step.run()
        torch.testing.assert_close(found.double(), step.by_hand(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv", ["plain", "fp8"])
def test_both_forms_write_the_same_latents(kv: str) -> None:
    pools = []
    for form in ("absorbed", "expanded"):
        step = _Step([(70, 20), (5, 90)], kv)
        with override("mla_prefill_form", form):
            step.run()
        pools.append(step.pool.view(torch.uint8) if kv == "fp8" else step.pool)
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
    step = _Step(specs, kv)
    found = step.run()
    torch.testing.assert_close(found.double(), step.by_hand(), rtol=1e-4, atol=1e-5)
    room = torch.full((found.shape[0] + 2, found.shape[1]), float("nan"))
    given = step.run(room[1:-1])
    assert given.data_ptr() == room[1:].data_ptr()
    assert torch.equal(room[1:-1], found)
    assert bool(room[[0, -1]].isnan().all())


def test_layers_share_a_step_and_read_their_own_latents(few_are_absorbed: None) -> None:
    """What the first layer made for all of them holds nothing of its own."""
    specs = [(200, 9), (0, 40)]
    steps = [_Step(specs, "fp8") for _ in range(2)]
    steps[1].q, steps[1].kv = steps[1].q * 0.5, steps[1].kv.flip(0)
    work = StepWork()
    for step in steps:
        found = mla_prefill.prefill_values(
            step.q.clone(),
            step.kv,
            step.weights,
            step.rows,
            step.pool,
            step.cos_sin,
            _SCALE,
            work,
        )
        torch.testing.assert_close(found.double(), step.by_hand(), rtol=1e-4, atol=1e-5)


def test_where_nothing_was_measured_every_row_is_expanded() -> None:
    step = _Step([(5000, 3)], "plain")
    assert absorbs_prefill([3], [5000], step.q, step.pool, step.weights.w_uk) == [False]
    with override("mla_prefill_form", "absorbed"):
        assert absorbs_prefill([3], [5000], step.q, step.pool, step.weights.w_uk) == [True]
    assert FIXED_ORDER["mla_prefill_form"] == "expanded"  # engine.deterministic


def _runner(directory: Path, *, pieces: bool) -> DeviceModelRunner:
    write_tiny_deepseek(directory)
    config = EngineConfig(
        model=str(directory),
        load_format="dummy",
        dtype="float32",
        device="cpu",
        num_threads=1,
        page_size=16,
        max_context_len=512,
    )
    loaded = load_model(config)
    runner = DeviceModelRunner(
        loaded.model,
        DevicePool(loaded.model.kv_layout(16, "float32"), 161, torch.device("cpu")),
        max_slots=5,
        max_rows=5,
        max_tokens=300,
        max_context_len=512,
        model_fingerprint="tiny",
        eager=False,
        prefill_graphs=pieces,
    )
    runner.warm_up()
    return runner


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

    absorbed: list[Any] = []
    chosen = mla_prefill.absorbs_prefill

    def recorded(*args: Any) -> list[bool]:
        absorbed.append(chosen(*args))
        return absorbed[-1]

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
