# SPDX-License-Identifier: Apache-2.0
"""The llama model against transformers on tiny random checkpoints, prefill and paged decode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.execution.model_loading import has_compiled_decoder
from engine.execution.model_runner import build_model_runner
from tests.fakes.paged_driver import PagedDriver

_BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "grouped_untied": {},
    "one_kv_head_per_head_tied": {"num_key_value_heads": 6, "tie_word_embeddings": True},
    "wide_heads": {"head_dim": 16, "num_attention_heads": 4},
    "llama3_rope": {"rope_parameters": _LLAMA3_ROPE},
    "linear_rope": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _reference(changes: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**{**_BASE, **changes})).eval()
    with torch.no_grad():  # norms start at one, which would hide a norm that is never applied
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.mul_(4.0)
    return model


def _driver(directory: Path, **settings: Any) -> PagedDriver:
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        weights="dequantized",
        num_threads=1,
        page_size=16,
        kv_pool_tokens=2048,
        max_slots=4,
        **settings,
    )
    return PagedDriver(build_model_runner(config), seed=3)


@pytest.mark.parametrize("variant", _VARIANTS)
def test_logits_equal_transformers_in_prefill_and_paged_decode(
    tmp_path: Path, variant: str
) -> None:
    model = _reference(_VARIANTS[variant])
    model.save_pretrained(tmp_path)
    driver = _driver(tmp_path)
    ids = torch.randint(0, 131, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits[0]
    tokens = ids[0].tolist()
    row = driver.open(2)
    found = [driver.step([(row, tokens[:37])])[0], driver.step([(row, tokens[37:90])])[0]]
    found += [driver.step([(row, [token])])[0] for token in tokens[90:]]
    wanted = expected[[36, 89, *range(90, 100)]]
    torch.testing.assert_close(torch.stack(found), wanted, rtol=1e-4, atol=1e-4)


def test_rows_of_one_step_do_not_see_each_other(tmp_path: Path) -> None:
    model = _reference({})
    model.save_pretrained(tmp_path)
    driver = _driver(tmp_path)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 131, (n,), generator=generator).tolist() for n in (50, 21, 33)]
    rows = [driver.open(slot) for slot in (3, 0, 1)]
    driver.step([(rows[2], prompts[2][:-1])])
    # A long prefill, a short one and a decode row together; the second is not sampled.
    logits = driver.step(
        [(rows[0], prompts[0]), (rows[1], prompts[1]), (rows[2], prompts[2][-1:])], sample=[0, 2]
    )
    for found, prompt in zip(logits, (prompts[0], prompts[2]), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_near_the_float32_logits(tmp_path: Path) -> None:
    model = _reference({})
    model.save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        dtype="bfloat16",
        weights="dequantized",
        num_threads=1,
        page_size=16,
        kv_pool_tokens=512,
        max_slots=1,
    )
    driver = PagedDriver(build_model_runner(config))
    tokens = list(range(40))
    found = driver.prefill(driver.open(0), tokens, chunk=9)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.999


@pytest.mark.skipif(not has_compiled_decoder(), reason="the CPU kernels are not built")
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_compiled_decoder_stays_near_the_float32_logits(tmp_path: Path, is_tied: bool) -> None:
    """Default settings on a dense checkpoint: bf16 weights and KV, prefill, then decode."""
    changes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    model = _reference(
        {**changes, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": is_tied}
    )
    model.save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), page_size=16, kv_pool_tokens=512, max_slots=1)
    runner = build_model_runner(config)
    assert runner.layout.dtype == "bfloat16"
    driver = PagedDriver(runner, seed=4)
    tokens = torch.randint(0, 131, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    row = driver.open(0)
    found = [driver.prefill(row, tokens[:50], chunk=23)]
    found += [driver.step([(row, [token])])[0] for token in tokens[50:]]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, 49:]
    similarity = torch.nn.functional.cosine_similarity(torch.stack(found), expected, dim=1)
    assert float(similarity.min()) > 0.998
