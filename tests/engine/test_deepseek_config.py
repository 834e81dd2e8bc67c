# SPDX-License-Identifier: Apache-2.0
"""DeepSeek configurations: released ones are read, others refused by name, dummies served."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.model_loading import load_model
from engine.execution.model_runner import build_model_runner
from engine.models.deepseek import DeepseekForCausalLM
from engine.models.deepseek_config import deepseek_config_from_hf
from engine.models.model import LoadOptions
from engine.text.assets import load_text_assets
from engine.text.errors import TokenizerError
from engine.weights.errors import (
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightMismatchError,
)
from engine.weights.hf import HfWeights
from engine.weights.quant_writer import quantization_config
from kernels.selection import set_override
from kvtiers.errors import PoolTooSmallError
from tests.fakes.paged_driver import PagedDriver

# As their authors published them, fields that matter here.
_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
_V3: dict[str, Any] = {
    **_V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**_V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
_KIMI_K2: dict[str, Any] = {
    **_V3,
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
_TINY: dict[str, Any] = {
    "vocab_size": 290,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 128,
}


def _write(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_v2_lite_is_read_as_published(tmp_path: Path) -> None:
    config = deepseek_config_from_hf(_write(tmp_path, _V2_LITE))
    assert (config.num_layers, config.num_heads, config.q_rank) == (27, 16, 0)
    assert (config.latent_dim, config.head_dim, config.v_dim) == (512, 192, 128)
    assert sum(config.moe_layers) == 26 and not config.moe_layers[0]
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.top_k) == (64, 6)
    assert (config.experts.score, config.experts.has_bias) == ("softmax", False)
    # Equal mscale and mscale_all_dim: cos and sin stay, the softmax is scaled.
    assert config.rope.attention_factor == 1.0
    mscale = 0.1 * 0.707 * math.log(40) + 1
    assert config.softmax_scale == pytest.approx(192**-0.5 * mscale**2)


@pytest.mark.parametrize(
    ("published", "num_experts", "groups", "kept"), [(_V3, 256, 8, 4), (_KIMI_K2, 384, 1, 1)]
)
def test_v3_and_kimi_route_by_sigmoid_with_a_bias(
    tmp_path: Path, published: dict[str, Any], num_experts: int, groups: int, kept: int
) -> None:
    config = deepseek_config_from_hf(_write(tmp_path, published))
    assert config.q_rank == 1536 and config.experts is not None
    experts = config.experts
    assert (experts.num_experts, experts.num_groups, experts.groups_kept) == (
        num_experts,
        groups,
        kept,
    )
    assert (experts.score, experts.group_score) == ("sigmoid", "top2")
    assert experts.has_bias and experts.renormalise
    assert experts.scale == published["routed_scaling_factor"]
    assert config.is_rope_interleaved


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; supported: False"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads is 4; .*num_attention_heads \(128\)"),
        ({"topk_method": "mystery"}, "topk_method is 'mystery'; supported: greedy"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; .*'noaux_tc': 'sigmoid'"),
        ({"n_group": 7}, "n_group is 7; supported: a divisor of n_routed_experts"),
        ({"topk_group": 9}, "topk_group is 9; supported: 1 to 8"),
        ({"n_group": 256, "topk_group": 8}, "n_group is 256; .*'noaux_tc': groups of at least 2 "),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17; supported: 1 to 16"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type is 'longrope'; supported: default, ya"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; supported: even"),
    ],
)
def test_a_feature_we_do_not_have_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        deepseek_config_from_hf(_write(tmp_path, {**_V3, **changes}))


def test_a_v2_rotates_pairs_as_others_compute_it(tmp_path: Path) -> None:
    for value in (True, False):
        _write(tmp_path, {**_V3, "rope_interleave": value})
        assert deepseek_config_from_hf(tmp_path).is_rope_interleaved is value
    assert deepseek_config_from_hf(
        _write(tmp_path, {**_V2_LITE, "rope_interleave": True})
    ).is_rope_interleaved
    with pytest.raises(UnsupportedModelError, match=r"rope_interleave is False; .*V2: True"):
        deepseek_config_from_hf(_write(tmp_path, {**_V2_LITE, "rope_interleave": False}))


def test_renormalised_softmax_routing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="norm_topk_prob is True"):
        deepseek_config_from_hf(_write(tmp_path, {**_V2_LITE, "norm_topk_prob": True}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is None; allowed: a whole number of 1 or more"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings"),
    ],
)
def test_a_damaged_value_is_a_format_error(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelFormatError, match=said):
        deepseek_config_from_hf(_write(tmp_path, {**_V3, **changes}))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    config = {key: value for key, value in _V3.items() if key != "v_head_dim"}
    with pytest.raises(ModelFormatError, match="'v_head_dim' is missing"):
        deepseek_config_from_hf(_write(tmp_path, config))


class CountingWeights(HfWeights):
    """Counts the tensors that are read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.num_read = 0

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.num_read += 1
        return super().dense(name, shape, dtype)


