# SPDX-License-Identifier: Apache-2.0
"""One weight -> the tensors of a low-bit layout, and safetensors shards with their index.

Written are layouts that others read too: nvfp4 as ModelOpt has it, fp8 as DeepSeek has it, mxfp4
and int4 as compressed-tensors has them (int4 scales are powers of two, so that they are also
mxint4). Does not know: models, which weights are to be converted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.weights.claim import DirectoryClaim
from engine.weights.reader import check_dtype, check_shape
from kernels.reference.quant import E4M3_MAX, decode_e8m0, quantize_w4

FORMATS = ("nvfp4", "mxfp4", "mxint4", "fp8")
FP8_BLOCK = 128
SHARD_BYTES = 4 << 30


def quantization_config(fmt: str, ignore: list[str]) -> dict[str, Any]:
    """What config.json says of a checkpoint in this format; `ignore` names the plain modules."""
    if fmt == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": ignore,
        }
    if fmt == "nvfp4":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": None,
            "ignore": ignore,
        }
    weights: dict[str, Any] = {
        "num_bits": 4,
        "type": "float" if fmt == "mxfp4" else "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
    }
    stored = "mxfp4-pack-quantized" if fmt == "mxfp4" else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignore,
    }


def quantized_tensors(name: str, weight: torch.Tensor, fmt: str) -> dict[str, torch.Tensor]:
    """The tensors that stand for `name` (ending in .weight), on the CPU.

    Raises:
        KernelInputError: the number of columns is no multiple of the format's group.
    """
    base = name.removesuffix("weight")
    if fmt == "fp8":
        values, scales = _fp8_blocks(weight)
        return {name: values.cpu(), f"{base}weight_scale_inv": scales.cpu()}
    stored = quantize_w4(weight, fmt)
    if fmt == "nvfp4":
        return {
            name: stored.packed.cpu(),
            f"{base}weight_scale": stored.scales.cpu(),
            f"{base}weight_scale_2": stored.global_scale.cpu(),
        }
    if fmt == "mxfp4":
        return {
            f"{base}weight_packed": stored.packed.cpu(),
            f"{base}weight_scale": stored.scales.cpu(),
        }
    return {
        # Eight added to four bits and the top bit flipped are the same thing.
        f"{base}weight_packed": (stored.packed ^ 0x88).cpu().contiguous().view(torch.int32),
        f"{base}weight_scale": decode_e8m0(stored.scales).to(torch.bfloat16).cpu(),
        f"{base}weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values [N, K] and the fp32 scale of every 128 x 128 block, the last ones cut."""
    num_rows, num_cols = weight.shape
    pad = (0, -num_cols % FP8_BLOCK, 0, -num_rows % FP8_BLOCK)
    padded = torch.nn.functional.pad(weight.float(), pad)
    grid = padded.view(-1, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    top = grid.abs().amax(dim=(1, 3))
    scales = torch.where(top > 0, top / E4M3_MAX, torch.ones_like(top))
    values = (grid / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
    return values[:num_rows, :num_cols].contiguous(), scales


class HeldTensors:
    """Tensors in memory, in the form in which stored formats read files."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    def check_part(self, name: str, shape: Sequence[int], *dtypes: torch.dtype) -> None:
        check_shape(name, self._tensors[name].shape, shape)
        check_dtype(name, self._tensors[name].dtype, dtypes)

    def shape(self, name: str) -> list[int]:
        return list(self._tensors[name].shape)

    def raw(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def raw_entry(self, name: str, index: int) -> torch.Tensor:
        return self._tensors[name][index]


class ShardWriter:
    """Collects tensors and writes a shard whenever there are `shard_bytes` of them."""

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory = directory
        self._claim = DirectoryClaim(directory)
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shard_of: dict[str, int] = {}
        self._num_shards = 0
        self.total_bytes = 0

    def claim(self) -> None:
        """Hold the directory. Raises OSError, as `DirectoryClaim.take`."""
        self._claim.take()

    def release(self) -> None:
        """Leave what was written as it is."""
        self._claim.release()

    def place(self, name: str) -> Path:
        """Where to write a file that goes with the shards, should they be discarded."""
        return self._claim.place(name)

    def discard(self) -> None:
        """Remove what was written."""
        self._claim.discard()

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take tensors; they are on disk after `close` at the latest. Raises OSError."""
        for name, tensor in tensors.items():
            if self._pending and self._pending_bytes + tensor.nbytes > self._shard_bytes:
                self._flush()
            self._pending[name] = tensor.contiguous()
            self._pending_bytes += tensor.nbytes

    def close(self) -> None:
        """Write what is left, give the shards their final names, write the index."""
        self._flush()
        for number in range(self._num_shards):
            self._temporary(number).rename(self.place(self._name(number)))
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": {name: self._name(n) for name, n in sorted(self._shard_of.items())},
        }
        self.place("model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self.place(self._temporary(self._num_shards).name)
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, for one
            raise OSError(f"{path}: {error}") from error
        self._shard_of |= dict.fromkeys(self._pending, self._num_shards)
        self._num_shards += 1
        self.total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _temporary(self, number: int) -> Path:
        return self._directory / f"shard-{number:05d}.partial"

    def _name(self, number: int) -> str:
        return f"model-{number + 1:05d}-of-{self._num_shards:05d}.safetensors"
