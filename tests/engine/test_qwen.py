# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen3 against transformers on tiny random checkpoints, safetensors and GGUF."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.config import EngineConfig
from engine.execution.model_loading import check_model, has_compiled_decoder
from engine.execution.model_runner import PagedModelRunner, build_model_runner
from engine.models.config import decoder_config_from_gguf, decoder_config_from_hf
from engine.text.assets import load_text_assets
from engine.weights.errors import ModelFormatError, UnsupportedModelError, WeightMismatchError
from engine.weights.gguf import open_gguf
from kernels.packed_weight import weight_format
from tests.fakes.paged_driver import PagedDriver

_BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    # Written by Qwen2 of old: a window that is not used.
    "qwen2_window": ("qwen2", {"sliding_window": 32, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_wide_tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_linear_rope": (
        "qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "qwen2_yarn": (
        "qwen2",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
_IDS = torch.randint(0, 131, (100,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _reference(directory: Path, family: str, changes: dict[str, Any]) -> PreTrainedModel:
    """A model of random weights, saved; what starts at zero or one would hide that it is unused."""
    torch.manual_seed(7)
    settings = {**_BASE, **changes}
    model: PreTrainedModel
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**settings))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_()
            else:
                weight.mul_(4.0)
    model.eval().save_pretrained(directory)
    return model


def _logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def _plain(model: Path, **settings: Any) -> PagedDriver:
    config = EngineConfig(
        model=str(model), dtype="float32", weights="dequantized", num_threads=1,
        page_size=16, kv_pool_tokens=2048, max_slots=4, **settings,
    )  # fmt: skip
    return PagedDriver(build_model_runner(config), seed=3)


def _chunked_then_decoded(driver: PagedDriver) -> torch.Tensor:
    """Logits behind tokens 37, 90 and each of the ten after."""
    row = driver.open(2)
    found = [driver.step([(row, _IDS[:37])])[0], driver.step([(row, _IDS[37:90])])[0]]
    found += [driver.step([(row, [token])])[0] for token in _IDS[90:]]
    return torch.stack(found)


@pytest.mark.parametrize("variant", _VARIANTS)
def test_logits_equal_transformers_in_prefill_and_paged_decode(
    tmp_path: Path, variant: str
) -> None:
    model = _reference(tmp_path, *_VARIANTS[variant])
    expected = _logits(model, _IDS)[[36, 89, *range(90, 100)]]
    found = _chunked_then_decoded(_plain(tmp_path))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not has_compiled_decoder(), reason="the CPU kernels are not built")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_compiled_decoder_stays_near_the_float32_logits(tmp_path: Path, family: str) -> None:
    """Default settings: bf16 weights and KV."""
    model = _reference(tmp_path, family, {"head_dim": 32})
    config = EngineConfig(model=str(tmp_path), page_size=16, kv_pool_tokens=512, max_slots=4)
    driver = PagedDriver(build_model_runner(config), seed=4)
    assert driver.runner.layout.dtype == "bfloat16"
    found = _chunked_then_decoded(driver)
    expected = _logits(model, _IDS)[[36, 89, *range(90, 100)]]
    assert torch.nn.functional.cosine_similarity(found, expected, dim=1).min() > 0.998


def _write_gguf(source: Path, path: Path, family: str, kind: gguf.GGMLQuantizationType) -> None:
    """As converters do: rows of q and k as they are, biases and norms in fp32."""
    arch = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[family]
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if family == "qwen3":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, value in load_file(source / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        array = value.float().numpy()
        if array.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("family", "head_dim"), [("qwen2", 16), ("qwen3", 32)])
def test_a_gguf_file_computes_what_its_numbers_say(
    tmp_path: Path, family: str, head_dim: int
) -> None:
    """transformers, given the numbers that the file's blocks stand for."""
    model = _reference(tmp_path, family, {} if family == "qwen2" else {"head_dim": head_dim})
    path, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0
    _write_gguf(tmp_path, path, family, kind)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                rounded = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
                weight.copy_(torch.from_numpy(np.ascontiguousarray(rounded)))
    file = open_gguf(path)
    read = decoder_config_from_gguf(file.metadata, file.tensors)
    written = decoder_config_from_hf(tmp_path)
    assert (read.architecture, read.head_dim) == (written.architecture, head_dim)
    # Which context a rope is stretched from, a file without a stretch does not say.
    assert replace(read, rope=replace(read.rope, original_context_len=256)) == written
    expected = _logits(model, _IDS)[[36, 89, *range(90, 100)]]
    found = _chunked_then_decoded(_plain(path))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not has_compiled_decoder(), reason="the CPU kernels are not built")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_blocks_of_a_gguf_file_stay_packed(tmp_path: Path, family: str) -> None:
    """Default settings: Q4_0 as the kernels' Q4_1, with activations of 8 bits."""
    _reference(tmp_path, family, {"head_dim": 32, "num_attention_heads": 2})
    path, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_0
    _write_gguf(tmp_path, path, family, kind)
    config = EngineConfig(model=str(path), page_size=16, kv_pool_tokens=512, max_slots=4)
    runner = build_model_runner(config)
    assert isinstance(runner, PagedModelRunner)
    stack = runner._model.stack
    assert {weight_format(layer.qkv) for layer in stack.layers} == {"q4_1"}
    found = _chunked_then_decoded(PagedDriver(runner, seed=4))
    expected = _chunked_then_decoded(_plain(path))
    assert torch.nn.functional.cosine_similarity(found, expected, dim=1).min() > 0.99


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True; supported: False"),
        ("qwen2", {"attention_bias": False}, "attention_bias is False; supported: True"),
        ("qwen2", {"qkv_bias": False}, "qkv_bias is False; supported: True"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True; supported: False"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types is .*sliding_attention.*; supported: 'full_attention'",
        ),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic"}}, "rope type is 'dynamic'"),
    ],
)
def test_what_we_do_not_have_is_refused_not_ignored(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    names = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    config = {**_BASE, "head_dim": 16, "architectures": [names[family]], **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=said):
        decoder_config_from_hf(tmp_path)


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_yarn_stretches_the_context_that_the_file_names(tmp_path: Path, field: str) -> None:
    """As the model cards of Qwen2.5 and Qwen3 have it: the file's own length stays as it was."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {**_BASE, "head_dim": 16, "architectures": ["Qwen3ForCausalLM"]}
    config |= {"vocab_size": 300, "max_position_embeddings": 40960}
    config |= {"rope_parameters": None, field: yarn}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert decoder_config_from_hf(tmp_path).max_context_len == 131072
    assert load_text_assets(str(tmp_path), load_format="dummy").max_context_len == 131072
    yarn["factor"] = 1e9
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match=rf"{field}\.factor is 1000000000\.0; allowed"):
        decoder_config_from_hf(tmp_path)


def test_a_context_of_several_chunks_ends_with_the_first(tmp_path: Path) -> None:
    """As Qwen2.5-1M has it: within a chunk its attention is the plain one."""
    dual = {"chunk_size": 4096, "local_size": 512, "original_max_position_embeddings": 4096}
    config = {**_BASE, "architectures": ["Qwen2ForCausalLM"], "vocab_size": 300}
    config |= {"max_position_embeddings": 16384, "dual_chunk_attention_config": dual}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert decoder_config_from_hf(tmp_path).max_context_len == 3584
    assert load_text_assets(str(tmp_path), load_format="dummy").max_context_len == 3584
    dual["chunk_size"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match="dual_chunk_attention_config.chunk_size is 0"):
        decoder_config_from_hf(tmp_path)


def test_qwen3_says_its_head_dim(tmp_path: Path) -> None:
    """Some readers take 128 where it is missing, others hidden_size / num_attention_heads."""
    config = {**_BASE, "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match="'head_dim' is missing"):
        decoder_config_from_hf(tmp_path)


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.2.self_attn.q_norm.weight"),
    ],
)
def test_a_missing_bias_or_norm_is_named_before_any_tensor_is_read(
    tmp_path: Path, family: str, tensor: str
) -> None:
    model = _reference(tmp_path, family, {"head_dim": 16})
    state = {name: value for name, value in model.state_dict().items() if name != tensor}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(WeightMismatchError, match=f"'{tensor}'"):
        check_model(EngineConfig(model=str(tmp_path)))


def _gguf_metadata(changes: dict[str, Any], family: str = "qwen2") -> dict[str, Any]:
    values = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 131,
        **changes,
    }
    named = {f"{family}.{key}": value for key, value in values.items()}
    return {"general.architecture": family, **named}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"attention.head_count_kv": [2, 1]},
            r"qwen2.attention.head_count_kv is \[2, 1\]; allowed: a whole number of 1 or more",
        ),
        ({"attention.head_count_kv": 3}, r"head_count_kv is 3; supported: a divisor of .*\(4\)"),
        ({"attention.head_count": 0}, "qwen2.attention.head_count is 0; allowed"),
        ({"vocab_size": None}, "qwen2.vocab_size is None; allowed"),
        ({"rope.scaling.factor": -1.0}, "qwen2.rope.scaling.factor is -1.0; allowed"),
    ],
)
def test_a_gguf_value_that_does_not_fit_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=said):
        decoder_config_from_gguf(_gguf_metadata(changes), {})


@pytest.mark.parametrize(
    ("family", "tensor", "said"),
    [
        ("llama", "blk.0.attn_q.bias", "in llama: none"),
        ("qwen2", "blk.1.attn_output.bias", "in qwen2: attn_k.bias, attn_q.bias, attn_v.bias"),
        ("qwen2", "blk.0.attn_k_norm.weight", "in qwen2: attn_k.bias, attn_q.bias, attn_v.bias"),
        ("qwen3", "blk.0.attn_v.bias", "in qwen3: attn_k_norm.weight, attn_q_norm.weight"),
        ("qwen3", "output.bias", "in qwen3"),
    ],
)
def test_biases_and_norms_of_a_gguf_file_are_refused_not_left_out(
    family: str, tensor: str, said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"found '{tensor}'; .*{said}"):
        decoder_config_from_gguf(_gguf_metadata({}, family), {tensor: None})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"rope.scale_linear": 4.0}, ("linear", 4.0)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, ("linear", 1.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, ("default", 4.0)),
    ],
)
def test_rope_factors_of_a_gguf_file_count_as_llama_cpp_has_it(
    changes: dict[str, Any], found: tuple[str, float]
) -> None:
    rope = decoder_config_from_gguf(_gguf_metadata(changes), {}).rope
    assert (rope.kind, rope.factor) == found
