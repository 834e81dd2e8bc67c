# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU: graphs against eager runs, against the CPU's host, and its own kernels."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from engine.config import EngineConfig
from engine.execution.model_runner import build_model_runner
from engine.weights.quant_writer import quantization_config
from kernels.ops.mla_prefill import mla_prefill
from kernels.ops.moe_dense import moe_dense
from kernels.selection import override
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import write_tiny_deepseek

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# Sizes the GPU's kernels are made for, few layers and experts.
_SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
}


def _config(directory: Path, weights: str = "bf16", **settings: Any) -> EngineConfig:
    quant = {} if weights == "bf16" else {"quantization_config": quantization_config(weights, [])}
    write_tiny_deepseek(directory, **_SHAPE, **quant)
    return EngineConfig(
        model=str(directory),
        load_format="dummy",
        max_slots=6,
        token_budget=256,
        kv_pool_tokens=32768,
        **settings,
    )


def _ids(num: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 1000, (num,), generator=generator).tolist()


def _served(config: EngineConfig, run_dir: Path) -> list[list[int]]:
    # Here, so that the other tests run where the control plane is not built.
    from tests.fakes.live_engine import LiveEngine, make_request, run, serve

    said: list[Any] = []

    async def work(client: Any) -> None:
        requests = [
            make_request(f"r{i}", _ids(40 + 170 * i, i), 40, sampling=sampling)
            for i, sampling in enumerate(
                ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_p": 0.9, "seed": 4})
            )
        ]
        said.extend(await asyncio.gather(*(run(client, request) for request in requests)))

    serve(LiveEngine(str(run_dir), build_model_runner(config), max_slots=6, token_budget=256), work)
    return [answer.ids for answer in said]


@pytest.mark.parametrize(
    ("weights", "kv_dtype"),
    [("bf16", "auto"), ("nvfp4", "auto"), ("mxfp4", "auto"), ("mxint4", "auto"), ("nvfp4", "fp8")],
)
def test_graphs_give_the_bits_that_eager_runs_give(
    tmp_path: Path, weights: str, kv_dtype: str
) -> None:
    settings = {"device": "cuda", "kv_dtype": kv_dtype}
    runners = [
        build_model_runner(_config(tmp_path, weights, eager=eager, **settings))
        for eager in (False, True)
    ]
    drivers = [PagedDriver(runner, seed=1) for runner in runners]
    rows = [[driver.open(slot) for slot in range(5)] for driver in drivers]

    def step(*parts: tuple[int, list[int]]) -> None:
        captured, eager = (
            driver.step([(mine[place], list(tokens)) for place, tokens in parts])
            for driver, mine in zip(drivers, rows, strict=True)
        )
        assert torch.equal(captured, eager)
        assert bool(torch.isfinite(captured).all())

    step((0, _ids(200, 1)))
    step((1, _ids(90, 2)), (2, _ids(3, 3)), (0, [5]))
    step((3, _ids(130, 4)), (4, _ids(64, 5)))
    for number in range(12):
        step(*((place, [10 + number]) for place in range(1 + number % 5)))


@pytest.mark.parametrize(("weights", "kv_dtype"), [("nvfp4", "auto"), ("nvfp4", "fp8")])
def test_captured_pieces_of_a_prefill_step_give_the_bits_of_called_ones(
    tmp_path: Path, weights: str, kv_dtype: str
) -> None:
    """And, to bf16's accuracy, the logits of a step without padding."""
    settings = {"device": "cuda", "kv_dtype": kv_dtype}
    runners = [
        build_model_runner(
            _config(tmp_path, weights, eager=eager, prefill_graphs=pieces, **settings)
        )
        for eager, pieces in ((False, True), (True, True), (True, False))
    ]
    drivers = [PagedDriver(runner, seed=1) for runner in runners]
    rows = [[driver.open(slot) for slot in range(5)] for driver in drivers]
    steps: list[list[tuple[int, list[int]]]] = [
        [(0, _ids(200, 1))],
        [(1, _ids(90, 2)), (2, _ids(3, 3)), (0, [5])],
        [(3, _ids(130, 4)), (4, _ids(64, 5)), (0, [6]), (1, [7])],
        [(0, _ids(100, 6)), (1, [8])],
        [(0, [4]), (1, [5])],
    ]
    for parts in steps:
        captured, called, whole = (
            driver.step([(mine[place], list(tokens)) for place, tokens in parts])
            for driver, mine in zip(drivers, rows, strict=True)
        )
        assert torch.equal(captured, called)
        assert bool(torch.isfinite(captured).all())
        similarity = torch.nn.functional.cosine_similarity(captured, whole, dim=-1)
        assert float(similarity.min()) > 0.99


