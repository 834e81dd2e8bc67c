# SPDX-License-Identifier: Apache-2.0
"""Whatever a config.json holds, it is read or refused by name: never another error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.shapes import V2_LITE
from engine.models.config import decoder_config_from_hf
from engine.models.deepseek_config import check_for_gpu, deepseek_config_from_hf
from engine.models.registry import architecture_of
from engine.text.assets import load_text_assets
from engine.text.errors import TextError
from engine.weights.config_fields import ConfigFields
from engine.weights.errors import ModelError, ModelFormatError, UnsupportedModelError
from tests.fakes.tiny_deepseek import CONFIG, write_tiny_deepseek

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "tie_word_embeddings": True,
    "quantization_config": None,
}
_GROUP = {
    "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True},
    "format": "pack-quantized",
}
_V3 = {
    **CONFIG,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "rope_scaling": {**V2_LITE["rope_scaling"], "attention_factor": 1.0, "truncate": True},
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": _GROUP},
    },
}
_FP8 = {
    **V2_LITE,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    },
}
_ODD = (
    None,
    "",
    "ten",
    [],
    [1],
    [None],
    {},
    {"a": 1},
    -1,
    0,
    1.5,
    1e400,
    10**12,
    10**400,
    True,
    False,
)
Read = Callable[[Path], object]


def _places(value: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every field, those of objects inside too."""
    if not isinstance(value, dict):
        return [path]
    inner = [place for key, item in value.items() for place in _places(item, (*path, key))]
    return [path, *inner] if path else inner


def _changed(config: Any, place: tuple[str, ...], odd: object) -> Any:
    first, *rest = place
    return {**config, first: _changed(config[first], tuple(rest), odd) if rest else odd}


@pytest.mark.parametrize(
    ("config", "read"),
    [
        (_V3, deepseek_config_from_hf),
        (_FP8, deepseek_config_from_hf),
        (_LLAMA, decoder_config_from_hf),
        (_LLAMA, architecture_of),
    ],
    ids=["v3", "v2_lite_fp8", "llama", "registry"],
)
def test_no_value_of_any_field_breaks_the_reader(
    tmp_path: Path, config: dict[str, Any], read: Read
) -> None:
    def ask(changed: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(changed))
        read(tmp_path)

    ask(config)
    for place in _places(config):
        for odd in _ODD:
            try:
                ask(_changed(config, place, odd))
            except ModelError as error:
                # A wrong value may first show in a field that depends on it.
                assert "config.json" in str(error), (place, odd, error)


@pytest.mark.parametrize("odd", [None, "ten", [], {}, -1, 0, 1.5, True])
@pytest.mark.parametrize(
    "field", ["hidden_size", "kv_lora_rank", "num_hidden_layers", "v_head_dim", "vocab_size"]
)
def test_a_size_that_is_none_is_named_with_what_is_allowed(
    tmp_path: Path, field: str, odd: object
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**_V3, field: odd}))
    with pytest.raises(ModelFormatError) as caught:
        deepseek_config_from_hf(tmp_path)
    assert f"{field} is {odd!r}; allowed: a whole number of 1 or more" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sliding_window": 128}, "sliding_window is 128; supported: None"),
        ({"index_topk": 2048}, "index_topk is 2048; supported: None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported: 1.0"),
        (
            {"rope_scaling": {**_V3["rope_scaling"], "truncate": False}},
            "truncate is False; supported: True",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
                "rope_scaling": None,
            },
            "partial_rotary_factor is 0.25; supported: 1.0",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**_V3, **changes}))
    with pytest.raises(UnsupportedModelError, match=said):
        deepseek_config_from_hf(tmp_path)


@pytest.mark.parametrize("odd", ["", [], {}, False])
@pytest.mark.parametrize(
    "place",
    [("topk_method",), ("scoring_func",), ("rope_scaling", "type"), ("rope_scaling", "rope_type")]
    + [("rope_scaling", name) for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")],
)
def test_an_empty_value_is_no_missing_one(
    tmp_path: Path, place: tuple[str, ...], odd: object
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_changed(_V3, place, odd)))
    name = place[-1].replace("rope_type", "type")
    with pytest.raises(ModelError, match=re.escape(f"{name} is {odd!r}; ")):
        deepseek_config_from_hf(tmp_path)


def test_null_says_as_little_as_a_missing_field(tmp_path: Path) -> None:
    optional = ("q_lora_rank", "num_key_value_heads", "rope_scaling", "topk_method", "rope_theta")
    with_nulls = {**_V3, **dict.fromkeys(optional)}
    without = {key: value for key, value in _V3.items() if key not in optional}
    found = []
    for config in (with_nulls, without):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found.append(deepseek_config_from_hf(tmp_path))
    assert found[0] == found[1]
    assert found[0].rope.kind == "default" and found[0].q_rank == 0


