# SPDX-License-Identifier: Apache-2.0
"""What a model asks of a checkpoint: tensors by their Hugging Face names, shapes checked.

Does not know: which model asks, files (gguf_weights and hf read those).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.weights.errors import WeightMismatchError
from kernels.packed_weight import PackedWeight


class WeightReader(Protocol):
    """One open checkpoint. Tensors come back on the CPU, owned by the caller."""

    def has(self, name: str) -> bool: ...

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

    def __init__(self, absent: Callable[[str], bool] = lambda name: False) -> None:
        self._absent = absent

    def has(self, name: str) -> bool:
        return not self._absent(name)

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(*shape, dtype=dtype)
        seed = int.from_bytes(name.encode()[-8:], "little") & 0x7FFF_FFFF
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(*shape, generator=generator) * math.sqrt(1 / shape[-1])
        return values.to(dtype)

    def packed(self, name: str, shape: Sequence[int]) -> PackedWeight | None:
        return None
