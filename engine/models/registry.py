# SPDX-License-Identifier: Apache-2.0
"""Which class holds an architecture, and who reads its config: each model module's `EntryClass`.

Does not know: weights, files beyond config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models import deepseek, llama
from engine.models.config import (
    DECODER_ARCHITECTURES,
    architecture_name,
    decoder_config_from_hf,
    read_config,
)
from engine.models.deepseek_config import ARCHITECTURES as DEEPSEEK_ARCHITECTURES
from engine.models.deepseek_config import check_for_gpu, deepseek_config_from_hf
from engine.weights.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """`read_config` takes a Hugging Face directory; `model.load` takes what it returns."""

    # A class with `load(config, reader, options) -> PagedModel`, and `check` of the same arguments,
    # which raises what `load` would and reads no tensor.
    model: Any
    read_config: Callable[[Path], Any]
    devices: tuple[str, ...] = ("cpu",)
    has_fused_decoder: bool = False  # the op llama_forward runs all of it
    # Raises UnsupportedModelError for a configuration that GPU kernels do not take; None: they do.
    check_for_gpu: Callable[[Any], None] | None = None


_LLAMA = Architecture(
    model=llama.EntryClass, read_config=decoder_config_from_hf, has_fused_decoder=True
)
_DEEPSEEK = Architecture(
    model=deepseek.EntryClass,
    read_config=deepseek_config_from_hf,
    devices=("cpu", "cuda"),
    check_for_gpu=check_for_gpu,
)
_ARCHITECTURES = {
    **dict.fromkeys(DECODER_ARCHITECTURES, _LLAMA),
    **dict.fromkeys(DEEPSEEK_ARCHITECTURES, _DEEPSEEK),
}


def add_architecture(name: str, kind: Architecture) -> None:
    """Hold one more architecture in this process. Raises ValueError where the name is taken."""
    if name in _ARCHITECTURES:
        raise ValueError(f"architecture {name!r} is registered already")
    _ARCHITECTURES[name] = kind


def architecture(name: object) -> Architecture:
    """What holds an architecture. Raises UnsupportedModelError naming those we have."""
    found = _ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnsupportedModelError(
            f"architecture {name!r}; supported: {', '.join(sorted(_ARCHITECTURES))}"
        )
    return found


def architecture_of(directory: Path) -> Architecture:
    """What holds the model of a Hugging Face directory.

    Raises:
        UnsupportedModelError: naming the architectures we have.
        ModelFormatError: config.json is damaged.
    """
    name = architecture_name(read_config(directory))
    try:
        return architecture(name)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{directory / 'config.json'}: {error}") from None
