# SPDX-License-Identifier: Apache-2.0
"""`engine.deterministic` on a CPU: a token has the same bits whatever shares its steps, however its
prompt is cut and whoever computed the KV it reads. The same of a GPU: test_gpu_deterministic.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.config import EngineConfig
from engine.execution.model_loading import has_compiled_decoder
from engine.execution.model_runner import PagedModelRunner, build_model_runner
from engine.execution.one_token_steps import OneTokenSteps
from tests.fakes.paged_driver import PagedDriver, Row
from tests.fakes.tiny_deepseek import write_tiny_deepseek

_QWEN: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
_IDS = torch.randint(0, 250, (90,), generator=torch.Generator().manual_seed(1)).tolist()
_OTHER = _IDS[7:60]


def _config(directory: Path, **settings: Any) -> EngineConfig:
    sizes = {"page_size": 16, "kv_pool_tokens": 1024, "max_context_len": 128, "max_slots": 4}
    return EngineConfig(model=str(directory), **sizes, **settings)


@pytest.fixture(params=["llama float32", "llama auto", "deepseek float32", "deepseek bfloat16"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> PagedModelRunner:
    family, dtype = request.param.split()
    load_format = "auto"
    if family == "deepseek":
        write_tiny_deepseek(tmp_path)
        load_format = "dummy"
    else:
        if dtype == "auto" and not has_compiled_decoder():
            pytest.skip("the CPU kernels are not built")
        torch.manual_seed(3)
        Qwen3ForCausalLM(Qwen3Config(**_QWEN)).save_pretrained(tmp_path)
    config = _config(tmp_path, dtype=dtype, load_format=load_format, deterministic=True)
    built = build_model_runner(config)
    assert isinstance(built, PagedModelRunner)
    return built


def _kv_of(driver: PagedDriver, row: Row) -> torch.Tensor:
    """The row's KV page by page; what its last page holds behind it is left out."""
    size = driver.runner.page_size
    pages = driver.runner.kv_pool[torch.tensor(row.pages[: row.num_done // size])]
    return pages.clone()


def _chunks(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    return [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]


def test_a_token_has_the_same_bits_however_it_comes(runner: PagedModelRunner) -> None:
    driver = PagedDriver(runner, seed=2)
    whole = driver.open(0)
    expected = driver.step([(whole, _IDS)])[0]
    kv = _kv_of(driver, whole)

    for size in (1, 7, 40):  # by itself
        row = driver.open(1)
        for chunk in _chunks(_IDS, size):
            found = driver.step([(row, chunk)])[0]
        assert torch.equal(found, expected), size
        assert torch.equal(_kv_of(driver, row), kv), size

    for size in (13, 40):  # beside a prompt and a decode row, behind and before it
        row, other, decoded = (driver.open(slot) for slot in (1, 2, 3))
        driver.step([(decoded, _OTHER)])
        for chunk in _chunks(_IDS, size):
            beside = (other, _OTHER[: 1 + len(chunk) // 2])
            found = driver.step([beside, (row, chunk), (decoded, [9])])[1]
        assert torch.equal(found, expected), size
        assert torch.equal(_kv_of(driver, row), kv), size

    shared = driver.open(3, shared=whole, shared_pages=4)  # on cached pages
    found = driver.step([(shared, _IDS[64:])])[0]
    assert torch.equal(found, expected)


def test_without_it_the_bits_depend_on_the_step(tmp_path: Path) -> None:
    """Else the test above could not fail."""
    torch.manual_seed(3)
    Qwen3ForCausalLM(Qwen3Config(**_QWEN)).save_pretrained(tmp_path)
    config = _config(tmp_path, dtype="float32")
    driver = PagedDriver(build_model_runner(config))
    whole = driver.step([(driver.open(0), _IDS)])[0]
    row = driver.open(1)
    one_by_one = [driver.step([(row, [token])])[0] for token in _IDS][-1]
    torch.testing.assert_close(one_by_one, whole, rtol=1e-4, atol=1e-4)
    assert not torch.equal(one_by_one, whole)


def test_rows_that_are_sampled_get_their_own_logits(tmp_path: Path) -> None:
    """In the order of `sample_rows`; of rows without one nothing."""
    write_tiny_deepseek(tmp_path)
    config = _config(tmp_path, dtype="float32", load_format="dummy")
    results = []
    for is_alone in (False, True):
        runner = build_model_runner(config)
        assert isinstance(runner, PagedModelRunner)
        if is_alone:
            runner._model = OneTokenSteps(runner._model)
        driver = PagedDriver(runner)
        rows = [driver.open(slot) for slot in range(3)]
        parts = [(rows[0], _IDS[:20]), (rows[1], _IDS[20:33]), (rows[2], _IDS[:1])]
        results.append(driver.step(parts, sample=[2, 0]))
        assert driver.step([(rows[1], _IDS[:5])], sample=[]).shape[0] == 0
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
