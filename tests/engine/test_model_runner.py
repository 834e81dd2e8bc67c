# SPDX-License-Identifier: Apache-2.0
"""The runner's own duties: ids from the device, page copies, sizes, settings that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.memory import free_host_bytes
from engine.execution.model_loading import weights_fingerprint
from engine.execution.model_runner import build_model_runner, override_kernels
from engine.weights.errors import ModelError, ModelNotFoundError, WeightMismatchError
from engine.weights.source import resolve_model
from kernels.ops import rms_norm
from kernels.reference.norm import rms_norm as reference_norm
from kernels.selection import select_kernel, set_override
from kernels.signature import CallSignature
from kvtiers.errors import PoolTooSmallError
from tests.fakes.paged_driver import PagedDriver


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _config(checkpoint: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "model": str(checkpoint),
        "dtype": "float32",
        "num_threads": 1,
        "page_size": 8,
        "kv_pool_tokens": 1024,
        "max_slots": 4,
    }
    return EngineConfig(**{**settings, **changes})


def test_sizes_come_from_model_and_configuration(checkpoint: Path) -> None:
    runner = build_model_runner(_config(checkpoint))
    assert (runner.vocab_size, runner.max_context_len) == (97, 128)
    assert (runner.page_size, runner.num_pages) == (8, 128)
    assert runner.next_input_ids.shape == (4,)
    assert runner.next_input_ids.dtype == torch.int32
    assert tuple(runner.kv_pool.shape) == (128, 2, 2, 8, 2, 8)
    assert build_model_runner(_config(checkpoint, max_context_len=64)).max_context_len == 64


def test_minus_one_takes_the_id_last_sampled_in_the_slot(checkpoint: Path) -> None:
    runner = build_model_runner(_config(checkpoint))
    driver = PagedDriver(runner, seed=1)
    rows = [driver.open(2), driver.open(0)]
    runner.next_input_ids[:] = torch.tensor([0, 90, 0, 91], dtype=torch.int32)
    driver.step([(rows[0], [5, 6, 7]), (rows[1], [8])])
    on_device = driver.step([(rows[0], [11]), (rows[1], [12])], from_device=True)
    other = PagedDriver(runner, seed=2)
    again = [other.open(2), other.open(0)]
    other.step([(again[0], [5, 6, 7]), (again[1], [8])])
    given = other.step([(again[0], [11]), (again[1], [12])])
    assert torch.equal(on_device, given)


def test_page_copies_happen_before_the_forward(checkpoint: Path) -> None:
    driver = PagedDriver(build_model_runner(_config(checkpoint)), seed=1)
    tokens = list(range(20, 33))  # one full page and 5 tokens
    first = driver.open(0)
    driver.prefill(first, tokens)
    expected = driver.step([(first, [40])])
    forked = driver.open(1, shared=first, shared_pages=1)
    own_page = driver.free_pages.pop()
    forked.pages.append(own_page)
    forked.token_ids = list(tokens)
    forked.num_done = len(tokens)
    found = driver.step([(forked, [40])], copies=[(first.pages[1], own_page, 5)])
    assert torch.equal(found, expected)


def test_a_step_that_samples_no_row_returns_no_logits(checkpoint: Path) -> None:
    driver = PagedDriver(build_model_runner(_config(checkpoint)))
    logits = driver.step([(driver.open(0), [1, 2, 3])], sample=[])
    assert tuple(logits.shape) == (0, 97)


def test_logits_stay_the_callers_after_the_next_step(checkpoint: Path) -> None:
    driver = PagedDriver(build_model_runner(_config(checkpoint)))
    row = driver.open(0)
    first = driver.step([(row, [1, 2, 3])])
    kept = first.clone()
    driver.step([(row, [4])])
    assert torch.equal(first, kept)
    first.add_(1.0)  # the sampler's to edit


def test_an_id_outside_the_vocabulary_fails_the_step(checkpoint: Path) -> None:
    driver = PagedDriver(build_model_runner(_config(checkpoint)))
    with pytest.raises(ValueError, match="input_ids"):
        driver.step([(driver.open(0), [97])])


def test_the_fingerprint_follows_what_shapes_the_cache(checkpoint: Path) -> None:
    first = build_model_runner(_config(checkpoint)).model_fingerprint
    assert build_model_runner(_config(checkpoint, kv_pool_tokens=512)).model_fingerprint == first
    assert build_model_runner(_config(checkpoint, page_size=16)).model_fingerprint != first
    assert build_model_runner(_config(checkpoint, dtype="bfloat16")).model_fingerprint != first


def test_random_weights_and_a_fixed_order_have_kv_of_their_own(checkpoint: Path) -> None:
    """Engines share a store by this name, and dummies a directory with the model they stand for."""
    source = resolve_model(str(checkpoint))
    settings: list[dict[str, Any]] = [{}, {"load_format": "dummy"}]
    settings += [{**each, "deterministic": True} for each in settings]
    names = {
        weights_fingerprint(_config(checkpoint, **each), source, device)
        for each in settings
        for device in ("cpu", "cuda")
    }
    assert len(names) == 6  # a checkpoint is the same on each device
    first = build_model_runner(_config(checkpoint)).model_fingerprint
    dummy = build_model_runner(_config(checkpoint, load_format="dummy")).model_fingerprint
    assert dummy != first


def test_dummy_weights_need_no_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    runner = build_model_runner(_config(tmp_path, load_format="dummy"))
    driver = PagedDriver(runner)
    assert bool(torch.isfinite(driver.step([(driver.open(0), [1, 2])])).all())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"load_format": "gguf"}, "engine.load_format = 'gguf'"),
        ({"max_context_len": 129}, "engine.max_context_len = 129: allowed: up to 128"),
        ({"weights": "packed"}, "engine.weights = 'packed'"),
    ],
)
def test_a_setting_that_does_not_fit_the_model_is_named(
    checkpoint: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        build_model_runner(_config(checkpoint, **changes))


def test_a_pool_too_small_for_one_request_is_refused(checkpoint: Path) -> None:
    with pytest.raises(PoolTooSmallError, match="15 KV pages of 8 tokens.*needs 16"):
        build_model_runner(_config(checkpoint, kv_pool_tokens=127))


def test_a_missing_model_has_a_stable_code() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        build_model_runner(EngineConfig(model="/nowhere"))
    assert caught.value.code == "model_not_found"
    assert isinstance(caught.value, ModelError)
    assert isinstance(caught.value, ValueError)


def test_a_checkpoint_of_other_sizes_names_the_tensor(checkpoint: Path, tmp_path: Path) -> None:
    text = (checkpoint / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"vocab_size": 97', '"vocab_size": 98'))
    weights = (checkpoint / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(WeightMismatchError, match=r"embed_tokens.*\[97, 32\].*\[98, 32\]"):
        build_model_runner(_config(tmp_path))


_MEMINFO = "MemTotal:       100 kB\nMemAvailable:   60 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 60 * 1024),
        ({"sys/fs/cgroup/memory.max": "50000", "sys/fs/cgroup/memory.current": "9000"}, 41000),
        (
            {
                "sys/fs/cgroup/memory.max": "50000",
                "sys/fs/cgroup/memory.current": "49000",
                "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 40000\nactive_file 1\n",
            },
            41000,
        ),
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "9000"}, 60 * 1024),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "20000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "30000",
            },
            0,
        ),
    ],
)
def test_free_memory_heeds_container_limits(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    for name, text in {"proc/meminfo": _MEMINFO, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_host_bytes(tmp_path) == expected


def test_kernels_named_in_the_configuration_run_instead_of_the_chosen_ones() -> None:
    override_kernels("rms_norm=reference, argmax = reference")
    try:
        x = torch.randn(2, 8)
        call = CallSignature("rms_norm", "cpu", (("x", "fp32"), ("weight", "fp32")))
        assert select_kernel(call).name == "reference"
        assert torch.equal(rms_norm(x, torch.ones(8), 1e-6), reference_norm(x, torch.ones(8), 1e-6))
    finally:
        for family in ("rms_norm", "argmax"):
            set_override(family, None)
    for wrong in ("rms_norm", "rms_norm=nothing", "no_family=reference"):
        with pytest.raises(ConfigError, match=r"engine\.kernels"):
            override_kernels(wrong)
