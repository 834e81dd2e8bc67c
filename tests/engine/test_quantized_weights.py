# SPDX-License-Identifier: Apache-2.0
"""Low-bit checkpoints of every layout against a decoder of their own, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.weights.errors import ModelFormatError, UnsupportedModelError, WeightMismatchError
from engine.weights.hf import HfWeights
from engine.weights.quantized import QuantizedWeights, open_hf_weights
from kernels.reference.quant import dequantize_w4

_NAME = "model.layers.0.mlp.up_proj.weight"
_BASE = "model.layers.0.mlp.up_proj."
_N, _K = 6, 64
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def _compressed(stored: str, kind: str, group: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": kind, "group_size": group, "symmetric": True, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": groups}


def _write(directory: Path, spec: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (directory / "config.json").write_text(json.dumps({"quantization_config": spec}))
    save_file(tensors, directory / "model.safetensors")
    return directory


def _random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _e2m1(code: int) -> float:
    """Sign, two exponent bits (bias 1), one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def _e4m3(code: int) -> float:
    """Sign, four exponent bits (bias 7), three mantissa bits; 0x7f is NaN, there is no inf."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    magnitude = (
        mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    return -magnitude if sign else magnitude


def _nibbles(row: list[int]) -> list[int]:
    return [code for byte in row for code in (byte & 15, byte >> 4)]


def _grouped(rows: list[list[float]], scales: list[list[float]], group: int) -> torch.Tensor:
    """Each product rounded once to fp32, as an exact product of short mantissas is."""
    values = np.array(
        [
            [np.float32(value) * np.float32(scale[k // group]) for k, value in enumerate(row)]
            for row, scale in zip(rows, scales, strict=True)
        ],
        dtype=np.float32,
    )
    return torch.from_numpy(values)


def _fp4_rows(packed: torch.Tensor) -> list[list[float]]:
    return [[_e2m1(code) for code in _nibbles(row)] for row in packed.tolist()]


def _check(directory: Path, expected: torch.Tensor, w4_format: str | None) -> None:
    reader = open_hf_weights(directory)
    assert isinstance(reader, QuantizedWeights)
    assert reader.names == [_NAME]
    assert reader.shape(_NAME) == list(expected.shape)
    reader.check(_NAME, tuple(expected.shape))
    found = reader.dense(_NAME, tuple(expected.shape), torch.float32)
    assert torch.equal(found, expected)
    weight = reader.w4(_NAME, tuple(expected.shape))
    if w4_format is None:
        assert weight is None
    else:
        assert weight is not None and weight.format == w4_format
        assert torch.equal(dequantize_w4(weight), expected)


def _nvfp4_parts() -> tuple[torch.Tensor, torch.Tensor, list[list[float]]]:
    packed = _random_bytes(_N, _K // 2)
    scales = _random_bytes(_N, _K // 16, seed=1) & 0x7E  # positive, no NaN
    return packed, scales, [[_e4m3(code) for code in row] for row in scales.tolist()]


def test_modelopt_nvfp4(tmp_path: Path) -> None:
    packed, scales, decoded = _nvfp4_parts()
    top = np.float32(0.0123)
    tensors = {
        _BASE + "weight": packed,
        _BASE + "weight_scale": scales.view(torch.float8_e4m3fn),
        _BASE + "weight_scale_2": torch.tensor(top),
        _BASE + "input_scale": torch.tensor(1.0),
    }
    scaled = [[float(np.float32(s) * top) for s in row] for row in decoded]
    expected = _grouped(_fp4_rows(packed), scaled, 16)
    _check(_write(tmp_path, _MODELOPT, tensors), expected, "nvfp4")


def test_compressed_nvfp4_divides_by_its_global_scale(tmp_path: Path) -> None:
    packed, scales, decoded = _nvfp4_parts()
    tensors = {
        _BASE + "weight_packed": packed,
        _BASE + "weight_scale": scales.view(torch.float8_e4m3fn),
        _BASE + "weight_global_scale": torch.tensor([81.5]),
    }
    factor = np.float32(1) / np.float32(81.5)
    scaled = [[float(np.float32(s) * factor) for s in row] for row in decoded]
    expected = _grouped(_fp4_rows(packed), scaled, 16)
    spec = _compressed("nvfp4-pack-quantized", "float", 16)
    _check(_write(tmp_path, spec, tensors), expected, "nvfp4")


def test_compressed_mxfp4(tmp_path: Path) -> None:
    packed = _random_bytes(_N, _K // 2)
    scales = _random_bytes(_N, _K // 32, seed=1) % 40 + 107
    tensors = {_BASE + "weight_packed": packed, _BASE + "weight_scale": scales}
    powers = [[2.0 ** (code - 127) for code in row] for row in scales.tolist()]
    expected = _grouped(_fp4_rows(packed), powers, 32)
    spec = _compressed("mxfp4-pack-quantized", "float", 32)
    _check(_write(tmp_path, spec, tensors), expected, "mxfp4")


@pytest.mark.parametrize("has_powers", [False, True])
def test_compressed_int4(tmp_path: Path, has_powers: bool) -> None:
    """Codes are stored with 8 added, eight to a word, the first in the lowest bits."""
    words = _random_bytes(_N, _K // 2).view(torch.int32)
    generator = torch.Generator().manual_seed(4)
    scales = torch.rand(_N, _K // 32, generator=generator).to(torch.bfloat16)
    if has_powers:
        scales = torch.exp2(torch.floor(scales.float() * 8 - 10)).to(torch.bfloat16)
    tensors = {
        _BASE + "weight_packed": words,
        _BASE + "weight_scale": scales,
        _BASE + "weight_shape": torch.tensor([_N, _K]),
    }
    rows = [
        [float(((word >> (4 * i)) & 15) - 8) for word in row for i in range(8)]
        for row in words.tolist()
    ]
    expected = _grouped(rows, scales.float().tolist(), 32)
    spec = _compressed("pack-quantized", "int", 32)
    # Other scales than powers of two have no 4-bit kernel format.
    _check(_write(tmp_path, spec, tensors), expected, "mxint4" if has_powers else None)


@pytest.mark.parametrize("shape", [(128, 256), (130, 150)])
def test_fp8_blocks_may_be_cut_at_the_edges(tmp_path: Path, shape: tuple[int, int]) -> None:
    codes = _random_bytes(*shape)
    codes[(codes & 0x7F) == 0x7F] = 0
    grid = [-(-size // 128) for size in shape]
    scales = torch.rand(*grid, generator=torch.Generator().manual_seed(2))
    tensors = {_NAME: codes.view(torch.float8_e4m3fn), _BASE + "weight_scale_inv": scales}
    table = np.array([_e4m3(code) for code in range(256)], dtype=np.float32)
    expected = table[codes.numpy()]
    for row in range(shape[0]):
        for block in range(grid[1]):
            mine = slice(128 * block, 128 * block + 128)
            expected[row, mine] = expected[row, mine] * np.float32(scales[row // 128, block])
    _check(_write(tmp_path, _FP8, tensors), torch.from_numpy(expected), None)


def test_fused_mxfp4_experts_take_turns_of_gate_and_up_rows(tmp_path: Path) -> None:
    experts, width, hidden = 3, 4, 64
    prefix = "model.layers.0.mlp.experts"
    tensors = {
        f"{prefix}.gate_up_proj_blocks": _random_bytes(experts, 2 * width, hidden // 32, 16),
        f"{prefix}.gate_up_proj_scales": _random_bytes(experts, 2 * width, 2, seed=3) % 9 + 120,
        f"{prefix}.down_proj_blocks": _random_bytes(experts, hidden, 1, 16, seed=5),
        f"{prefix}.down_proj_scales": _random_bytes(experts, hidden, 1, seed=6) % 9 + 120,
        "model.norm.weight": torch.ones(4),
    }
    reader = open_hf_weights(_write(tmp_path, {"quant_method": "mxfp4"}, tensors))

    def decoded(part: str, expert: int) -> torch.Tensor:
        blocks = tensors[f"{prefix}.{part}_blocks"][expert].flatten(-2)
        scales = tensors[f"{prefix}.{part}_scales"][expert].tolist()
        powers = [[2.0 ** (code - 127) for code in row] for row in scales]
        return _grouped(_fp4_rows(blocks), powers, 32)

    for name, shape, expected in (
        ("2.gate_proj", (width, hidden), decoded("gate_up_proj", 2)[0::2]),
        ("1.up_proj", (width, hidden), decoded("gate_up_proj", 1)[1::2]),
    ):
        assert reader.has(f"{prefix}.{name}.weight")
        found = reader.dense(f"{prefix}.{name}.weight", shape, torch.float32)
        assert torch.equal(found, expected)
    with pytest.raises(WeightMismatchError, match=r"down_proj_blocks.*\[3, 64, 1, 16\]"):
        reader.check(f"{prefix}.0.down_proj.weight", (hidden, 64))
    down = (hidden, 32)
    found = reader.dense(f"{prefix}.0.down_proj.weight", down, torch.float32)
    assert torch.equal(found, decoded("down_proj", 0))
    with pytest.raises(WeightMismatchError, match="more than 3"):
        reader.check(f"{prefix}.3.down_proj.weight", down)
    assert torch.equal(reader.dense("model.norm.weight", (4,), torch.float32), torch.ones(4))


def test_a_missing_or_wrong_part_is_named_with_both_shapes(tmp_path: Path) -> None:
    packed, scales, _ = _nvfp4_parts()
    tensors = {
        _BASE + "weight": packed,
        _BASE + "weight_scale": scales[:, 1:].contiguous().view(torch.float8_e4m3fn),
    }
    reader = open_hf_weights(_write(tmp_path, _MODELOPT, tensors))
    with pytest.raises(WeightMismatchError, match=r"weight_scale'.*\[6, 3\], expected \[6, 4\]"):
        reader.check(_NAME, (_N, _K))
    tensors[_BASE + "weight_scale"] = scales.view(torch.float8_e4m3fn)
    reader = open_hf_weights(_write(tmp_path, _MODELOPT, tensors))
    with pytest.raises(WeightMismatchError, match=r"weight_scale_2'.*found none"):
        reader.check(_NAME, (_N, _K))
    del tensors[_BASE + "weight_scale"]
    reader = open_hf_weights(_write(tmp_path, _MODELOPT, tensors))
    with pytest.raises(WeightMismatchError, match=r"found shape \[6, 32\], expected \[6, 64\]"):
        reader.check(_NAME, (_N, _K))


def test_a_part_of_another_dtype_is_named(tmp_path: Path) -> None:
    packed, scales, _ = _nvfp4_parts()
    tensors = {
        _BASE + "weight": packed,
        _BASE + "weight_scale": scales.float(),
        _BASE + "weight_scale_2": torch.tensor(1.0),
    }
    reader = open_hf_weights(_write(tmp_path, _MODELOPT, tensors))
    with pytest.raises(WeightMismatchError, match=r"weight_scale'.*float32.*float8_e4m3fn"):
        reader.dense(_NAME, (_N, _K), torch.float32)


def test_codes_are_never_taken_for_plain_numbers(tmp_path: Path) -> None:
    tensors = {_NAME: _random_bytes(_N, _K)}
    reader = open_hf_weights(_write(tmp_path, _MODELOPT, tensors))
    with pytest.raises(WeightMismatchError, match=r"uint8, expected torch\.bfloat16 \| .*float32"):
        reader.dense(_NAME, (_N, _K), torch.float32)


def test_low_bit_numbers_without_their_scales_are_never_taken_for_plain_ones(
    tmp_path: Path,
) -> None:
    """Where the scales are missing, and where the configuration says nothing of them."""
    tensors = {_NAME: torch.ones(128, 128).to(torch.float8_e4m3fn)}
    for spec in (_FP8, {}):
        reader = open_hf_weights(_write(tmp_path, spec, tensors))
        with pytest.raises(WeightMismatchError, match=r"up_proj.weight': found .*float8_e4m3"):
            reader.check(_NAME, (128, 128))
        with pytest.raises(WeightMismatchError, match=r"up_proj.weight': found .*float8_e4m3"):
            reader.dense(_NAME, (128, 128), torch.float32)


def _layouts() -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """What each layout keeps one weight [_N, _K] in."""
    packed, scales, _ = _nvfp4_parts()
    e4m3, one = scales.view(torch.float8_e4m3fn), torch.ones(1)
    halves = torch.ones(_N, _K // 32, dtype=torch.bfloat16)
    words = packed.view(torch.int32)
    values = torch.ones(_N, _K).to(torch.float8_e4m3fn)
    return {
        "modelopt": (_MODELOPT, {"weight": packed, "weight_scale": e4m3, "weight_scale_2": one}),
        "nvfp4": (
            _compressed("nvfp4-pack-quantized", "float", 16),
            {"weight_packed": packed, "weight_scale": e4m3, "weight_global_scale": one},
        ),
        "mxfp4": (
            _compressed("mxfp4-pack-quantized", "float", 32),
            {"weight_packed": packed, "weight_scale": _random_bytes(_N, _K // 32)},
        ),
        "int4": (
            _compressed("pack-quantized", "int", 32),
            {"weight_packed": words, "weight_scale": halves},
        ),
        "fp8": (_FP8, {"weight": values, "weight_scale_inv": torch.ones(1, 1)}),
    }


@pytest.mark.parametrize("layout", ["modelopt", "nvfp4", "mxfp4", "int4", "fp8"])
def test_every_wrong_part_of_a_weight_is_named_before_anything_is_read(
    tmp_path: Path, layout: str
) -> None:
    spec, parts = _layouts()[layout]

    def check(changed: dict[str, torch.Tensor]) -> None:
        tensors = {_BASE + part: tensor for part, tensor in changed.items()}
        reader = open_hf_weights(_write(tmp_path, spec, tensors))
        reader.check(_NAME, (_N, _K))

    check(parts)
    for part, tensor in parts.items():
        missing = {name: other for name, other in parts.items() if name != part}
        with pytest.raises(WeightMismatchError, match=r"up_proj\.weight"):
            check(missing)
        wider = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1).to(tensor.dtype)
        with pytest.raises(WeightMismatchError, match=rf"{part}': found shape"):
            check({**parts, part: wider})
        with pytest.raises(WeightMismatchError, match=rf"{part}': found torch\.int16, expected"):
            check({**parts, part: torch.zeros(tensor.shape, dtype=torch.int16)})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'; supported: 'modelopt', 'comp"),
        ({"bits": 4}, "quant_method is None"),
        ({**_MODELOPT, "quant_algo": "FP8"}, "quant_algo is 'FP8'; supported: 'NVFP4'"),
        ({**_MODELOPT, "group_size": 32}, "group_size is 32; supported: 16"),
        ({**_FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8"}, r"weight_block_size is None; supported: \[128, 128\]"),
        (_compressed("pack-quantized", "int", 128), "group_size is 128; supported: 32"),
        (_compressed("pack-quantized", "int", 32, num_bits=8), "num_bits is 8; supported: 4"),
        (_compressed("pack-quantized", "int", 32, symmetric=False), "symmetric is False"),
        (_compressed("int-quantized", "int", 32), "format is 'int-quantized'; supported: 'nvfp4"),
        (
            {**_compressed("pack-quantized", "int", 32), "transform_config": {"config_groups": {}}},
            r"transform_config is \{'config_groups': \{\}\}; supported: None",
        ),
    ],
)
def test_a_layout_we_do_not_have_is_refused_by_field(
    tmp_path: Path, spec: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        open_hf_weights(_write(tmp_path, spec, {"a": torch.zeros(1)}))


@pytest.mark.parametrize(
    "spec",
    [
        {**_MODELOPT, "group_size": None},
        {**_FP8, "fmt": None},
        _compressed("pack-quantized", "int", 32, symmetric=None, actorder=None),
        {**_compressed("pack-quantized", "int", 32), "transform_config": {}},
    ],
)
def test_a_field_that_is_null_counts_as_missing(tmp_path: Path, spec: dict[str, Any]) -> None:
    assert isinstance(
        open_hf_weights(_write(tmp_path, spec, {"a": torch.zeros(1)})), QuantizedWeights
    )


@pytest.mark.parametrize("layout", ["modelopt", "nvfp4", "mxfp4", "int4", "fp8"])
def test_a_low_bit_vector_is_named(tmp_path: Path, layout: str) -> None:
    """Where a model asks for a vector, and where its codes have one axis."""
    spec, parts = _layouts()[layout]
    flat = {_BASE + part: tensor.flatten() for part, tensor in parts.items()}
    reader = open_hf_weights(_write(tmp_path, spec, flat))
    with pytest.raises(WeightMismatchError, match=r"up_proj\.weight': found shape \[\d+\], .*axes"):
        reader.check(_NAME, (_N * _K,))
    with pytest.raises(WeightMismatchError, match=r"up_proj\.weight"):
        reader.check(_NAME, reader.shape(_NAME))


def test_int4_scales_too_small_for_e8m0_are_no_mxint4(tmp_path: Path) -> None:
    spec, parts = _layouts()["int4"]
    for exponent, is_kept in ((-127, True), (-128, False), (-130, False)):
        scales = torch.full((_N, _K // 32), 2.0**exponent)
        tensors = {_BASE + part: tensor for part, tensor in parts.items()}
        tensors[f"{_BASE}weight_scale"] = scales
        reader = open_hf_weights(_write(tmp_path, spec, tensors))
        found = reader.w4(_NAME, (_N, _K))
        assert (found is not None) is is_kept
        if found is not None:
            dense = reader.dense(_NAME, (_N, _K), torch.float32)
            assert torch.equal(dequantize_w4(found), dense) and bool(dense.any())


def test_hf_quant_config_beside_the_configuration_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert isinstance(open_hf_weights(tmp_path), HfWeights)
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    assert isinstance(open_hf_weights(tmp_path), QuantizedWeights)
    beside.write_text(json.dumps({"quantization": {"quant_algo": "W4A8"}}))
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json.*'W4A8'"):
        open_hf_weights(tmp_path)
    beside.write_text("{")
    with pytest.raises(ModelFormatError, match=r"hf_quant_config\.json"):
        open_hf_weights(tmp_path)
