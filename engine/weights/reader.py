# SPDX-License-Identifier: Apache-2.0
"""What a model asks of a checkpoint: tensors by their Hugging Face names, shapes checked.

Does not know: which model asks, files (gguf_weights and hf read those). A weight that is stored
in a low-bit format is asked for by its plain name and plain shape all the same.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch

from engine.weights.errors import WeightMismatchError
from kernels.fp8_weight import Fp8Weight, quantize_fp8
from kernels.packed_weight import PackedWeight
from kernels.reference.quant import GROUP_OF_FORMAT, W4Weight, quantize_w4


class WeightReader(Protocol):
    """One open checkpoint. Tensors come back on the CPU, owned by the caller."""

    def has(self, name: str) -> bool:
        """Whether an optional tensor is there."""
        ...

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises what `dense` would, without reading the tensor."""
        ...

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Raises: WeightMismatchError naming the tensor, what was found and what expected."""
        ...

    def packed(self, name: str, shape: Sequence[int]) -> PackedWeight | None:
        """The tensor in GGUF blocks of its codes; None where no kernel takes them."""
        ...

    def w4(self, name: str, shape: Sequence[int]) -> W4Weight | None:
        """The tensor in its stored 4-bit format; None where it has another."""
        ...

    def fp8(self, name: str, shape: Sequence[int]) -> Fp8Weight | None:
        """The tensor in stored fp8 blocks of 128 x 128; None where it has another format."""
        ...


class CheckingReader:
    """Answers with tensors that hold no memory, after checking each against the checkpoint.

    Loading through it first finds every missing or wrong-shaped tensor before any is read.
    """

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader

    def has(self, name: str) -> bool:
        return self._reader.has(name)

    def check(self, name: str, shape: Sequence[int]) -> None:
        self._reader.check(name, shape)

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self._reader.check(name, shape)
        return torch.empty(*shape, dtype=dtype, device="meta")

    def packed(self, name: str, shape: Sequence[int]) -> PackedWeight | None:
        return None

    def w4(self, name: str, shape: Sequence[int]) -> W4Weight | None:
        return None

    def fp8(self, name: str, shape: Sequence[int]) -> Fp8Weight | None:
        return None


def check_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raises: WeightMismatchError where the shapes differ."""
    if tuple(found) != tuple(expected):
        raise WeightMismatchError(
            f"tensor {name!r}: found shape {list(found)}, expected {list(expected)}"
        )


def check_dtype(name: str, found: torch.dtype | str, allowed: Sequence[torch.dtype]) -> None:
    """Raises: WeightMismatchError where it is another one; any is right where none is allowed."""
    if allowed and found not in allowed:
        spelled = " | ".join(str(dtype) for dtype in allowed)
        raise WeightMismatchError(f"tensor {name!r}: found {found}, expected {spelled}")


class RandomWeights:
    """A checkpoint that was never trained, for benchmarks: seeded by each tensor's name.

    Made on `device`, in few bits too where a format is named (but for the output head, which
    checkpoints keep plain). Vectors are ones if they are weights, zeros if they are biases.
    """

    def __init__(self, device: torch.device | None = None, low_bits: str | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._low_bits = low_bits

    def has(self, name: str) -> bool:
        return False  # asked of optional tensors only

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Has whatever it is asked for."""

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(tuple(shape), fill, dtype=dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(*shape, generator=generator, device=self._device)
        return (values * math.sqrt(1 / shape[-1])).to(dtype)

    def packed(self, name: str, shape: Sequence[int]) -> PackedWeight | None:
        return None

    def w4(self, name: str, shape: Sequence[int]) -> W4Weight | None:
        if self._low_bits not in GROUP_OF_FORMAT or name.startswith("lm_head"):
            return None
        return quantize_w4(self.dense(name, shape, torch.float32), self._low_bits)

    def fp8(self, name: str, shape: Sequence[int]) -> Fp8Weight | None:
        if self._low_bits != "fp8_block" or name.startswith("lm_head"):
            return None
        return quantize_fp8(self.dense(name, shape, torch.float32))
