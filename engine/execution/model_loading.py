# SPDX-License-Identifier: Apache-2.0
"""From a configuration to a model in memory: which file, device, dtype and form of weights.

Does not know: KV pools, steps.
"""

from __future__ import annotations

from collections.abc import Callable
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
from engine.weights.quantized import declared_block_format, open_hf_weights
from engine.weights.reader import RandomWeights, WeightReader
from engine.weights.source import ModelKind, ModelSource, resolve_model
from kernels.errors import NoKernelFoundError
from kernels.fixed_order import use_fixed_order
from kernels.platform import capability_of
from kernels.registry import REGISTRY, Priority
from kernels.selection import expect_kernel
from kvtiers.device_pool import expect_one_request

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GPU_PAGE_SIZE = 64  # what attention kernels on GPUs take: a tile of keys is a page
_KIND_OF_FORMAT = {"gguf": ModelKind.GGUF, "safetensors": ModelKind.HF}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    model: PagedModel
    device: torch.device
    dtype_name: str  # of activations: float32 | bfloat16
    kv_dtype: str  # as layouts name it: float32 | bfloat16 | fp8
    weights_name: str  # packed | dequantized
    max_context_len: int
    source_name: str
    weights_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A checkpoint whose configuration is read, and none of its weights."""

    kind: Architecture
    decoder: Any
    block_format: str | None  # low-bit form that a kernel may take: gguf | nvfp4 | ... | fp8_block
    open_reader: Callable[[torch.device], WeightReader]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What a configuration asks for, once all of it fits; still none of the weights."""

    source: ModelSource
    opened: _Opened
    options: LoadOptions
    dtype_name: str
    kv_dtype: str


def load_model(config: EngineConfig) -> LoadedModel:
    """Load the weights a configuration names.

    Raises:
        ModelError: the model is missing, damaged or not supported.
        ConfigError: a setting does not fit the model or the machine.
        PoolTooSmallError: engine.kv_pool_tokens do not hold one request.
    """
    prepared = _prepare(config)
    opened, options = prepared.opened, prepared.options
    if config.deterministic and options.device.type == "cuda":
        use_fixed_order()
    reader = opened.open_reader(options.device)
    return LoadedModel(
        model=opened.kind.model.load(opened.decoder, reader, options),
        device=options.device,
        dtype_name=prepared.dtype_name,
        kv_dtype=prepared.kv_dtype,
        weights_name="packed" if options.keep_packed else "dequantized",
        max_context_len=options.max_positions,
        source_name=prepared.source.path.name,
        weights_fingerprint=weights_fingerprint(config, prepared.source, options.device.type),
    )


def weights_fingerprint(config: EngineConfig, source: ModelSource, device: str) -> str:
    """The checkpoint's, and what else the numbers in its KV are made of: random weights are not the
    file's, and differ by device; a fixed order's bits are no other order's."""
    parts = [source.fingerprint()]
    if config.load_format == "dummy":
        parts.append(f"dummy weights of {device}")
    if config.deterministic:
        parts.append("fixed order")
    return ";".join(parts)


def check_model(config: EngineConfig) -> None:
    """Raise what `load_model` would of settings and checkpoint, without reading a tensor."""
    prepared = _prepare(config)
    opened, options = prepared.opened, prepared.options
    opened.kind.model.check(opened.decoder, opened.open_reader(options.device), options)


def _prepare(config: EngineConfig) -> _Prepared:
    source = resolve_model(config.model)
    expected = _KIND_OF_FORMAT.get(config.load_format)
    if expected is not None and expected is not source.kind:
        raise ConfigError(
            "engine.load_format", config.load_format, f"what {source.path} is: {source.kind}"
        )
    opened = _open(source, is_dummy=config.load_format == "dummy")
    if config.speculation == "mtp" and not getattr(opened.decoder, "num_next_layers", 0):
        allowed = "none | ngram, as this model has no next-token-prediction layer"
        raise ConfigError("engine.speculation", config.speculation, allowed)
    max_context_len = _context_len(config, opened.decoder.max_context_len)
    if config.kv_pool_tokens:  # else free memory decides, once the weights are there
        num_pages = config.kv_pool_tokens // config.page_size
        origin = f"pool_tokens = {config.kv_pool_tokens}"
        expect_one_request(num_pages, config.page_size, max_context_len, origin)
    device = choose_device(config, opened.kind)
    kernels_asked_for(config.kernels, device.type)
    dtype_name, keep_packed = _choose_precision(config, source, device.type, opened)
    kv_dtype = choose_kv_dtype(config, dtype_name, getattr(opened.decoder, "takes_fp8_kv", False))
    if device.type == "cuda" and opened.kind.check_for_gpu is not None:
        opened.kind.check_for_gpu(opened.decoder)
    options = LoadOptions(
        dtype=_DTYPES[dtype_name],
        keep_packed=keep_packed,
        max_positions=max_context_len,
        max_rows=config.rows_per_step,
        drafts=config.speculation == "mtp",
        device=device,
    )
    return _Prepared(
        source=source, opened=opened, options=options, dtype_name=dtype_name, kv_dtype=kv_dtype
    )


def _context_len(config: EngineConfig, trained_len: int) -> int:
    if config.max_context_len > trained_len:
        raise ConfigError(
            "engine.max_context_len",
            config.max_context_len,
            f"up to {trained_len}, what the model was trained for",
        )
    return config.max_context_len or trained_len


