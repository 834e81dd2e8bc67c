# SPDX-License-Identifier: Apache-2.0
"""The GGUF reader against the `gguf` package, and against files that are wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.weights.errors import ModelFormatError, ModelNotFoundError, WeightMismatchError
from engine.weights.gguf import open_gguf
from engine.weights.gguf_blocks import BLOCK_FORMATS, dequantise_blocks
from engine.weights.gguf_repack import repack_blocks
from engine.weights.source import resolve_model
from kernels.packed_weight import pack_linear

_FORMATS = sorted(BLOCK_FORMATS.items())


def _random_blocks(type_id: int, num_blocks: int) -> np.ndarray:
    """Random bits with finite scales: fp16 fields are overwritten by small numbers."""
    form = BLOCK_FORMATS[type_id]
    rng = np.random.default_rng(type_id)
    if form.block_len == 1:
        values = rng.standard_normal(num_blocks).astype(np.float32)
        if form.name == "F32":
            return values.view(np.uint8).reshape(num_blocks, 4)
        if form.name == "F16":
            return values.astype(np.float16).view(np.uint8).reshape(num_blocks, 2)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2)
    blocks = rng.integers(0, 256, (num_blocks, form.block_bytes), dtype=np.uint8)
    for start in {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(form.name, (0, 2)):
        scale = rng.standard_normal(num_blocks).astype(np.float16)
        blocks[:, start : start + 2] = scale.view(np.uint8).reshape(num_blocks, 2)
    return blocks


@pytest.mark.parametrize(("type_id", "form"), _FORMATS, ids=[f.name for _, f in _FORMATS])
def test_every_block_format_expands_as_the_gguf_package_does(type_id: int, form: object) -> None:
    blocks = _random_blocks(type_id, 33)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(type_id)).reshape(-1)
    found = dequantise_blocks(blocks.reshape(-1), BLOCK_FORMATS[type_id].name)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q5_0"])
def test_repacked_blocks_say_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, but for products of scales that fp16 rounds. In pieces, the last one not whole."""
    monkeypatch.setattr("engine.weights.gguf_repack._BLOCKS_AT_ONCE", 10)
    (type_id,) = (number for number, form in BLOCK_FORMATS.items() if form.name == name)
    raw = _random_blocks(type_id, 57)
    raw[0, :2] = np.frombuffer(np.float16(6e-8).tobytes(), np.uint8)  # the smallest that is not 0
    raw[1, :2] = np.frombuffer(np.float16(-3e-5).tobytes(), np.uint8)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type_id)).reshape(-1, 32)
    repacked = repack_blocks(raw.reshape(-1), name)
    assert repacked is not None
    form, blocks = repacked
    weight = pack_linear(blocks, form, 32)
    found = weight.dequantise().numpy()
    if name != "Q4_K":
        np.testing.assert_array_equal(found, expected)
        return
    low, high = expected.min(axis=1, keepdims=True), expected.max(axis=1, keepdims=True)
    # Values are step * code - minimum, either rounded by 2^-11 of itself; codes go up to 15.
    size = np.maximum(np.abs(low), np.abs(high)) + 15 * np.abs(_steps_of(raw))
    assert (np.abs(found - expected) <= 2.0**-11 * 2 * size).all()
    assert (found != expected).any()


def _steps_of(raw: np.ndarray) -> np.ndarray:
    """The step of each 32 values of Q4_K blocks: with all codes 1 less with all codes 0."""
    kind = gguf.GGMLQuantizationType.Q4_K
    ones, zeros = raw.copy(), raw.copy()
    ones[:, 16:], zeros[:, 16:] = 0x11, 0
    difference = gguf.quants.dequantize(ones, kind) - gguf.quants.dequantize(zeros, kind)
    return difference.reshape(-1, 32)[:, :1]


