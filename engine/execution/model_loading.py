# SPDX-License-Identifier: Apache-2.0
"""From a configuration to a model in memory: which file, which dtype, which weight form.

Does not know: KV pools, steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import decoder_config_from_gguf
from engine.models.model import LoadOptions, PagedModel
from engine.models.registry import Architecture, architecture, architecture_of
from engine.weights.gguf import open_gguf
from engine.weights.gguf_weights import GgufWeights
from engine.weights.quantized import open_hf_weights
from engine.weights.reader import RandomWeights, WeightReader
from engine.weights.source import ModelKind, ModelSource, resolve_model
from kernels.registry import REGISTRY, Priority

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KIND_OF_FORMAT = {"gguf": ModelKind.GGUF, "safetensors": ModelKind.HF}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    model: PagedModel
    dtype_name: str  # of activations and KV: float32 | bfloat16
    weights_name: str  # packed | dequantized
    max_context_len: int
    source_name: str
    weights_fingerprint: str


def load_model(config: EngineConfig) -> LoadedModel:
    """Load the weights a configuration names.

    Raises:
        ModelError: the model is missing, damaged or not supported.
        ConfigError: `load_format` or `max_context_len` does not fit the model.
    """
    source = resolve_model(config.model)
    expected = _KIND_OF_FORMAT.get(config.load_format)
    if expected is not None and expected is not source.kind:
        raise ConfigError(
            "engine.load_format", config.load_format, f"what {source.path} is: {source.kind}"
        )
    kind, decoder, reader = _open(source, is_dummy=config.load_format == "dummy")
    max_context_len = config.max_context_len or decoder.max_context_len
    if max_context_len > decoder.max_context_len:
        raise ConfigError(
            "engine.max_context_len",
            config.max_context_len,
            f"up to {decoder.max_context_len}, what the model was trained for",
        )
    dtype_name, keep_packed = choose_precision(config, source)
    options = LoadOptions(
        dtype=_DTYPES[dtype_name],
        keep_packed=keep_packed,
        max_positions=max_context_len,
        max_rows=config.max_slots,
    )
    return LoadedModel(
        model=kind.model.load(decoder, reader, options),
        dtype_name=dtype_name,
        weights_name="packed" if keep_packed else "dequantized",
        max_context_len=max_context_len,
        source_name=source.path.name,
        weights_fingerprint=source.fingerprint(),
    )


def choose_precision(config: EngineConfig, source: ModelSource) -> tuple[str, bool]:
    """(dtype name, whether weights stay in their low-bit blocks) after resolving `auto`.

    `auto` is bfloat16 with packed weights where a compiled kernel runs the whole decoder, else
    float32 with dequantised weights: the plain kernels would expand blocks at every step.

    Raises:
        ConfigError: a setting does not go with the checkpoint or with `deterministic`.
    """
    has_blocks = source.kind is ModelKind.GGUF and config.load_format != "dummy"
    if config.weights == "packed" and not has_blocks:
        raise ConfigError(
            "engine.weights",
            config.weights,
            f"auto | dequantized, as {source.path} is no GGUF file",
        )
    if config.deterministic:
        return _deterministic_precision(config)
    is_fast = has_compiled_decoder()
    dtype_name = config.dtype
    if dtype_name == "auto":
        dtype_name = "bfloat16" if is_fast else "float32"
    keep_packed = config.weights == "packed"
    if config.weights == "auto":
        keep_packed = has_blocks and is_fast and dtype_name == "bfloat16"
    return dtype_name, keep_packed


def has_compiled_decoder() -> bool:
    """Whether a kernel better than plain torch is registered for whole decoders on this CPU."""
    return any(
        spec.device in ("cpu", "any") and spec.priority > Priority.REFERENCE
        for spec in REGISTRY.specs("llama_forward")
    )


def _deterministic_precision(config: EngineConfig) -> tuple[str, bool]:
    """fp32 throughout: low-precision paths differ with the number of tokens in a step."""
    if config.dtype == "bfloat16":
        raise ConfigError("engine.dtype", config.dtype, "float32 where engine.deterministic is set")
    if config.weights == "packed":
        raise ConfigError(
            "engine.weights", config.weights, "dequantized where engine.deterministic is set"
        )
    return "float32", False


def _open(source: ModelSource, is_dummy: bool) -> tuple[Architecture, Any, WeightReader]:
    """Who loads the model, its configuration, and its weights."""
    if source.kind is ModelKind.HF:
        kind = architecture_of(source.path)
        decoder = kind.read_config(source.path)
        return kind, decoder, RandomWeights() if is_dummy else open_hf_weights(source.path)
    file = open_gguf(source.path)
    llama = decoder_config_from_gguf(file.metadata, file.tensors)
    reader = RandomWeights() if is_dummy else GgufWeights(file, llama.head_dim)
    return architecture(llama.architecture), llama, reader