def choose_device(config: EngineConfig, kind: Architecture) -> torch.device:
    """Where the model runs after resolving `auto`.

    Raises:
        ConfigError: there is no such device, or the model or another setting does not go with it.
    """
    name = config.device
    if name == "auto":
        fits = "cuda" in kind.devices and config.page_size == GPU_PAGE_SIZE
        name = "cuda" if fits and torch.cuda.is_available() else "cpu"
    if name not in kind.devices:
        raise ConfigError("engine.device", name, f"auto | {' | '.join(kind.devices)}: this model's")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device", name, "auto | cpu, as torch finds no GPU")
    if name == "cuda" and config.page_size != GPU_PAGE_SIZE:
        raise ConfigError("engine.page_size", config.page_size, f"{GPU_PAGE_SIZE} on a GPU")
    return torch.device(name)


def _choose_precision(
    config: EngineConfig, source: ModelSource, device: str, opened: _Opened
) -> tuple[str, bool]:
    """(dtype name, whether weights stay in their low-bit form) after resolving `auto`.

    On a CPU `auto` is bfloat16 with packed weights where a compiled kernel runs the whole decoder,
    else float32 with dequantised weights: the plain kernels would expand blocks at every step. On
    a GPU it is bfloat16, with packed weights where the checkpoint has a 4-bit format, or
    fp8 in blocks of 128. `deterministic` is float32 there, and on a CPU whatever it is without.

    Raises:
        ConfigError: a setting does not go with the checkpoint or with `deterministic`.
    """
    is_gguf = opened.block_format == "gguf"
    has_blocks = is_gguf if device == "cpu" else not is_gguf and opened.block_format is not None
    if config.weights == "packed" and not has_blocks:
        kinds = "no GGUF file" if device == "cpu" else "no checkpoint in 4 bits or fp8"
        raise ConfigError(
            "engine.weights", config.weights, f"auto | dequantized, as {source.path} is {kinds}"
        )
    if config.deterministic and device != "cpu":
        return _deterministic_precision(config)
    is_fast = device != "cpu" or (opened.kind.has_fused_decoder and has_compiled_decoder())
    dtype_name = config.dtype
    if dtype_name == "auto":
        dtype_name = "bfloat16" if is_fast else "float32"
    keep_packed = config.weights == "packed"
    if config.weights == "auto":
        keep_packed = has_blocks and is_fast and dtype_name == "bfloat16"
    return dtype_name, keep_packed


def choose_kv_dtype(config: EngineConfig, dtype_name: str, takes_fp8: bool) -> str:
    """How a layout names what KV is kept in, after resolving `auto`.

    Raises:
        ConfigError: the setting does not go with the model or with its activations.
    """
    if config.kv_dtype == "auto":
        return dtype_name
    if dtype_name != "bfloat16":
        allowed = "auto, as activations are float32"
        raise ConfigError("engine.kv_dtype", config.kv_dtype, allowed)
    if config.kv_dtype == "bf16":
        return "bfloat16"
    if not takes_fp8:
        allowed = "auto | bf16, as this model's attention has no latents in groups of 128"
        raise ConfigError("engine.kv_dtype", config.kv_dtype, allowed)
    return "fp8"


def kernels_asked_for(setting: str, device: str | None = None) -> list[tuple[str, str]]:
    """Families and kernels of `family=name,family=name`.

    Args:
        device: where they are to run (cpu | cuda); None: not asked.

    Raises:
        ConfigError: a part is no such pair, or names a kernel that is not there or runs elsewhere.
    """
    pairs = []
    for pair in filter(None, (part.strip() for part in setting.split(","))):
        family, name = (part.strip() for part in (*pair.split("=", 1), "")[:2])
        try:
            spec = expect_kernel(family, name)
        except NoKernelFoundError as error:
            allowed = "family=name, as `python -m kernels ls` has them"
            raise ConfigError("engine.kernels", pair, allowed, str(error)) from error
        if device is not None:
            lack = capability_of(device).lacks(spec.features, spec.min_sm)
            if spec.device not in ("any", device):
                lack = f"it is one of {spec.device}"
            if lack is not None:
                raise ConfigError("engine.kernels", pair, f"kernels that this {device} runs", lack)
        pairs.append((family, name))
    return pairs


def has_compiled_decoder() -> bool:
    """Whether a kernel better than plain torch is registered for whole decoders on this CPU."""
    return any(
        spec.device in ("cpu", "any") and spec.priority > Priority.REFERENCE
        for spec in REGISTRY.specs("llama_forward")
    )


def _deterministic_precision(config: EngineConfig) -> tuple[str, bool]:
    """On a GPU, whose kernels of fixed order take fp32 and bfloat16: dense weights."""
    if config.weights == "packed":
        raise ConfigError(
            "engine.weights", config.weights, "dequantized where engine.deterministic is set"
        )
    if config.kv_dtype == "fp8":
        raise ConfigError(
            "engine.kv_dtype", config.kv_dtype, "auto | bf16 where engine.deterministic is set"
        )
    return ("float32" if config.dtype == "auto" else config.dtype), False


def _open(source: ModelSource, is_dummy: bool) -> _Opened:
    if source.kind is ModelKind.HF:
        kind, block_format = architecture_of(source.path), declared_block_format(source.path)

        def open_reader(device: torch.device) -> WeightReader:
            if is_dummy:
                return RandomWeights(device, block_format)
            return open_hf_weights(source.path)

        return _Opened(
            kind=kind,
            decoder=kind.read_config(source.path),
            block_format=block_format,
            open_reader=open_reader,
        )
    file = open_gguf(source.path)
    llama = decoder_config_from_gguf(file.metadata, file.tensors)
    return _Opened(
        kind=architecture(llama.architecture),
        decoder=llama,
        block_format=None if is_dummy else "gguf",
        open_reader=lambda device: (
            RandomWeights(device) if is_dummy else GgufWeights(file, llama.head_dim)
        ),
    )