@pytest.mark.parametrize("name", ["Q5_1", "Q5_K", "Q6_K"])
def test_blocks_of_more_bits_are_rounded_to_parts_of_their_largest_number(name: str) -> None:
    (type_id,) = (number for number, form in BLOCK_FORMATS.items() if form.name == name)
    raw = _random_blocks(type_id, 57)
    raw[3] = 0
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type_id)).reshape(-1, 32)
    repacked = repack_blocks(raw.reshape(-1), name)
    assert repacked is not None
    form, blocks = repacked
    assert form == "q8_0"
    found = pack_linear(blocks, form, 32).dequantise().numpy()
    largest = np.abs(expected).max(axis=1, keepdims=True)
    # Half a step, and the step's own rounding to fp16 times the largest code.
    assert (np.abs(found - expected) <= largest * (0.5 / 127 + 2.0**-11) * 1.0001).all()


def test_blocks_beyond_fp16_are_not_repacked() -> None:
    """The minimum of Q4_0 is eight steps."""
    assert repack_blocks(np.zeros(12, np.uint8), "F32") is None
    raw = _random_blocks(2, 3)
    assert repack_blocks(raw.reshape(-1), "Q4_0") is not None
    raw[1, :2] = np.frombuffer(np.float16(9000.0).tobytes(), np.uint8)
    assert repack_blocks(raw.reshape(-1), "Q4_0") is None


def _write(path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {
        "a.weight": rng.standard_normal((3, 5)).astype(np.float32),
        "b.weight": rng.standard_normal((4, 2)).astype(np.float16),
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("x.number", 7)
    writer.add_float64("x.double", 0.1)
    writer.add_bool("x.flag", True)
    writer.add_string("x.text", "caf\u00e9")
    writer.add_array("x.words", ["a", "", "\u4e2d"])
    writer.add_array("x.ints", [-1, 2, 3])
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    quantised = gguf.quants.quantize(
        rng.standard_normal((2, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("c.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors["c.weight"] = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    return tensors


def test_a_file_written_by_the_gguf_package_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tensors = _write(path)
    file = open_gguf(path)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["x.number"] == 7
    assert file.metadata["x.double"] == 0.1
    assert file.metadata["x.flag"] is True
    assert file.metadata["x.text"] == "caf\u00e9"
    assert file.metadata["x.words"] == ["a", "", "\u4e2d"]
    assert file.metadata["x.ints"] == [-1, 2, 3]
    assert set(file.tensors) == set(tensors)
    for name, value in tensors.items():
        assert file.tensors[name].shape == value.shape
        np.testing.assert_array_equal(file.dequantise(name), value.astype(np.float32))


def test_the_packaged_model_reads_as_documented() -> None:
    file = open_gguf(resolve_model("default").path)
    formats = [tensor.format_name for tensor in file.tensors.values()]
    assert {name: formats.count(name) for name in set(formats)} == {
        "Q4_1": 210,
        "F32": 61,
        "Q8_0": 1,
    }
    assert file.tensors["blk.0.ffn_down.weight"].shape == (576, 1536)
    assert file.metadata["tokenizer.ggml.pre"] == "smollm"
    row = file.raw("token_embd.weight")[: 612 * 4].reshape(4, 612)
    expected = gguf.quants.dequantize(row, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(file.dequantise("token_embd.weight")[:4], expected)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no\.gguf") as caught:
        open_gguf(tmp_path / "no.gguf")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be mapped"),
        (b"not a model file", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1; readable: 2, 3"),
        (b"GGUF" + struct.pack("<IQ", 3, 1), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 40), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "type 99"),
    ],
)
def test_a_damaged_header_is_one_clear_error(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=said):
        open_gguf(path)


def test_a_file_cut_inside_its_tensors_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    _write(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFormatError, match=r"tensor '[abc]\.weight' ends at byte"):
        open_gguf(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    _write(path)
    with pytest.raises(WeightMismatchError, match=r"tensor 'nope' is missing"):
        open_gguf(path).raw("nope")
