# SPDX-License-Identifier: Apache-2.0
"""How each low-bit layout spells one weight in tensors: which they are, and what they decode to.

Does not know: which layout a checkpoint has (quant_config), models. A weight `X.weight` [N, K]:

    modelopt_nvfp4   X.weight u8 [N, K/2], X.weight_scale e4m3 [N, K/16], X.weight_scale_2 f32 []
    packed_nvfp4     X.weight_packed, X.weight_scale alike, X.weight_global_scale f32 [1] (divides)
    packed_mxfp4     X.weight_packed u8 [N, K/2], X.weight_scale u8 (e8m0) [N, K/32]
    packed_int4      X.weight_packed i32 [N, K/8], X.weight_scale [N, K/32] floating-point
    fp8_block        X.weight e4m3 [N, K], X.weight_scale_inv f32 [N/128, K/128] (multiplies)
    fused_mxfp4      experts.gate_up_proj_blocks u8 [E, 2I, K/32, 16], ..._scales u8 [E, 2I, K/32],
                     gate and up rows in turns; experts.down_proj_* alike
Nibbles: the even column lies in the low one. int4 is stored with 8 added.
Source: the files that NVIDIA ModelOpt, compressed-tensors, DeepSeek-V3 and gpt-oss publish.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.weights.errors import WeightMismatchError
from engine.weights.quant_config import GROUP_LEN, NVFP4_GROUP_LEN, QuantScheme
from kernels.fp8_weight import BLOCK as FP8_BLOCK
from kernels.fp8_weight import Fp8Weight
from kernels.reference.quant import W4Weight, dequantize_w4

_E8M0_BIAS = 127
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class TensorFiles(Protocol):
    """Stored tensors by name (HfWeights is one). Raises: WeightMismatchError, ModelFormatError."""

    def has(self, name: str) -> bool: ...
    def check_part(self, name: str, shape: Sequence[int], *dtypes: torch.dtype) -> None: ...
    def shape(self, name: str) -> list[int]: ...
    def raw(self, name: str) -> torch.Tensor: ...
    def raw_entry(self, name: str, index: int) -> torch.Tensor: ...


class StoredFormat(Protocol):
    """One layout. Names are those of plain checkpoints."""

    def holds(self, files: TensorFiles, name: str) -> bool:
        """Whether this weight is stored in the layout; its neighbours may be plain."""
        ...

    def check(self, files: TensorFiles, name: str, shape: Sequence[int]) -> None:
        """Raises: WeightMismatchError naming the tensor that is missing or wrong."""
        ...

    def dense(self, files: TensorFiles, name: str, shape: Sequence[int]) -> torch.Tensor:
        """fp32 values. Raises: WeightMismatchError."""
        ...

    def w4(self, files: TensorFiles, name: str, shape: Sequence[int]) -> W4Weight | None:
        """The same without decoding; None where no kernel takes the format."""
        ...

    def fp8(self, files: TensorFiles, name: str, shape: Sequence[int]) -> Fp8Weight | None:
        """As w4, of a format in fp8."""
        ...

    def shape(self, files: TensorFiles, name: str) -> list[int]:
        """The shape of a weight it holds, as its stored codes have it."""
        ...

    def plain_name(self, name: str) -> str | None:
        """Which weight a stored tensor belongs to; None where it is not part of one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class W4Format:
    """The 4-bit layouts that keep one weight in tensors of its own."""

    layout: str
    packed: str  # suffixes of tensor names
    scale: str
    top: str | None = None  # the scale of the whole tensor

    def holds(self, files: TensorFiles, name: str) -> bool:
        has_own_name = self.packed != "weight"
        return files.has(_part(name, self.scale)) or (
            has_own_name and files.has(_part(name, self.packed))
        )

    def check(self, files: TensorFiles, name: str, shape: Sequence[int]) -> None:
        num_rows, num_cols = _matrix(name, shape)
        group = NVFP4_GROUP_LEN if self.layout.endswith("nvfp4") else GROUP_LEN
        if num_cols % group:
            raise WeightMismatchError(
                f"tensor {name!r}: found {num_cols} columns, expected a multiple of {group}"
            )
        word = torch.int32 if self.layout == "packed_int4" else torch.uint8
        files.check_part(_part(name, self.packed), (num_rows, num_cols // self._codes_a_word), word)
        files.check_part(_part(name, self.scale), (num_rows, num_cols // group), *self._scales)
        if self.top is not None:
            stored = _part(name, self.top)
            found = files.shape(stored)
            if math.prod(found) != 1:
                raise WeightMismatchError(f"tensor {stored!r}: found shape {found}, expected [1]")
            files.check_part(stored, found, *_FLOATS)

    def dense(self, files: TensorFiles, name: str, shape: Sequence[int]) -> torch.Tensor:
        if self.layout == "packed_int4":
            codes, scales = self._int4(files, name, shape)
            grouped = codes.view(*scales.shape, GROUP_LEN) * scales.float()[..., None]
            return grouped.reshape(tuple(shape))
        weight = self.w4(files, name, shape)
        assert weight is not None, "only int4 has forms without a kernel format"
        return dequantize_w4(weight)

    def w4(self, files: TensorFiles, name: str, shape: Sequence[int]) -> W4Weight | None:
        self.check(files, name, shape)
        one = torch.ones((), dtype=torch.float32)
        if self.layout == "packed_int4":
            return self._mxint4(files, name)
        packed = files.raw(_part(name, self.packed))
        scale_name = _part(name, self.scale)
        if self.top is None:
            scales = files.raw(scale_name)
            return W4Weight(format="mxfp4", packed=packed, scales=scales, global_scale=one)
        scales = files.raw(scale_name)
        top = files.raw(_part(name, self.top)).float().reshape(())
        factor = top if self.layout == "modelopt_nvfp4" else 1 / top
        return W4Weight(format="nvfp4", packed=packed, scales=scales, global_scale=factor)

    def fp8(self, files: TensorFiles, name: str, shape: Sequence[int]) -> Fp8Weight | None:
        return None

    def shape(self, files: TensorFiles, name: str) -> list[int]:
        stored = _part(name, self.packed)
        num_rows, width = _matrix(stored, files.shape(stored))
        return [num_rows, width * self._codes_a_word]

    @property
    def _scales(self) -> tuple[torch.dtype, ...]:
        """Dtypes that they may have."""
        if self.layout == "packed_int4":
            return _FLOATS
        return (torch.uint8,) if self.top is None else (torch.float8_e4m3fn,)

    @property
    def _codes_a_word(self) -> int:
        return 8 if self.layout == "packed_int4" else 2

    def plain_name(self, name: str) -> str | None:
        for suffix in (self.packed, self.scale, self.top, "input_scale", "input_global_scale"):
            if suffix is not None and name.endswith(f".{suffix}"):
                return name.removesuffix(suffix) + "weight"
        if name.endswith((".weight_shape", ".weight_zero_point", ".weight_g_idx")):
            return name[: name.rindex(".")] + ".weight"
        return None

    def _int4(
        self, files: TensorFiles, name: str, shape: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes -8..7 in fp32 [N, K], and scales as they are stored."""
        self.check(files, name, shape)
        words = files.raw(_part(name, self.packed))
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = ((words[..., None] >> shifts) & 15).flatten(-2) - 8
        return codes.float(), files.raw(_part(name, self.scale))

    def _mxint4(self, files: TensorFiles, name: str) -> W4Weight | None:
        """Exact where every scale is a power of two, which e8m0 can say; else None."""
        scales = files.raw(_part(name, self.scale)).float()
        mantissa, exponent = torch.frexp(scales)
        codes = exponent - 1 + _E8M0_BIAS
        if not bool(((mantissa == 0.5) & (codes >= 0)).all()):
            return None
        words = files.raw(_part(name, self.packed))
        return W4Weight(
            format="mxint4",
            # Eight added to four bits and the top bit flipped are the same thing.
            packed=words.contiguous().view(torch.uint8) ^ 0x88,
            scales=codes.to(torch.uint8),
            global_scale=torch.ones((), dtype=torch.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Block:
    """e4m3 values, one scale per block of rows and columns; edge blocks may be cut."""

    block: tuple[int, int]

    def holds(self, files: TensorFiles, name: str) -> bool:
        return files.has(_part(name, "weight_scale_inv"))

    def check(self, files: TensorFiles, name: str, shape: Sequence[int]) -> None:
        files.check_part(name, _matrix(name, shape), torch.float8_e4m3fn)
        grid = [-(-size // step) for size, step in zip(shape, self.block, strict=True)]
        files.check_part(_part(name, "weight_scale_inv"), grid, *_FLOATS, torch.float8_e8m0fnu)

    def dense(self, files: TensorFiles, name: str, shape: Sequence[int]) -> torch.Tensor:
        self.check(files, name, shape)
        values = files.raw(name).float()
        scales = files.raw(_part(name, "weight_scale_inv")).float()
        for axis, step in enumerate(self.block):
            scales = scales.repeat_interleave(step, dim=axis).narrow(axis, 0, shape[axis])
        return values * scales

    def w4(self, files: TensorFiles, name: str, shape: Sequence[int]) -> W4Weight | None:
        return None

    def fp8(self, files: TensorFiles, name: str, shape: Sequence[int]) -> Fp8Weight | None:
        if self.block != (FP8_BLOCK, FP8_BLOCK):
            return None
        self.check(files, name, shape)
        return Fp8Weight(
            values=files.raw(name),
            scales=files.raw(_part(name, "weight_scale_inv")).float(),
        )

    def shape(self, files: TensorFiles, name: str) -> list[int]:
        return files.shape(name)

    def plain_name(self, name: str) -> str | None:
        return name.removesuffix("_scale_inv") if name.endswith(".weight_scale_inv") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedMxfp4:
    """All experts of a layer in one tensor."""

    def holds(self, files: TensorFiles, name: str) -> bool:
        match = _EXPERT.fullmatch(name)
        return match is not None and files.has(_fused(match, "blocks"))

    def check(self, files: TensorFiles, name: str, shape: Sequence[int]) -> None:
        match = _EXPERT.fullmatch(name)
        assert match is not None, "asked of what it holds"
        if shape[1] % GROUP_LEN:
            raise WeightMismatchError(
                f"tensor {name!r}: found {shape[1]} columns, expected a multiple of {GROUP_LEN}"
            )
        num_rows = shape[0] * (1 if match[3] == "down" else 2)
        num_groups = shape[1] // GROUP_LEN
        for part, inner in (("blocks", [GROUP_LEN // 2]), ("scales", [])):
            stored = _fused(match, part)
            found = files.shape(stored)
            wanted = [num_rows, num_groups, *inner]
            if len(found) != len(wanted) + 1 or found[1:] != wanted or found[0] <= int(match[2]):
                raise WeightMismatchError(
                    f"tensor {stored!r}: found shape {found}, expected "
                    f"{['more than ' + match[2], *wanted]} for {name!r}"
                )
            files.check_part(stored, found, torch.uint8)

    def dense(self, files: TensorFiles, name: str, shape: Sequence[int]) -> torch.Tensor:
        return dequantize_w4(self.w4(files, name, shape))

    def w4(self, files: TensorFiles, name: str, shape: Sequence[int]) -> W4Weight:
        self.check(files, name, shape)
        match = _EXPERT.fullmatch(name)
        assert match is not None, "asked of what it holds"
        blocks, scales = (
            files.raw_entry(_fused(match, part), int(match[2])) for part in ("blocks", "scales")
        )
        if match[3] != "down":
            first = 0 if match[3] == "gate" else 1
            blocks, scales = blocks[first::2].contiguous(), scales[first::2].contiguous()
        return W4Weight(
            format="mxfp4",
            packed=blocks.flatten(-2),
            scales=scales,
            global_scale=torch.ones((), dtype=torch.float32),
        )

    def fp8(self, files: TensorFiles, name: str, shape: Sequence[int]) -> Fp8Weight | None:
        return None

    def shape(self, files: TensorFiles, name: str) -> list[int]:
        match = _EXPERT.fullmatch(name)
        assert match is not None, "asked of what it holds"
        _, num_rows, num_groups = files.shape(_fused(match, "scales"))
        return [num_rows // (1 if match[3] == "down" else 2), num_groups * GROUP_LEN]

    def plain_name(self, name: str) -> str | None:
        return None


def stored_format(scheme: QuantScheme) -> StoredFormat:
    """The reader of a layout."""
    match scheme.layout:
        case "modelopt_nvfp4":
            return W4Format(
                layout=scheme.layout, packed="weight", scale="weight_scale", top="weight_scale_2"
            )
        case "packed_nvfp4":
            return W4Format(
                layout=scheme.layout,
                packed="weight_packed",
                scale="weight_scale",
                top="weight_global_scale",
            )
        case "fp8_block":
            return Fp8Block(block=scheme.block)
        case "fused_mxfp4":
            return FusedMxfp4()
        case _:
            return W4Format(layout=scheme.layout, packed="weight_packed", scale="weight_scale")


def _matrix(name: str, shape: Sequence[int]) -> Sequence[int]:
    """The shape; low-bit layouts hold matrices alone."""
    if len(shape) != 2:
        raise WeightMismatchError(
            f"tensor {name!r}: found shape {list(shape)}, expected two axes, as it is low-bit"
        )
    return shape


def _part(name: str, suffix: str) -> str:
    return name.removesuffix("weight") + suffix


def _fused(match: re.Match[str], part: str) -> str:
    return f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}_{part}"