@pytest.mark.parametrize(
    ("base", "field"),
    [(_V3, name) for name in ("n_shared_experts", "routed_scaling_factor", "norm_topk_prob")]
    + [(_V3, "n_group"), (_V3, "topk_group"), (V2_LITE, "n_shared_experts")],
)
def test_what_readers_take_for_different_values_must_be_said(
    tmp_path: Path, base: dict[str, Any], field: str
) -> None:
    """transformers and the code that DeepSeek released have different defaults."""
    config = {key: value for key, value in base.items() if key != field}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match=f"key '{field}' is missing"):
        deepseek_config_from_hf(tmp_path)
    # A decoder without experts has no such fields.
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_routed_experts": None}))
    assert deepseek_config_from_hf(tmp_path).experts is None


@pytest.mark.parametrize("field", ["norm_topk_prob", "rope_interleave"])
def test_a_flag_that_readers_take_for_either_is_not_null(tmp_path: Path, field: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**_V3, field: None}))
    with pytest.raises(ModelFormatError, match=f"{field} is None; allowed: true or false"):
        deepseek_config_from_hf(tmp_path)


@pytest.mark.parametrize("read", [deepseek_config_from_hf, decoder_config_from_hf])
def test_two_forms_of_rope_must_say_the_same(tmp_path: Path, read: Read) -> None:
    """transformers lets the older one win where both are there."""
    base = _V3 if read is deepseek_config_from_hf else _LLAMA
    old = {**base["rope_scaling"], "attention_factor": None}
    new = {key: value for key, value in old.items() if key not in ("type", "rope_type")}
    new |= {"rope_type": old.get("type", old.get("rope_type")), "rope_theta": 10000.0}

    def ask(rope_parameters: object) -> object:
        config = {**base, "rope_scaling": old, "rope_parameters": rope_parameters}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read(tmp_path)

    assert ask(new) == ask(None) == ask({})
    others = [{**new, "factor": 2.0}, {"rope_type": "default", "rope_theta": 10000.0}]
    for other in [*others, {"rope_theta": 10000.0}, {**new, "beta_fast": 64}]:
        with pytest.raises(UnsupportedModelError, match="rope_scaling is .* beside rope_param"):
            ask(other)


def test_yarn_needs_waves_of_several_lengths(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**_V3, "rope_theta": 1}))
    with pytest.raises(UnsupportedModelError, match=r"rope_theta is 1\.0; supported with yarn"):
        deepseek_config_from_hf(tmp_path)


def test_a_whole_number_may_be_spelled_with_a_point() -> None:
    fields = ConfigFields({"a": 4096.0}, Path("config.json"))
    assert fields.whole("a") == 4096


@pytest.mark.parametrize(
    ("field", "size", "said"),
    [
        *(("kv_lora_rank", size, "powers of two from 16 on") for size in (8, 48, 384)),
        *(("qk_rope_head_dim", size, "powers of two from 16 on") for size in (8, 48)),
        ("hidden_size", 2044, "multiples of 8"),
        ("moe_intermediate_size", 1402, "multiples of 8"),
    ],
)
def test_sizes_that_gpu_kernels_do_not_take_are_named(
    tmp_path: Path, field: str, size: int, said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V2_LITE, field: size}))
    config = deepseek_config_from_hf(tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"{field} is {size}; .*on a GPU: {said}"):
        check_for_gpu(config)
    (tmp_path / "config.json").write_text(json.dumps(V2_LITE))
    check_for_gpu(deepseek_config_from_hf(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": -5}, "vocab_size is -5; allowed: a whole number of 1 or more"),
        ({"vocab_size": True}, "vocab_size is True; allowed"),
        ({"vocab_size": 10}, "vocab_size is 10; allowed: a whole number of 259 or more"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1; allowed"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; allowed: ids from 0 to 299"),
        ({"eos_token_id": [1, 300]}, r"eos_token_id is \[1, 300\]; allowed: ids from 0 to 299"),
        ({"eos_token_id": True}, "eos_token_id is True; allowed"),
    ],
)
def test_what_a_model_says_of_its_text_is_checked_too(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_tiny_deepseek(tmp_path, **changes)
    with pytest.raises(ModelFormatError, match=said):
        load_text_assets(str(tmp_path), load_format="dummy")


def test_any_value_of_any_field_gives_assets_or_a_refusal(tmp_path: Path) -> None:
    for place in [*_places(CONFIG), ("eos_token_id",)]:
        for odd in _ODD:
            changed = _changed({**CONFIG, "eos_token_id": 1}, place, odd)
            (tmp_path / "config.json").write_text(json.dumps(changed))
            try:
                load_text_assets(str(tmp_path), load_format="dummy")
            except (ModelError, TextError) as error:
                assert str(tmp_path) in str(error)
