# SPDX-License-Identifier: Apache-2.0
"""What one call looks like to the selector: family, device, formats of its arguments, traits.

Does not know: which kernels exist. A format is the short name of a dtype or of a packed weight
layout; a trait is a small fact (head_dim, page_size, "decode") that a kernel may refuse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.errors import KernelInputError

TraitValue = int | str | bool

FORMAT_OF_DTYPE: dict[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


@dataclass(frozen=True, slots=True)
class CallSignature:
    """Hashable, so that a selection is cached once per shape class."""

    family: str
    device: str
    formats: tuple[tuple[str, str], ...]
    traits: tuple[tuple[str, TraitValue], ...] = ()

    def trait(self, name: str, default: TraitValue = 0) -> TraitValue:
        """Return the trait, or the default where the call has none of that name."""
        return dict(self.traits).get(name, default)

    def format(self, name: str) -> str:
        """Return an argument's format, "" where the call has no argument of that name."""
        return dict(self.formats).get(name, "")


def format_of(dtype: torch.dtype) -> str:
    """Return the short format name of a torch dtype."""
    try:
        return FORMAT_OF_DTYPE[dtype]
    except KeyError:
        allowed = ", ".join(sorted(FORMAT_OF_DTYPE.values()))
        raise KernelInputError("dtype", dtype, allowed) from None


def expect_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Refuse a tensor whose shape differs; None stands for any length.

    Raises:
        KernelInputError: naming the argument, its shape and the allowed one.
    """
    actual = tensor.shape
    if len(actual) == len(shape):
        # A plain loop: a step makes hundreds of these checks.
        for got, want in zip(actual, shape, strict=True):
            if want is not None and want != got:
                break
        else:
            return
    wanted = ", ".join("any" if want is None else str(want) for want in shape)
    raise KernelInputError(name, list(actual), f"shape [{wanted}]")


def expect_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Refuse a tensor of another dtype.

    Raises:
        KernelInputError: naming the argument, its dtype and the allowed ones.
    """
    if tensor.dtype not in allowed:
        raise KernelInputError(name, tensor.dtype, " or ".join(str(dtype) for dtype in allowed))
