# SPDX-License-Identifier: Apache-2.0
"""DeepSeek models against transformers on tiny random checkpoints: logits and greedy text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.execution.model_runner import build_model_runner
from tests.fakes.live_engine import LiveEngine, make_request, run, serve
from tests.fakes.paged_driver import PagedDriver

_VOCAB = 131
_BASE: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
    "routed_scaling_factor": 1.0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
}
_V2: dict[str, dict[str, Any]] = {
    "v2_lite": {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "v2_with_groups": {
        "q_lora_rank": 20,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    },
    "v2_all_layers_sparse": {"first_k_dense_replace": 0, "n_shared_experts": 1},
}
_V3: dict[str, dict[str, Any]] = {
    "v3": {
        "q_lora_rank": 20,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "kimi_one_group": {
        "q_lora_rank": 24,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "v3_without_bells": {
        "norm_topk_prob": False,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "rope_interleave": False,
        "rope_parameters": {**_YARN},
    },
}
_ALL = [*_V2, *_V3]
_FREE = {"ignore_eos": True, "mask_control_tokens": False}  # as transformers samples here


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _reference(variant: str, directory: Path) -> Any:
    """A transformers model with weights far from their initial values, saved as it is."""
    torch.manual_seed(7)
    model: Any
    if variant in _V2:
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**{**_BASE, **_V2[variant]}))
    else:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**_BASE, **_V3[variant]}))
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif "correction_bias" in name:
                weight.uniform_(-0.2, 0.2)
            elif "inv_freq" not in name:
                weight.normal_(std=0.5 if "gate.weight" in name else 0.12)
    model.eval().save_pretrained(directory)
    return model


def _driver(directory: Path, dtype: str = "float32") -> PagedDriver:
    config = EngineConfig(
        model=str(directory),
        dtype=dtype,
        num_threads=1,
        page_size=16,
        kv_pool_tokens=2048,
        max_slots=4,
    )
    return PagedDriver(build_model_runner(config), seed=3)


def _ids(num: int, seed: int = 1) -> list[int]:
    return torch.randint(0, _VOCAB, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("variant", _ALL)
def test_logits_equal_transformers_in_prefill_chunks_and_paged_decode(
    tmp_path: Path, variant: str
) -> None:
    model = _reference(variant, tmp_path)
    driver = _driver(tmp_path)
    tokens = _ids(150)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    row = driver.open(2)
    # A short chunk (absorbed), a long one over the cached prefix (expanded), then single tokens.
    found = [driver.step([(row, tokens[:9])])[0], driver.step([(row, tokens[9:140])])[0]]
    found += [driver.step([(row, [token])])[0] for token in tokens[140:]]
    wanted = expected[[8, 139, *range(140, 150)]]
    scale = float(wanted.abs().max())
    torch.testing.assert_close(torch.stack(found), wanted, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("variant", ["v2_lite", "v3"])
def test_the_greedy_continuation_of_64_tokens_is_that_of_transformers(
    tmp_path: Path, variant: str
) -> None:
    model = _reference(variant, tmp_path)
    driver = _driver(tmp_path)
    prompt = _ids(40, seed=2)
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None
        )[0, 40:]
    row = driver.open(1)
    logits = driver.prefill(row, prompt, chunk=23)
    assert driver.greedy(row, logits, 64) == expected.tolist()


def test_prefill_and_decode_rows_share_a_step_and_a_prefix(tmp_path: Path) -> None:
    model = _reference("v3", tmp_path)
    driver = _driver(tmp_path)
    prefix, tails = _ids(32, seed=5), [_ids(n, seed=6 + n) for n in (30, 2, 5)]
    first = driver.open(3)
    driver.step([(first, prefix)])
    rows = [driver.open(slot, shared=first, shared_pages=2) for slot in (0, 1, 2)]
    driver.step([(rows[2], tails[2][:-1])])
    logits = driver.step(
        [(rows[0], tails[0]), (rows[1], tails[1]), (rows[2], tails[2][-1:]), (first, [7])]
    )
    for found, tail in zip(logits, [*tails, [7]], strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prefix + tail])).logits[0, -1]
        scale = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * scale)


def test_a_page_is_copied_with_all_its_layers(tmp_path: Path) -> None:
    _reference("v2_lite", tmp_path)
    driver = _driver(tmp_path)
    tokens = _ids(21)
    first = driver.open(0)
    driver.prefill(first, tokens)
    expected = driver.step([(first, [40])])
    forked = driver.open(1, shared=first, shared_pages=1)
    own_page = driver.free_pages.pop()
    forked.pages.append(own_page)
    forked.token_ids, forked.num_done = list(tokens), len(tokens)
    found = driver.step([(forked, [40])], copies=[(first.pages[1], own_page, 5)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("variant", ["v2_lite", "v3"])
def test_bfloat16_stays_near_the_float32_logits(tmp_path: Path, variant: str) -> None:
    """Tolerance: bf16 keeps 8 bits; three layers of it leave a cosine above 0.995."""
    model = _reference(variant, tmp_path)
    driver = _driver(tmp_path, "bfloat16")
    tokens = _ids(60)
    row = driver.open(0)
    found = [driver.prefill(row, tokens[:50], chunk=23)]
    found += [driver.step([(row, [token])])[0] for token in tokens[50:]]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, 49:]
    similarity = torch.nn.functional.cosine_similarity(torch.stack(found), expected, dim=1)
    assert float(similarity.min()) > 0.995, similarity


def test_conversations_served_by_the_whole_engine_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    """Scheduler, loop, chunked prefill, cached prefixes and sampler around the real model."""
    model = _reference("v3", tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        dtype="float32",
        num_threads=1,
        page_size=16,
        kv_pool_tokens=2048,
        max_slots=4,
    )
    runner = build_model_runner(config)

    def expected(prompt: list[int], num: int) -> list[int]:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=num, do_sample=False, eos_token_id=None
            )
        ids: list[int] = out[0, len(prompt) :].tolist()
        return ids

    shared = _ids(70, seed=20)
    prompts = [shared + _ids(n, seed=30 + n) for n in (1, 17, 40)]

    async def talk(client: EngineClient) -> None:
        first = await run(client, make_request("r0", shared, 4, sampling=_FREE))
        assert first.ids == expected(shared, 4)
        several = await asyncio.gather(
            *(
                run(client, make_request(f"r{i}x", prompt, 24, sampling=_FREE))
                for i, prompt in enumerate(prompts)
            )
        )
        for said, prompt in zip(several, prompts, strict=True):
            assert said.started is not None and said.started.cache.l1 >= 64
            assert said.ids == expected(prompt, 24)
        # A later turn: the whole history again, and more.
        history = prompts[1] + several[1].ids + _ids(9, seed=50)
        later = await run(client, make_request("r9", history, 24, sampling=_FREE))
        assert later.started is not None and later.started.cache.l1 > len(prompts[1])
        assert later.ids == expected(history, 24)

    serve(LiveEngine(str(tmp_path), runner, max_slots=4, token_budget=48), talk)
