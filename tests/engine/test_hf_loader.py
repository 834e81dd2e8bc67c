# SPDX-License-Identifier: Apache-2.0
"""Safetensors directories and GGUF files as weight readers; what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine.models.config import decoder_config_from_gguf, decoder_config_from_hf
from engine.weights.errors import (
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightMismatchError,
)
from engine.weights.gguf import open_gguf
from engine.weights.gguf_weights import GgufWeights
from engine.weights.hf import HfWeights
from engine.weights.quantized import open_hf_weights
from engine.weights.reader import RandomWeights

_CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**_CONFIG)).save_pretrained(tmp_path)
    return tmp_path


def test_one_file_and_shards_hold_the_same_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**_CONFIG))
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    readers = [HfWeights(tmp_path / "one"), HfWeights(tmp_path / "many")]
    for name, value in model.state_dict().items():
        for reader in readers:
            assert reader.has(name)
            assert torch.equal(reader.dense(name, value.shape, torch.float32), value)
            assert reader.packed(name, value.shape) is None


def test_a_missing_tensor_is_named_with_what_was_expected(checkpoint: Path) -> None:
    reader = HfWeights(checkpoint)
    assert not reader.has("model.layers.9.mlp.up_proj.weight")
    with pytest.raises(
        WeightMismatchError, match=r"layers\.9\.mlp\.up_proj.*found none.*shape \[64, 32\]"
    ) as caught:
        reader.dense("model.layers.9.mlp.up_proj.weight", (64, 32), torch.float32)
    assert caught.value.code == "weight_mismatch"


def test_a_tensor_of_another_shape_is_named_with_both(checkpoint: Path) -> None:
    with pytest.raises(
        WeightMismatchError,
        match=r"'model\.norm\.weight': found shape \[32\], expected \[33\]",
    ):
        HfWeights(checkpoint).dense("model.norm.weight", (33,), torch.float32)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no \\*.safetensors file"):
        HfWeights(tmp_path)


def test_an_index_that_names_a_missing_shard_says_which(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match="model-00001-of-00002"):
        HfWeights(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": [1]}', '{"weight_map": {"a": 5}}'],
)
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelFormatError, match=r"index\.json"):
        HfWeights(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("damage", ["a directory", "nested", "cut", "no text", "a list"])
def test_a_json_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, damage: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert isinstance(open_hf_weights(tmp_path), HfWeights)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if damage == "a directory":
        path.mkdir()
    else:
        texts = {
            "nested": b"[" * 100_000,
            "cut": b'{"a": ',
            "no text": b"\xff\xfe{",
            "a list": b"[]",
        }
        path.write_bytes(texts[damage])
    with pytest.raises(ModelFormatError, match=name.replace(".", r"\.")):
        open_hf_weights(tmp_path)


def test_an_index_with_a_name_no_file_can_have_is_named(tmp_path: Path) -> None:
    for odd in ("x" * 5000, "x\0y", "", ".", "/"):
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": odd}})
        )
        with pytest.raises(ModelNotFoundError, match="names files that are not there"):
            HfWeights(tmp_path)


def test_a_damaged_safetensors_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
        HfWeights(tmp_path)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    """Which one is meant only an index can say."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "more.safetensors")
    assert HfWeights(tmp_path).names == ["a", "b"]
    save_file({"b": torch.ones(2), "a": torch.ones(2)}, tmp_path / "more.safetensors")
    said = r"more\.safetensors: tensor 'a' is in model\.safetensors too; allowed: once"
    with pytest.raises(ModelFormatError, match=said):
        HfWeights(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not HfWeights(tmp_path).raw("a").any()


def test_config_json_is_read_as_written(checkpoint: Path) -> None:
    config = decoder_config_from_hf(checkpoint)
    assert (config.num_layers, config.hidden, config.ffn) == (2, 32, 64)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.vocab_size, config.max_context_len) == (64, 128)
    assert not config.is_tied
    assert config.rope.kind == "default"


