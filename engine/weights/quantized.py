# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory whose weights are (partly) low-bit, as a WeightReader.

Does not know: layouts (stored_formats), models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.weights.hf import HfWeights
from engine.weights.quant_config import (
    W4_FORMAT_OF_LAYOUT,
    QuantScheme,
    quant_scheme,
    read_json_object,
)
from engine.weights.stored_formats import stored_format
from kernels.fp8_weight import BLOCK as FP8_BLOCK
from kernels.fp8_weight import Fp8Weight
from kernels.packed_weight import PackedWeight
from kernels.reference.quant import W4Weight


class QuantizedWeights:
    """Plain tensors are read as they are, the others decoded; see HfWeights."""

    def __init__(self, directory: Path, scheme: QuantScheme) -> None:
        """Raises: ModelNotFoundError, ModelFormatError naming the file."""
        self._files = HfWeights(directory)
        self._format = stored_format(scheme)

    @property
    def names(self) -> list[str]:
        """Every weight by its plain name, sorted."""
        plain = {self._format.plain_name(name) or name for name in self._files.names}
        return sorted(plain)

    def shape(self, name: str) -> list[int]:
        """The shape of a weight. Raises WeightMismatchError where there is none."""
        if self.is_low_bit(name):
            return self._format.shape(self._files, name)
        return self._files.shape(name)

    def raw(self, name: str) -> torch.Tensor:
        """A plain tensor as it is stored."""
        return self._files.raw(name)

    def has(self, name: str) -> bool:
        return self._files.has(name) or self._format.holds(self._files, name)

    def check(self, name: str, shape: Sequence[int]) -> None:
        if self.is_low_bit(name):
            self._format.check(self._files, name, shape)
        else:
            self._files.check(name, shape)

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self.is_low_bit(name):
            return self._format.dense(self._files, name, shape).to(dtype)
        return self._files.dense(name, shape, dtype)

    def packed(self, name: str, shape: Sequence[int]) -> PackedWeight | None:
        return None

    def w4(self, name: str, shape: Sequence[int]) -> W4Weight | None:
        return self._format.w4(self._files, name, shape) if self.is_low_bit(name) else None

    def fp8(self, name: str, shape: Sequence[int]) -> Fp8Weight | None:
        return self._format.fp8(self._files, name, shape) if self.is_low_bit(name) else None

    def is_low_bit(self, name: str) -> bool:
        """Whether this weight is stored in the checkpoint's low-bit layout."""
        return name.endswith(".weight") and self._format.holds(self._files, name)


def open_hf_weights(directory: Path) -> HfWeights | QuantizedWeights:
    """The reader that the directory's configuration asks for.

    Raises: UnsupportedModelError, ModelNotFoundError, ModelFormatError.
    """
    scheme = quant_scheme(read_json_object(directory / "config.json"), directory)
    return HfWeights(directory) if scheme is None else QuantizedWeights(directory, scheme)


def declared_block_format(directory: Path) -> str | None:
    """The low-bit kernel format a directory's configuration declares; None where it has none.

    Raises: UnsupportedModelError, ModelFormatError.
    """
    scheme = quant_scheme(read_json_object(directory / "config.json"), directory)
    if scheme is None:
        return None
    if scheme.layout == "fp8_block":
        return "fp8_block" if scheme.block == (FP8_BLOCK, FP8_BLOCK) else None
    return W4_FORMAT_OF_LAYOUT.get(scheme.layout)
