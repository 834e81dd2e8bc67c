# SPDX-License-Identifier: Apache-2.0
"""Drafts of a next-token-prediction layer: against transformers' layers, and changing no token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.batch import ForwardBatch
from engine.execution.device_runner import DeviceModelRunner
from engine.execution.model_runner import PagedModelRunner, build_model_runner
from engine.execution.steps import Step
from engine.sampling.params import RowSampling, SampleBatch
from kernels.selection import override
from tests.fakes.device_runner import device_runner
from tests.fakes.live_engine import Collected, LiveEngine, make_request, run, serve
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import CONFIG, write_tiny_deepseek

_NUM_LAYERS, _HIDDEN, _VOCAB = 2, 48, 131
_SHAPE: dict[str, Any] = {
    **CONFIG,
    "vocab_size": _VOCAB,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _NUM_LAYERS,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _random(model: Any) -> Any:
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif "correction_bias" in name:
                weight.uniform_(-0.2, 0.2)
            elif "inv_freq" not in name:
                weight.normal_(std=0.5 if "gate.weight" in name else 0.12)
    return model.eval()


def _checkpoint(directory: Path) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A model of two layers with a third that drafts; (model, that layer, its own tensors)."""
    torch.manual_seed(3)
    shape = {key: value for key, value in _SHAPE.items() if key != "architectures"}
    main = _random(DeepseekV3ForCausalLM(DeepseekV3Config(**shape)))
    alone = {**shape, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    behind = _random(DeepseekV3ForCausalLM(DeepseekV3Config(**alone)))
    main.save_pretrained(directory)
    behind.save_pretrained(directory / "behind")
    tensors = load_file(directory / "model.safetensors")
    prefix = f"model.layers.{_NUM_LAYERS}."
    for name, value in load_file(directory / "behind" / "model.safetensors").items():
        if name.startswith("model.layers.0."):
            tensors[prefix + name.removeprefix("model.layers.0.")] = value
    own = {
        "enorm.weight": torch.rand(_HIDDEN) + 0.5,
        "hnorm.weight": torch.rand(_HIDDEN) + 0.5,
        "eh_proj.weight": torch.randn(_HIDDEN, 2 * _HIDDEN) * 0.1,
        "shared_head.norm.weight": behind.model.norm.weight.detach().clone(),
    }
    tensors.update({prefix + name: value for name, value in own.items()})
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return main, behind, own


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _wanted(main: Any, behind: Any, own: dict[str, torch.Tensor], ids: list[int]) -> list[int]:
    """By transformers' layers: the guess behind ids[: n + 2], for each n."""
    with torch.no_grad():
        hidden = main.model(torch.tensor([ids[:-1]])).last_hidden_state
        embedded = main.model.embed_tokens(torch.tensor([ids[1:]]))
        halves = (_norm(embedded, own["enorm.weight"]), _norm(hidden, own["hnorm.weight"]))
        mixed = torch.cat(halves, dim=-1) @ own["eh_proj.weight"].T
        logits = main.lm_head(behind.model(inputs_embeds=mixed).last_hidden_state)
    found: list[int] = logits[0].argmax(dim=-1).tolist()
    return found


class _Recorder:
    """A runner that keeps the batch it ran last."""

    def __init__(self, runner: PagedModelRunner) -> None:
        self._runner = runner
        self.batch: ForwardBatch | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batch = batch
        return self._runner.forward(batch)


def _config(directory: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(directory),
        dtype="float32",
        num_threads=1,
        page_size=16,
        kv_pool_tokens=2048,
        max_slots=4,
        max_context_len=256,
        speculation="mtp",
        **settings,
    )


@pytest.mark.parametrize("first", [1, 9, 18])
def test_guesses_are_those_of_the_same_layers_in_transformers(tmp_path: Path, first: int) -> None:
    """Behind a first chunk, then token by token over paged KV."""
    main, behind, own = _checkpoint(tmp_path)
    ids = torch.randint(0, _VOCAB, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = _wanted(main, behind, own, ids)
    recorder = _Recorder(build_model_runner(_config(tmp_path)))  # type: ignore[arg-type]
    driver = PagedDriver(recorder, seed=2)  # type: ignore[arg-type]
    row, found, at = driver.open(1), [], 0
    for size in (first, *[1] * (len(ids) - 1 - first)):
        driver.step([(row, ids[at : at + size])])
        assert recorder.batch is not None
        next_ids = torch.tensor(ids[at + 1 : at + 1 + size], dtype=torch.int32)
        found += recorder.draft(recorder.batch, next_ids).tolist()
        at += size
    assert found == wanted[first - 1 :]


_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "few words": {"sampling": {"logit_bias": {20: 20.0, 40: 20.0, 60: 20.0}}},
    "hot": {"sampling": {"temperature": 0.7, "seed": 5, "logit_bias": {20: 20.0, 40: 20.0}}},
    "penalties": {"sampling": {"frequency_penalty": 0.5}},
}


def _talk(run_dir: Path, runner: Any, speculation: str) -> tuple[dict[str, Collected], Any]:
    said: dict[str, Collected] = {}
    stats: dict[str, float] = {}

    async def work(client: EngineClient) -> None:
        async def one(kind: str, seed: int) -> None:
            prompt = [3 + (seed * 7 + place * 5) % 90 for place in range(30 + 20 * seed)]
            said[kind] = await run(client, make_request(kind, prompt, 60, **_KINDS[kind]))

        await asyncio.gather(*(one(kind, seed) for seed, kind in enumerate(_KINDS)))
        stats.update(await client.stats())

    engine = LiveEngine(str(run_dir), runner, token_budget=24, speculation=speculation)
    serve(engine, work)
    return said, stats


def _folding_runner(config: EngineConfig) -> DeviceModelRunner:
    with override("mla_decode_form", "folded"):
        return _device_runner(config)


def _folding_host(config: EngineConfig) -> Any:
    with override("mla_decode_form", "folded"):
        return build_model_runner(config)


def _device_runner(config: EngineConfig) -> DeviceModelRunner:
    return device_runner(config, eager=True)


@pytest.mark.parametrize(
    "build", [build_model_runner, _device_runner, _folding_runner, _folding_host]
)
def test_a_served_model_that_drafts_says_what_it_says_without(
    tmp_path: Path, build: Callable[[EngineConfig], Any]
) -> None:
    tiny = write_tiny_deepseek(tmp_path / "tiny", num_nextn_predict_layers=1)
    runner = build(_config(tiny, load_format="dummy"))
    drafted, stats = _talk(tmp_path / "mtp", runner, "mtp")
    assert stats["draft_tokens"] > 40
    assert stats["draft_tokens.mtp.1"] == stats["draft_tokens"]
    assert stats["draft_tokens_accepted.mtp.1"] == stats["draft_tokens_accepted"]
    assert 0 < stats["draft_tokens_accepted"] < stats["draft_tokens"]
    assert stats["owned_pages"] == stats["in_flight_pages"] == 0
    plain_config = replace(_config(tiny, load_format="dummy"), speculation="none")
    without, _ = _talk(tmp_path / "none", build_model_runner(plain_config), "none")
    for kind in _KINDS:
        assert drafted[kind].ids == without[kind].ids, kind


def test_a_devices_guesses_are_those_of_the_host(tmp_path: Path) -> None:
    """One request alone, its prompt in several steps: as many are tried, as many are right."""
    tiny = write_tiny_deepseek(tmp_path / "tiny", num_nextn_predict_layers=1)
    counts = []
    for build in (build_model_runner, _device_runner):
        runner = build(_config(tiny, load_format="dummy"))

        async def work(client: EngineClient) -> None:
            prompt = [3 + 7 * place % 90 for place in range(50)]
            await run(client, make_request("r", prompt, 100, sampling={"ignore_eos": True}))
            stats = await client.stats()
            counts.append([stats[name] for name in ("draft_tokens", "draft_tokens_accepted")])

        run_dir = str(tmp_path / build.__name__)
        serve(LiveEngine(run_dir, runner, token_budget=24, speculation="mtp"), work)
    assert counts[0] == counts[1]
    assert 0 < counts[0][1] < counts[0][0], counts


def test_a_model_without_such_a_layer_is_refused_by_name(tmp_path: Path) -> None:
    tiny = write_tiny_deepseek(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.speculation = 'mtp'.*no next-token-prediction"):
        build_model_runner(_config(tiny, load_format="dummy"))


# Slot, position, token, the token behind it (-1: sampled in the step).
_OneToken = tuple[int, int, int, int]


def _one_token_step(rows: list[_OneToken], step_id: int) -> Step:
    """Slot s has page 5 + s."""
    slots, positions, tokens, behind = (list(column) for column in zip(*rows, strict=True))
    sampled = [row for row, token in enumerate(behind) if token < 0]
    num = len(rows)
    table = torch.zeros(4, 17, dtype=torch.int32)
    table[:, 0] = 5 + torch.arange(4)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return Step(
        forward=ForwardBatch(
            step_id=step_id,
            input_ids=ints(tokens),
            positions=ints(positions),
            slot_mapping=ints([(5 + s) * 16 + p for s, p in zip(slots, positions, strict=True)]),
            row_indptr=torch.arange(num + 1, dtype=torch.int32),
            row_slots=ints(slots),
            seq_lens=ints([position + 1 for position in positions]),
            sample_rows=ints(sampled),
            page_table=table,
            page_copies=torch.empty((0, 3), dtype=torch.int32),
            next_ids=ints(behind),
        ),
        page_deltas=np.array([[slot, 0, 5 + slot] for slot in slots], dtype=np.int32),
        sampling=SampleBatch(
            rows=[RowSampling() for _ in sampled],
            slots=np.array([slots[row] for row in sampled], dtype=np.int64),
            positions=np.zeros(len(sampled), dtype=np.int64),
        ),
    )


@pytest.mark.parametrize("build", [_device_runner, _folding_runner])
def test_a_step_of_single_tokens_of_which_some_are_not_sampled_drafts_for_the_rows_it_ran(
    tmp_path: Path, build: Callable[[EngineConfig], DeviceModelRunner]
) -> None:
    """A chunk may end one token long: its row is run and drafted for, for its KV, and gives none.
    The samples then fill another padded size than the rows, where an older step's rows lie."""
    tiny = write_tiny_deepseek(tmp_path / "tiny", num_nextn_predict_layers=1)
    config = _config(tiny, load_format="dummy")
    device, host = build(config), build_model_runner(config)
    assert isinstance(host, PagedModelRunner)
    device.kv_pool.zero_()
    launcher = device.step_launcher()
    steps: list[list[_OneToken]] = [
        [(2, 0, 11, -1), (3, 0, 12, -1)],  # fills the size of two
        [(0, 0, 20, -1), (1, 0, 21, 17), (2, 1, 22, -1)],  # three rows, two samples
        [(1, 1, 17, 33), (3, 1, 23, 5)],  # no sample at all
        [(0, 1, 24, -1), (1, 2, 33, -1), (2, 2, 25, 9), (3, 2, 5, -1)],
        [(0, 2, 31, -1), (0, 3, 32, -1), (1, 3, 30, 9), (2, 3, 9, -1)],  # one with a draft
        [(0, 3, 40, -1), (0, 4, 41, -1), (0, 5, 42, -1)],  # it was wrong
    ]
    for number, rows in enumerate(steps):
        step = _one_token_step(rows, number)
        with torch.no_grad():
            result = launcher.launch(step)()
        logits = host.forward(step.forward)
        assert step.forward.next_ids is not None
        next_ids = step.forward.next_ids.clone()
        next_ids[step.forward.sample_rows.long()] = logits.argmax(dim=-1).int()
        wanted = host.draft(step.forward, next_ids).tolist()
        if wanted:
            assert result.sampled is not None and result.sampled.drafts is not None
            assert result.sampled.token_ids.tolist() == logits.argmax(dim=-1).tolist()
            assert result.sampled.drafts.tolist() == wanted
        # The drafting layer's KV too; the device's last page is the padding's.
        torch.testing.assert_close(device.kv_pool[:-1], host.kv_pool, rtol=1e-5, atol=1e-5)


def _with_prompt(step: Step, slot: int, token_ids: list[int], *, is_sampled: bool) -> Step:
    """The same step, with a prompt's tokens in front."""
    num, old = len(token_ids), step.forward
    assert old.next_ids is not None

    def front(values: torch.Tensor, *added: int, by: int = 0) -> torch.Tensor:
        return torch.cat((torch.tensor(added, dtype=torch.int32), values + by))

    sampling = step.sampling
    return replace(
        step,
        forward=replace(
            old,
            input_ids=front(old.input_ids, *token_ids),
            positions=front(old.positions, *range(num)),
            slot_mapping=front(old.slot_mapping, *((5 + slot) * 16 + at for at in range(num))),
            row_indptr=front(old.row_indptr, 0, by=num),
            row_slots=front(old.row_slots, slot),
            seq_lens=front(old.seq_lens, num),
            sample_rows=front(old.sample_rows, *([0] if is_sampled else []), by=1),
            next_ids=front(old.next_ids, *token_ids[1:], -1 if is_sampled else 7),
        ),
        sampling=replace(
            sampling,
            rows=[*([RowSampling()] if is_sampled else []), *sampling.rows],
            slots=np.array([*([slot] if is_sampled else []), *sampling.slots], dtype=np.int64),
            positions=np.zeros(len(sampling.rows) + is_sampled, dtype=np.int64),
        ),
    )


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("build", [_device_runner, _folding_runner])
def test_rows_beside_a_prompt_without_memory_are_drafted_for_as_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[EngineConfig], DeviceModelRunner],
    is_sampled: bool,
) -> None:
    tiny = write_tiny_deepseek(tmp_path / "tiny", num_nextn_predict_layers=1)
    config = _config(tiny, load_format="dummy")
    short, alone = build(config), build(config)
    for runner in (short, alone):
        runner.kv_pool.zero_()
    mixed = short.step_launcher()._mixed

    def short_of_memory(*args: Any) -> torch.Tensor:
        mixed(*args)
        raise torch.OutOfMemoryError("CUDA out of memory")

    steps: list[list[_OneToken]] = [
        [(0, 0, 20, -1), (1, 0, 21, -1)],
        [(0, 1, 24, -1), (1, 1, 33, 8), (2, 0, 25, -1)],  # one is not sampled
        [(0, 2, 31, -1), (0, 3, 32, -1), (1, 2, 30, -1)],  # one with a draft
    ]
    for number, rows in enumerate(steps):
        step = _one_token_step(rows, number)
        with torch.no_grad(), monkeypatch.context() as patch:
            expected = alone.step_launcher().launch(step)().sampled
            patch.setattr(short.step_launcher(), "_mixed", short_of_memory)
            ids = [40 + number, 41, 42, 43, 44]
            lost = _with_prompt(step, 3, ids, is_sampled=is_sampled)
            result = short.step_launcher().launch(lost)()
        found, first = result.sampled, int(is_sampled)
        assert (result.num_lost, result.lost_error) == (1, "OutOfMemoryError: CUDA out of memory")
        assert found is not None and expected is not None
        assert found.token_ids[first:].tolist() == expected.token_ids.tolist()
        assert found.drafts is not None and expected.drafts is not None
        assert found.drafts[first:].tolist() == expected.drafts.tolist()
        for slot in range(3):  # the drafting layer's KV too
            assert torch.equal(short.kv_pool[5 + slot], alone.kv_pool[5 + slot])