def _write_config(directory: Path, changes: dict[str, Any]) -> None:
    base = {**_CONFIG, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
    (directory / "config.json").write_text(json.dumps({**base, **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "rope type is 'longrope'"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope type is 'dynamic'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_we_do_not_have_is_refused_not_ignored(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    _write_config(tmp_path, changes)
    with pytest.raises(UnsupportedModelError, match=said):
        decoder_config_from_hf(tmp_path)


def test_a_missing_key_of_config_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ModelFormatError, match="'num_attention_heads' is missing"):
        decoder_config_from_hf(tmp_path)


def _gguf_llama(path: Path, source: Path, quantise: bool) -> None:
    """Write a checkpoint as GGUF the way converters do: q and k rows interleaved."""
    state = load_file(source / "model.safetensors")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(64)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, value in state.items():
        array = value.float().numpy()
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                rows = array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
                array = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))
        stored = names.get_name(name, try_suffixes=(".weight",))
        kind = gguf.GGMLQuantizationType.Q4_1
        if quantise and array.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_the_tensors_it_was_converted_from(checkpoint: Path) -> None:
    path = checkpoint / "model.gguf"
    _gguf_llama(path, checkpoint, quantise=False)
    file = open_gguf(path)
    config = decoder_config_from_gguf(file.metadata, file.tensors)
    reference = decoder_config_from_hf(checkpoint)
    assert (config.rope.theta, config.rope.kind) == (reference.rope.theta, "default")
    assert (config.head_dim, config.num_kv_heads, config.rms_eps) == (8, 2, 1e-6)
    assert not config.is_tied
    reader = GgufWeights(file, config.head_dim)
    for name, value in load_file(checkpoint / "model.safetensors").items():
        assert torch.equal(reader.dense(name, value.shape, torch.float32), value), name
        assert reader.packed(name, value.shape) is None


def test_packed_rows_are_put_in_order_like_dense_ones(checkpoint: Path) -> None:
    path = checkpoint / "model.gguf"
    _gguf_llama(path, checkpoint, quantise=True)
    reader = GgufWeights(open_gguf(path), 8)
    for part, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
        name = f"model.layers.1.self_attn.{part}.weight"
        packed = reader.packed(name, (rows, 32))
        assert packed is not None
        assert torch.equal(packed.dequantise(), reader.dense(name, (rows, 32), torch.float32))


def test_a_gguf_tensor_of_another_shape_is_named_with_both(checkpoint: Path) -> None:
    path = checkpoint / "model.gguf"
    _gguf_llama(path, checkpoint, quantise=False)
    reader = GgufWeights(open_gguf(path), 8)
    with pytest.raises(
        WeightMismatchError, match=r"'output_norm\.weight': found shape \[32\], expected \[31\]"
    ):
        reader.dense("model.norm.weight", (31,), torch.float32)
    with pytest.raises(WeightMismatchError, match=r"'blk\.7\.attn_q\.weight'.*found none"):
        reader.packed("model.layers.7.self_attn.q_proj.weight", (32, 32))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.architecture": "gemma"}, "'gemma'; supported: 'llama', 'qwen2', 'qwen3'"),
        ({"llama.rope.scaling.type": "yarn"}, "scaling.type is 'yarn'"),
        ({"llama.rope.dimension_count": 4}, "dimension_count is 4"),
    ],
)
def test_gguf_features_we_do_not_have_are_refused(
    checkpoint: Path, changes: dict[str, Any], said: str
) -> None:
    path = checkpoint / "model.gguf"
    _gguf_llama(path, checkpoint, quantise=False)
    file = open_gguf(path)
    with pytest.raises(UnsupportedModelError, match=said):
        decoder_config_from_gguf({**file.metadata, **changes}, file.tensors)


def test_random_weights_are_the_same_each_time_and_differ_by_name() -> None:
    reader = RandomWeights()
    first = reader.dense("model.layers.0.mlp.up_proj.weight", (8, 4), torch.float32)
    again = RandomWeights().dense("model.layers.0.mlp.up_proj.weight", (8, 4), torch.float32)
    other = reader.dense("model.layers.1.mlp.up_proj.weight", (8, 4), torch.float32)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("dtype", "named"), [(torch.int8, "torch.int8"), (torch.uint16, "U16"), (torch.uint64, "U64")]
)
def test_a_dtype_that_means_nothing_is_named(
    tmp_path: Path, dtype: torch.dtype, named: str
) -> None:
    save_file({"a.weight": torch.zeros(2, 3, dtype=dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatchError, match=f"'a.weight': found {named}, expected torch"):
        HfWeights(tmp_path).check("a.weight", (2, 3))


def test_the_checkpoint_written_back_is_bit_equal(checkpoint: Path) -> None:
    """bf16 files stay what they are when bf16 is asked for."""
    state = {
        k: v.to(torch.bfloat16) for k, v in load_file(checkpoint / "model.safetensors").items()
    }
    save_file(state, checkpoint / "model.safetensors")
    reader = HfWeights(checkpoint)
    for name, value in state.items():
        assert torch.equal(reader.dense(name, value.shape, torch.bfloat16), value)
