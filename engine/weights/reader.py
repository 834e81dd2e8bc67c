# SPDX-License-Identifier: Apache-2.0
"""What a model asks of a checkpoint: tensors by their Hugging Face names, shapes checked.

Does not know: which model asks, files (gguf_weights and hf read those).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch

from engine.weights.errors import WeightMismatchError
from kernels.packed_weight import PackedWeight


class WeightReader(Protocol):
    """One open checkpoint. Tensors come back on the CPU, owned by the caller."""

    def has(self, name: str) -> bool:
        """Whether an optional tensor is there."""
        ...

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Raises: WeightMismatchError naming the tensor, what was found and what expected."""
        ...

    def packed(self, name: str, shape: Sequence[int]) -> PackedWeight | None:
        """The tensor in its stored low-bit blocks; None where no kernel takes them."""
        ...


def check_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raises: WeightMismatchError where the shapes differ."""
    if tuple(found) != tuple(expected):
        raise WeightMismatchError(
            f"tensor {name!r}: found shape {list(found)}, expected {list(expected)}"
        )


class RandomWeights:
    """A checkpoint that was never trained, for benchmarks: seeded by each tensor's name."""

    def has(self, name: str) -> bool:
        return False  # asked of optional tensors only

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(*shape, dtype=dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(*shape, generator=generator) * math.sqrt(1 / shape[-1])
        return values.to(dtype)

    def packed(self, name: str, shape: Sequence[int]) -> PackedWeight | None:
        return None
