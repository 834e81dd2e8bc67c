# SPDX-License-Identifier: Apache-2.0
"""DeepSeek decoders whose linears stay in 4 bits or fp8, and whose latents are kept in fp8."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.model_runner import PagedModelRunner, build_model_runner
from engine.models.deepseek import DeepseekForCausalLM
from engine.models.deepseek_config import deepseek_config_from_hf
from engine.models.model import LoadOptions
from engine.weights.reader import RandomWeights
from kernels.fp8_weight import Fp8Weight, quantize_fp8
from kernels.reference.quant import W4Weight, dequantize_w4, quantize_w4
from kernels.w4_layout import TiledW4
from kvtiers.device_pool import DevicePool
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import VOCAB_SIZE, write_tiny_deepseek

_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}


class _RoundedWeights(RandomWeights):
    """A checkpoint of low-bit linears, whose dense form is what the codes stand for."""

    def __init__(self, fmt: str) -> None:
        super().__init__()
        self._fmt = fmt

    def _plain(self, name: str, shape: Sequence[int]) -> torch.Tensor | None:
        if not name.endswith(("proj.weight", "mqa.weight")):
            return None
        return super().dense(name, shape, torch.float32)

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        w4, fp8 = self.w4(name, shape), self.fp8(name, shape)
        if w4 is not None:
            return dequantize_w4(w4).to(dtype)
        return super().dense(name, shape, dtype) if fp8 is None else fp8.dequantise(dtype)

    def w4(self, name: str, shape: Sequence[int]) -> W4Weight | None:
        plain = None if self._fmt == "fp8_block" else self._plain(name, shape)
        return None if plain is None else quantize_w4(plain, self._fmt)

    def fp8(self, name: str, shape: Sequence[int]) -> Fp8Weight | None:
        plain = self._plain(name, shape) if self._fmt == "fp8_block" else None
        return None if plain is None else quantize_fp8(plain)


def _driver(directory: Path, keep_packed: bool, fmt: str) -> PagedDriver:
    config = deepseek_config_from_hf(directory)
    options = LoadOptions(
        dtype=torch.float32, keep_packed=keep_packed, max_positions=512, max_rows=4
    )
    model = DeepseekForCausalLM.load(config, _RoundedWeights(fmt), options)
    attention = model._stack.layers[1].attention
    kind = Fp8Weight if fmt == "fp8_block" else TiledW4
    assert isinstance(attention.out, kind) is keep_packed
    assert isinstance(attention.q_kv_down, kind) is keep_packed
    pool = DevicePool(model.kv_layout(16, "float32"), 32, torch.device("cpu"))
    runner = PagedModelRunner(
        model, pool, max_slots=4, max_context_len=512, model_fingerprint="tiny"
    )
    return PagedDriver(runner, seed=1)


def _ids(num: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num,), generator=generator).tolist()


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxint4", "fp8_block"])
def test_linears_in_few_bits_give_what_their_values_give(tmp_path: Path, fmt: str) -> None:
    write_tiny_deepseek(tmp_path, **_SIZES)
    found = []
    for keep_packed in (False, True):
        driver = _driver(tmp_path, keep_packed, fmt)
        row = driver.open(1)
        logits = [driver.step([(row, _ids(30, 1))])[0]]
        logits += [driver.step([(row, [token])])[0] for token in _ids(3, 2)]
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[1], found[0], rtol=2e-4, atol=2e-4)


class _MixedWeights(_RoundedWeights):
    """One projection of one expert is plain, of shared experts another."""

    def _plain(self, name: str, shape: Sequence[int]) -> torch.Tensor | None:
        if name.endswith(("1.mlp.experts.5.up_proj.weight", "shared_experts.down_proj.weight")):
            return None
        return super()._plain(name, shape)


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_block"])
def test_experts_of_which_one_is_plain_are_all_expanded(tmp_path: Path, fmt: str) -> None:
    config = deepseek_config_from_hf(write_tiny_deepseek(tmp_path, **_SIZES))
    found = []
    for keep_packed in (False, True):
        options = LoadOptions(
            dtype=torch.float32, keep_packed=keep_packed, max_positions=512, max_rows=4
        )
        model = DeepseekForCausalLM.load(config, _MixedWeights(fmt), options)
        pool = DevicePool(model.kv_layout(16, "float32"), 8, torch.device("cpu"))
        runner = PagedModelRunner(
            model, pool, max_slots=4, max_context_len=64, model_fingerprint="tiny"
        )
        driver = PagedDriver(runner, seed=1)
        found.append(driver.step([(driver.open(1), _ids(30, 1))])[0])
    torch.testing.assert_close(found[1], found[0], rtol=2e-4, atol=2e-4)


def _engine_config(directory: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(directory),
        load_format="dummy",
        num_threads=1,
        page_size=16,
        kv_pool_tokens=2048,
        max_slots=4,
        max_context_len=512,
        **settings,
    )


def test_latents_in_fp8_stay_near_those_in_bf16(tmp_path: Path) -> None:
    """Tolerance: three mantissa bits are 3 % of a latent; random weights and experts that switch
    amplify them, so most steps are near (a median cosine above 0.98) and none is far off."""
    write_tiny_deepseek(tmp_path, **_SIZES)
    found = []
    for kv_dtype in ("bf16", "fp8"):
        config = _engine_config(tmp_path, dtype="bfloat16", kv_dtype=kv_dtype)
        runner = build_model_runner(config)
        driver = PagedDriver(runner, seed=1)
        row = driver.open(0)
        logits = [driver.step([(row, _ids(70, 3))])[0]]
        logits += [driver.step([(row, [token])])[0] for token in _ids(3, 4)]
        found.append(torch.stack(logits))
    similarity = torch.nn.functional.cosine_similarity(found[0], found[1], dim=1)
    assert 0.98 < float(similarity.median()) < 1.0
    assert float(similarity.min()) > 0.85


def test_a_page_in_fp8_is_copied_whole(tmp_path: Path) -> None:
    write_tiny_deepseek(tmp_path, **_SIZES)
    runner = build_model_runner(_engine_config(tmp_path, dtype="bfloat16", kv_dtype="fp8"))
    driver = PagedDriver(runner, seed=1)
    tokens = _ids(21, 5)
    first = driver.open(0)
    driver.prefill(first, tokens)
    expected = driver.step([(first, [40])])
    forked = driver.open(1, shared=first, shared_pages=1)
    own_page = driver.free_pages.pop()
    forked.pages.append(own_page)
    forked.token_ids, forked.num_done = list(tokens), len(tokens)
    found = driver.step([(forked, [40])], copies=[(first.pages[1], own_page, 5)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "float32", "kv_dtype": "fp8"}, "float32"),
        ({"dtype": "bfloat16", "kv_dtype": "fp8", "latent": 96}, "groups of 128"),
    ],
)
def test_kv_that_the_model_cannot_keep_so_is_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    latent = settings.pop("latent", 128)
    write_tiny_deepseek(tmp_path, **{**_SIZES, "kv_lora_rank": latent})
    with pytest.raises(ConfigError, match=reason) as caught:
        build_model_runner(_engine_config(tmp_path, **settings))
    assert "engine.kv_dtype" in str(caught.value)
