# SPDX-License-Identifier: Apache-2.0
"""The device's launcher against the host's: the same tokens, padding harmless, failures alone.

Here the device is the CPU and nothing is captured; tests marked gpu run the same with graphs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import api
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.execution.batch import ForwardBatch
from engine.execution.device_clock import DeviceStream
from engine.execution.device_launcher import DeviceLauncher, buckets_up_to
from engine.execution.device_runner import DeviceModelRunner
from engine.execution.model_runner import build_model_runner
from engine.execution.steps import Step
from engine.sampling.params import RowSampling, SampleBatch
from kernels.selection import override
from tests.fakes.device_runner import device_runner, tiny_config
from tests.fakes.folded_layers import count_folds
from tests.fakes.live_engine import Collected, LiveEngine, make_request, run, serve
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import VOCAB_SIZE, write_tiny_deepseek

_PAGE, _SLOTS, _PAGES = 16, 4, 96


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = write_tiny_deepseek(tmp_path_factory.mktemp("tiny"))
    return tiny_config(
        directory,
        page_size=_PAGE,
        num_pages=_PAGES,
        max_slots=_SLOTS,
        speculation="ngram",  # room for its rows
    )


def _device_runner(config: EngineConfig, form: str = "rows") -> DeviceModelRunner:
    torch.set_num_threads(1)
    with override("mla_decode_form", form):
        return device_runner(config)


def _ids(num: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num,), generator=generator).tolist()


_REGEX = api.GrammarSpec(kind=api.GrammarKind.REGEX, text="[a-z]{6,12}")
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot": {"sampling": {"temperature": 1.3, "seed": 5}},
    "cut": {"sampling": {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "seed": 6}},
    "min_p": {"sampling": {"temperature": 1.0, "min_p": 0.2, "seed": 7}},
    "late_stop": {"sampling": {"min_new_tokens": 9}},
    "grammar": {"grammar": _REGEX},
    "penalties": {"sampling": {"frequency_penalty": 1.5}},
    "logprobs": {"sampling": {"num_logprobs": 2}},
    "all": {
        "sampling": {
            "repetition_penalty": 1.7,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.25,
            "logit_bias": {7: 2.5, 100: -100.0, 9: 1.0},
            "temperature": 0.8,
            "seed": 9,
            "num_logprobs": 0,
        }
    },
    "bias": {"sampling": {"logit_bias": {50: 3.0, 51: 3.0, 52: 3.0}}},
}


def _talk(runner: Any, run_dir: Path, speculation: str = "none") -> dict[str, Collected]:
    said: dict[str, Collected] = {}

    async def work(client: EngineClient) -> None:
        async def one(kind: str, seed: int) -> None:
            prompt = _ids(5 + 23 * seed, seed)
            request = make_request(kind, prompt, 20, **_KINDS[kind])
            said[kind] = await run(client, request)

        seeds = {kind: seed for seed, kind in enumerate(_KINDS)}
        for kinds in (list(_KINDS)[:4], list(_KINDS)[4:8], list(_KINDS)[8:]):
            await asyncio.gather(*(one(kind, seeds[kind]) for kind in kinds))

    serve(
        LiveEngine(
            str(run_dir),
            runner,
            max_slots=_SLOTS,
            token_budget=48,
            wait_grammar=True,
            speculation=speculation,
        ),
        work,
    )
    return said


def test_both_launchers_sample_the_same_tokens(config: EngineConfig, tmp_path: Path) -> None:
    by_host = _talk(build_model_runner(config), tmp_path / "host")
    by_device = _talk(_device_runner(config), tmp_path / "device")
    for kind in _KINDS:
        assert by_device[kind].ids == by_host[kind].ids, kind
        assert len(by_host[kind].ids) >= 6
    pairs = zip(by_device["logprobs"].logprobs, by_host["logprobs"].logprobs, strict=True)
    for device, host in pairs:
        assert device.top_ids == host.top_ids
        assert device.logprob == pytest.approx(host.logprob, abs=1e-4)
    assert len({tuple(said.ids) for said in by_host.values()}) == len(_KINDS)


@pytest.mark.parametrize("form", ["rows", "folded"])
def test_drafts_on_the_device_change_no_token(
    config: EngineConfig, tmp_path: Path, form: str
) -> None:
    """Masks and logprobs are those of each sample behind a draft, in every kind of request."""
    runner = _device_runner(config, form)
    counts = count_folds(runner.step_launcher())
    without = _talk(runner, tmp_path / "none")
    assert set(counts) == {1}
    drafted = _talk(runner, tmp_path / "ngram", "ngram")
    for kind in _KINDS:
        assert drafted[kind].ids == without[kind].ids, kind
    assert set(counts) == ({1, 8} if form == "folded" else {1})


def test_logits_are_those_of_the_host_for_every_bucket_and_in_mixed_steps(
    config: EngineConfig,
) -> None:
    drivers = [PagedDriver(r, seed=1) for r in (build_model_runner(config), _device_runner(config))]
    rows = [[driver.open(slot) for slot in (3, 0, 2, 1)] for driver in drivers]

    def step(*parts: tuple[int, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        host, device = (
            driver.step([(mine[place], list(tokens)) for place, tokens in parts])
            for driver, mine in zip(drivers, rows, strict=True)
        )
        return host, device

    steps = [
        step((0, _ids(40, 1))),
        step((0, [7])),
        step((1, _ids(20, 2)), (2, _ids(3, 3)), (0, [9])),
        step((0, [4]), (1, [5]), (2, [6])),
        step((3, _ids(33, 4)), (0, [1]), (1, [2]), (2, [3])),
        step((0, [4]), (1, [5]), (2, [6]), (3, [8])),
    ]
    for host, device in steps:
        torch.testing.assert_close(device, host, rtol=1e-5, atol=1e-5)


def _step(
    runner: DeviceModelRunner, slots: list[int], page_of: dict[int, int], step_id: int
) -> Step:
    """The first token of every slot, each in a page of its own."""
    num = len(slots)
    zeros = torch.zeros(num, dtype=torch.int32)
    return Step(
        forward=ForwardBatch(
            step_id=step_id,
            input_ids=torch.tensor([10 + slot for slot in slots], dtype=torch.int32),
            positions=zeros,
            slot_mapping=torch.tensor([page_of[s] * _PAGE for s in slots], dtype=torch.int32),
            row_indptr=torch.arange(num + 1, dtype=torch.int32),
            row_slots=torch.tensor(slots, dtype=torch.int32),
            seq_lens=zeros + 1,
            sample_rows=torch.arange(num, dtype=torch.int32),
            page_table=torch.empty(0, dtype=torch.int32),
            page_copies=torch.empty((0, 3), dtype=torch.int32),
        ),
        page_deltas=np.array([[slot, 0, page_of[slot]] for slot in slots], dtype=np.int32),
        sampling=SampleBatch(
            rows=[RowSampling() for _ in slots],
            slots=np.array(slots, dtype=np.int64),
            positions=np.zeros(num, dtype=np.int64),
        ),
    )


def test_padding_rows_write_to_their_own_page_alone(config: EngineConfig) -> None:
    runner = _device_runner(config)
    launcher = runner.step_launcher()
    runner.kv_pool.zero_()
    before = runner.next_input_ids.clone()
    with torch.inference_mode():
        launcher.launch(_step(runner, [1, 0, 3], {1: 5, 0: 8, 3: 2}, 1))()  # padded to four
    touched = runner.kv_pool.abs().flatten(1).sum(dim=1).nonzero()[:, 0].tolist()
    assert set(touched) - {runner.num_pages} == {2, 5, 8}
    assert runner.kv_pool.shape[0] == runner.num_pages + 1
    changed = (runner.next_input_ids != before).nonzero()[:, 0].tolist()
    assert 2 not in changed  # a slot that took no part; slot 4 is the padding's


def test_a_row_with_bad_logits_fails_alone(config: EngineConfig) -> None:
    runner = _device_runner(config)
    launcher = runner.step_launcher()
    step = _step(runner, [0, 1], {0: 3, 1: 4}, 1)
    good = launcher.launch(step)().sampled
    # The second row's cache goes bad; its next token attends to it.
    runner.kv_pool[4, :, 0] = float("nan")
    later = _step(runner, [0, 1], {0: 3, 1: 4}, 2)
    for row in range(2):
        later.forward.positions[row] = 1
        later.forward.slot_mapping[row] += 1
        later.forward.seq_lens[row] = 2
    result = launcher.launch(later)()
    assert good is not None and result.sampled is not None and result.error is None
    assert (good.token_ids >= 0).all()
    assert result.sampled.token_ids[0] >= 0
    assert result.sampled.token_ids[1] == -1
    assert int(runner.next_input_ids[1]) == 0  # still an id of the vocabulary


def test_a_step_that_cannot_be_launched_whole_is_over_on_the_device_when_it_fails(
    config: EngineConfig,
) -> None:
    """Its pages go to others then, who do not wait for the device."""

    class NotingStream(DeviceStream):
        num_waits = 0

        def synchronise(self) -> None:
            self.num_waits += 1

    runner = _device_runner(config)
    launcher = runner.step_launcher()
    stream = launcher._stream = NotingStream(torch.device("cpu"))
    step = _step(runner, [0, 1], {0: 3, 1: 4}, 1)
    step.sampling.positions = np.zeros(1, dtype=np.int64)  # breaks behind the forward
    with torch.inference_mode(), pytest.raises(IndexError):
        launcher.launch(step)
    assert stream.num_waits == 1


def test_ids_stay_inside_the_vocabulary_whatever_is_asked(config: EngineConfig) -> None:
    runner = _device_runner(config)
    step = _step(runner, [0, 2], {0: 1, 2: 6}, 1)
    step.forward.input_ids[:] = torch.tensor([VOCAB_SIZE + 1000, -1])
    runner.next_input_ids[2] = 1 << 30
    result = runner.step_launcher().launch(step)()
    assert result.sampled is not None and (result.sampled.token_ids >= 0).all()


def test_sampling_waits_for_the_mask_and_obeys_it(config: EngineConfig) -> None:
    launcher: DeviceLauncher = _device_runner(config).step_launcher()
    step = _step(_device_runner(config), [0, 1], {0: 3, 1: 4}, 1)
    bitmask = np.full((2, -(-VOCAB_SIZE // 32)), -1, dtype=np.int32)
    ready = threading.Event()
    step.sampling.bitmask, step.sampling.mask_ready = bitmask, ready
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(launcher.launch(step)()))
    thread.start()
    bitmask[1] = 0
    bitmask[1, 77 // 32] = 1 << (77 % 32)
    assert not results
    ready.set()
    thread.join(20)
    assert results[0].sampled.token_ids[1] == 77


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_the_wait_for_masks_is_told_from_the_launch_of_the_sampler(
    config: EngineConfig, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher: DeviceLauncher = _device_runner(config).step_launcher()
    monkeypatch.setattr(launcher, "_sample", lambda size, draws: time.sleep(0.2))
    step = _step(_device_runner(config), [0, 1], {0: 3, 1: 4}, 1)
    step.sampling.mask_ready = threading.Event()
    timer = threading.Timer(delay_s, step.sampling.mask_ready.set)
    timer.start()
    timer.join(0.0 if delay_s else 20)  # no delay: they are there before the step is
    waited_ms = launcher.launch(step)().mask_wait_ms
    timer.join(20)
    assert (waited_ms > 100) == (delay_s > 0)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_buckets_end_with_the_largest_step(most: int, sizes: list[int]) -> None:
    assert buckets_up_to(most) == sizes
