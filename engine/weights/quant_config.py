# SPDX-License-Identifier: Apache-2.0
"""Which low-bit layout a Hugging Face checkpoint says it has. Torch-free.

Does not know: tensors (stored_formats reads them). Layouts:

    modelopt_nvfp4   quant_method modelopt, quant_algo NVFP4 (or hf_quant_config.json beside it)
    packed_nvfp4     compressed-tensors, format nvfp4-pack-quantized
    packed_mxfp4     compressed-tensors, format mxfp4-pack-quantized
    packed_int4      compressed-tensors, format pack-quantized, 4-bit int, group 32, symmetric
    fp8_block        quant_method fp8, e4m3 with one scale per weight_block_size
    fused_mxfp4      quant_method mxfp4, experts fused in *_blocks and *_scales
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.weights.errors import ModelFormatError, UnsupportedModelError

GROUP_LEN = 32
NVFP4_GROUP_LEN = 16
_METHODS = ("modelopt", "compressed-tensors", "fp8", "mxfp4")
_WANTED_WEIGHTS: dict[str, dict[str, object]] = {
    "nvfp4-pack-quantized": {"num_bits": 4, "type": "float", "group_size": NVFP4_GROUP_LEN},
    "mxfp4-pack-quantized": {"num_bits": 4, "type": "float", "group_size": GROUP_LEN},
    "pack-quantized": {"num_bits": 4, "type": "int", "group_size": GROUP_LEN},
}
# int4 is mxint4 where its scales are powers of two; a loader finds that out per tensor.
W4_FORMAT_OF_LAYOUT = {
    "modelopt_nvfp4": "nvfp4",
    "packed_nvfp4": "nvfp4",
    "packed_mxfp4": "mxfp4",
    "fused_mxfp4": "mxfp4",
    "packed_int4": "mxint4",
}
_LAYOUT_OF_FORMAT = {
    "nvfp4-pack-quantized": "packed_nvfp4",
    "mxfp4-pack-quantized": "packed_mxfp4",
    "pack-quantized": "packed_int4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantScheme:
    """`block` is rows and columns of one scale, for fp8_block alone."""

    layout: str
    block: tuple[int, int] = (0, 0)


def quant_scheme(config: Mapping[str, Any], directory: Path) -> QuantScheme | None:
    """The layout a checkpoint declares; None where its weights are plain.

    Raises:
        UnsupportedModelError: a field has a value we do not have, named with those we have.
        ModelFormatError: hf_quant_config.json is damaged.
    """
    path = directory / "config.json"
    spec = _object(config.get("quantization_config"), f"{path}: quantization_config")
    if not spec:
        return _modelopt_beside(directory)
    method = spec.get("quant_method")
    if method == "modelopt":
        return _modelopt(spec, f"{path}: quantization_config")
    if method == "compressed-tensors":
        return _compressed(spec, f"{path}: quantization_config")
    if method == "fp8":
        return _fp8(spec, f"{path}: quantization_config")
    if method == "mxfp4":
        return QuantScheme(layout="fused_mxfp4")
    raise _unsupported(f"{path}: quantization_config", "quant_method", method, *_METHODS)


def _modelopt_beside(directory: Path) -> QuantScheme | None:
    path = directory / "hf_quant_config.json"
    if not path.exists():
        return None
    spec = read_json_object(path).get("quantization")
    return _modelopt(_object(spec, f"{path}: quantization"), f"{path}: quantization")


def _modelopt(spec: Mapping[str, Any], where: str) -> QuantScheme:
    algorithm = spec.get("quant_algo")
    if algorithm != "NVFP4":
        raise _unsupported(where, "quant_algo", algorithm, "NVFP4")
    group_len = spec.get("group_size")
    if group_len not in (NVFP4_GROUP_LEN, None):
        raise _unsupported(where, "group_size", group_len, NVFP4_GROUP_LEN)
    return QuantScheme(layout="modelopt_nvfp4")


def _compressed(spec: Mapping[str, Any], where: str) -> QuantScheme:
    if spec.get("transform_config"):  # rotated weights, whose inputs must be rotated too
        raise _unsupported(where, "transform_config", spec["transform_config"], None)
    stored = spec.get("format")
    groups = _objects(spec.get("config_groups"), f"{where}.config_groups")
    for name, group in groups.items():
        stored = group.get("format") or stored
        if not isinstance(stored, str) or stored not in _WANTED_WEIGHTS:
            raise _unsupported(f"{where}.config_groups.{name}", "format", stored, *_WANTED_WEIGHTS)
        at = f"{where}.config_groups.{name}.weights"
        weights = _object(group.get("weights"), at)
        for key, wanted in _WANTED_WEIGHTS[stored].items():
            if weights.get(key) != wanted:
                raise _unsupported(at, key, weights.get(key), wanted)
        if weights.get("symmetric") not in (True, None):
            raise _unsupported(at, "symmetric", weights["symmetric"], True)
        if weights.get("actorder"):
            raise _unsupported(at, "actorder", weights["actorder"], None)
    if not isinstance(stored, str) or stored not in _LAYOUT_OF_FORMAT:
        raise _unsupported(where, "format", stored, *_LAYOUT_OF_FORMAT)
    layouts = {group.get("format") or spec.get("format") for group in groups.values()}
    if len(layouts) > 1:
        raise _unsupported(where, "config_groups", sorted(map(str, layouts)), "one format for all")
    return QuantScheme(layout=_LAYOUT_OF_FORMAT[stored])


def _object(value: object, where: str) -> Mapping[str, Any]:
    """A JSON object; nothing counts as an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise ModelFormatError(f"{where} is {value!r}; allowed: an object")
    return value or {}


def _objects(value: object, where: str) -> dict[str, Mapping[str, Any]]:
    return {name: _object(item, f"{where}.{name}") for name, item in _object(value, where).items()}


def _fp8(spec: Mapping[str, Any], where: str) -> QuantScheme:
    if spec.get("fmt") not in ("e4m3", None):
        raise _unsupported(where, "fmt", spec["fmt"], "e4m3")
    block = spec.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(isinstance(size, int) and size > 0 for size in block or ()):
        raise _unsupported(where, "weight_block_size", block, [128, 128])
    assert block is not None
    return QuantScheme(layout="fp8_block", block=(block[0], block[1]))


def _unsupported(where: str, key: str, value: object, *allowed: object) -> UnsupportedModelError:
    spelled = ", ".join(repr(item) for item in allowed)
    return UnsupportedModelError(f"{where}.{key} is {value!r}; supported: {spelled}")


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object of a model directory. Raises ModelFormatError naming the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelFormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: not a JSON object")
    return value