_LAST = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        (_LAST, None, r"experts\.3\.down_proj.*found none.*expected shape \[32, 16\]"),
        (_LAST, [32, 8], r"experts\.3\.down_proj.*found shape \[32, 8\], expected \[32, 16\]"),
        ("lm_head.weight", [290, 31], r"lm_head.*found shape \[290, 31\], expected \[290, 32\]"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", None, "correction_bias.*found none"),
    ],
)
def test_a_bad_tensor_is_named_before_any_is_read(
    tmp_path: Path, name: str, found: list[int] | None, said: str
) -> None:
    DeepseekV3ForCausalLM(DeepseekV3Config(**_TINY)).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state[name]
    if found is not None:
        state[name] = torch.zeros(found)
    save_file(state, tmp_path / "model.safetensors")
    reader = CountingWeights(tmp_path)
    options = LoadOptions(dtype=torch.float32, keep_packed=False, max_positions=128)
    with pytest.raises(WeightMismatchError, match=said):
        DeepseekForCausalLM.load(deepseek_config_from_hf(tmp_path), reader, options)
    assert reader.num_read == 0


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**_TINY)).eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    settings: dict[str, Any] = {"num_threads": 1, "page_size": 16, "kv_pool_tokens": 256}
    runner = build_model_runner(EngineConfig(model=str(tmp_path), dtype="float32", **settings))
    driver = PagedDriver(runner)
    tokens = list(range(60, 90))
    found = driver.prefill(driver.open(0), tokens)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_dummy_weights_need_neither_checkpoint_nor_tokenizer(tmp_path: Path) -> None:
    _write(tmp_path, {**_V3, **_TINY})
    settings: dict[str, Any] = {"num_threads": 1, "page_size": 16, "kv_pool_tokens": 256}
    config = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float32", **settings)
    driver = PagedDriver(build_model_runner(config))
    row = driver.open(0)
    ids = driver.greedy(row, driver.prefill(row, [5, 6, 7]), 8)
    again = PagedDriver(build_model_runner(config))
    other = again.open(1)
    assert again.greedy(other, again.prefill(other, [5, 6, 7]), 8) == ids
    assets = load_text_assets(str(tmp_path), load_format="dummy")
    assert assets.vocab_size == 290
    assert assets.tokenizer.encode("hi") == [104, 105]
    assert all(assets.token_bytes[i] for i in range(287))
    assert assets.control_token_ids == (287, 288, 289)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_text_assets(str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    _write(tmp_path, {**_V3, **_TINY})
    config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cuda")
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda'.*torch finds no GPU"):
        build_model_runner(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"kv_dtype": "fp8"},
            r"engine\.kv_dtype = 'fp8': allowed: auto, as activations are float32",
        ),
        ({"kv_dtype": "fp8", "dtype": "bfloat16"}, r"engine\.kv_dtype = 'fp8'.*groups of 128"),
        ({"kernels": "mla_decode=nothing"}, r"engine\.kernels = 'mla_decode=nothing'"),
        ({"kernels": "mla_prefill=flash"}, r"'mla_prefill=flash'.*this cpu runs.*one of cuda"),
        ({"weights": "packed"}, r"engine\.weights = 'packed'"),
        ({"max_context_len": 129}, r"engine\.max_context_len = 129"),
        ({"speculation": "mtp"}, r"engine\.speculation = 'mtp'"),
    ],
)
def test_a_setting_that_does_not_fit_is_named_before_weights_are_looked_for(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    _write(tmp_path, {**_V3, **_TINY, "num_nextn_predict_layers": 0})
    with pytest.raises(ConfigError, match=said):
        build_model_runner(EngineConfig(model=str(tmp_path), device="cpu", **changes))
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors"):
        build_model_runner(EngineConfig(model=str(tmp_path), device="cpu"))


def test_a_kernel_that_refuses_the_model_s_calls_is_named_with_its_reason(tmp_path: Path) -> None:
    pytest.importorskip("_cpu_kernels")
    _write(tmp_path, {**_V3, **_TINY})
    kernels = "linear=cpu_portable"
    said = r"engine\.kernels = 'linear=.*weight is fp32"
    settings: dict[str, Any] = {"num_threads": 1, "page_size": 16, "kv_pool_tokens": 256}
    config = EngineConfig(model=str(tmp_path), load_format="dummy", kernels=kernels, **settings)
    try:
        with pytest.raises(ConfigError, match=said) as caught:
            build_model_runner(config)
        assert "\n" not in str(caught.value)
    finally:
        set_override("linear", None)


def test_a_pool_that_holds_no_request_is_refused_before_weights_are_looked_for(
    tmp_path: Path,
) -> None:
    _write(tmp_path, {**_V3, **_TINY, "max_position_embeddings": 1000})
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_pool_tokens=999)
    with pytest.raises(PoolTooSmallError, match="15 KV pages of 64 tokens.*1000 tokens needs 16"):
        build_model_runner(config)


def test_sizes_without_gpu_kernels_are_named_before_weights_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _write(tmp_path, {**_V3, "kv_lora_rank": 384})
    with pytest.raises(UnsupportedModelError, match="kv_lora_rank is 384; supported on a GPU"):
        load_model(EngineConfig(model=str(tmp_path)))


def test_a_model_without_gpu_kernels_says_so() -> None:
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda': allowed: auto \| cpu"):
        build_model_runner(EngineConfig(device="cuda"))


def test_four_bit_weights_stay_packed_on_a_gpu_alone(tmp_path: Path) -> None:
    quant = quantization_config("nvfp4", [])
    _write(tmp_path, {**_V3, **_TINY, "quantization_config": quant})
    config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", weights="packed")
    with pytest.raises(ConfigError, match=r"engine\.weights = 'packed'"):
        build_model_runner(config)