@pytest.mark.parametrize("has_run", [False, True])
def test_decode_rows_beside_a_prompt_without_memory_get_the_bits_they_get_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    """Their step is computed without it, whether or not its kernels were under way."""
    config = _config(tmp_path, "nvfp4", device="cuda", prefill_graphs=True)
    runners = [build_model_runner(config) for _ in range(2)]
    short, alone = (PagedDriver(runner, seed=1) for runner in runners)
    pairs = [(short.open(slot), alone.open(slot)) for slot in range(2)]
    for seed, rows in enumerate(pairs):
        short.step([(rows[0], _ids(90, seed))])
        alone.step([(rows[1], _ids(90, seed))])
    launcher = runners[0].step_launcher()
    mixed, lost = launcher._mixed, short.open(2)

    def short_of_memory(*args: Any) -> torch.Tensor:
        if has_run:
            mixed(*args)
        raise torch.OutOfMemoryError("CUDA out of memory")

    for number in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(launcher, "_mixed", short_of_memory)
            decodes = [(rows[0], [5 + number]) for rows in pairs]
            _, *logits = short.step([(lost, _ids(60, 9 + number)), *decodes])
        expected = alone.step([(rows[1], [5 + number]) for rows in pairs])
        assert torch.equal(torch.stack(logits), expected)
        assert bool(torch.isfinite(expected).all())


def test_graphs_and_eager_runs_serve_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("_scheduler")
    graphs = _served(_config(tmp_path, "nvfp4", device="cuda"), tmp_path / "graphs")
    eager = _served(_config(tmp_path, "nvfp4", device="cuda", eager=True), tmp_path / "eager")
    assert graphs == eager
    assert all(len(ids) == 40 for ids in graphs)


def test_logits_on_the_gpu_are_near_those_of_the_host(tmp_path: Path) -> None:
    """Tolerance: bf16 against fp32 over three layers, a cosine above 0.99."""
    dummy = _config(tmp_path / "dummy")
    settings = json.loads((Path(dummy.model) / "config.json").read_text())
    torch.manual_seed(3)
    DeepseekV3ForCausalLM(DeepseekV3Config(**settings)).save_pretrained(tmp_path / "plain")
    config = replace(dummy, model=str(tmp_path / "plain"), load_format="auto")
    found = []
    for changes in (
        {"device": "cpu", "dtype": "float32"},
        {"device": "cuda"},
        {"device": "cuda", "kv_dtype": "fp8"},
    ):
        driver = PagedDriver(build_model_runner(replace(config, **changes)), seed=2)
        row = driver.open(1)
        logits = [driver.step([(row, _ids(300, 7))])[0]]
        logits += [driver.step([(row, [token])])[0] for token in _ids(6, 8)]
        found.append(torch.stack(logits))
    for on_gpu in found[1:]:
        similarity = torch.nn.functional.cosine_similarity(found[0], on_gpu, dim=1)
        assert float(similarity.min()) > 0.99, similarity


@pytest.mark.parametrize(("past", "new"), [(0, 5), (0, 300), (1000, 200), (63, 65)])
def test_flash_prefill_is_the_reference(past: int, new: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(past + new)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device="cuda") * scale
        return values.to(torch.bfloat16)

    num_pages = -(-(past + new) // 64)
    table = torch.randperm(num_pages, generator=generator, device="cuda")[None].to(torch.int32)
    arguments = {
        "q": draw(new, 16, 192),
        "w_uk": draw(16, 128, 512, scale=512**-0.5),
        "w_uv": draw(16, 128, 512, scale=512**-0.5),
        "kv_pool_layer": draw(num_pages, 64, 576),
        "page_table": table,
        "row_slots": torch.zeros(1, dtype=torch.int32),
        "row_indptr": torch.tensor([0, new], dtype=torch.int32),
        "seq_lens": torch.tensor([past + new], dtype=torch.int32),
        "softmax_scale": 192**-0.5,
    }
    results = []
    for name in ("reference", "portable", "flash"):
        with override("mla_prefill", name):
            results.append(mla_prefill(**arguments).float())
    for found in results[1:]:
        assert float((found - results[0]).norm() / results[0].norm()) < 1e-2


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_grouped_experts_are_the_reference(num_tokens: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(num_tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16) / 16

    scores = torch.rand(num_tokens, 16, generator=generator, device="cuda")
    arguments = (
        draw(num_tokens, 512),
        scores.topk(4).indices.to(torch.int32),
        torch.rand(num_tokens, 4, generator=generator, device="cuda"),
        draw(16, 512, 512),
        draw(16, 512, 256),
        draw(num_tokens, 512),
    )
    results = []
    for name in ("reference", "grouped"):
        with override("moe_dense", name):
            results.append(moe_dense(*arguments).float())
    assert float((results[1] - results[0]).norm() / results[0].norm()) < 1e-2
