# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory of safetensors files, sharded or not, as a WeightReader.

Does not know: the model's code, config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.weights.errors import ModelFormatError, ModelNotFoundError, WeightMismatchError
from engine.weights.quant_config import read_json_object
from engine.weights.reader import check_dtype, check_shape
from kernels.fp8_weight import Fp8Weight
from kernels.packed_weight import PackedWeight
from kernels.reference.quant import W4Weight

_INDEX = "model.safetensors.index.json"
# As the header of a safetensors file names them.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# What stands for itself; numbers of fewer bits mean nothing without their scales.
_PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class HfWeights:
    """Tensors are read from their file one by one; the files stay mapped, nothing else is held."""

    def __init__(self, directory: Path) -> None:
        """Raises: ModelNotFoundError, ModelFormatError naming the file."""
        self._directory = directory
        self._file_of = _tensor_files(directory)
        self._open: dict[Path, Any] = {}  # safe_open has no types

    @property
    def names(self) -> list[str]:
        """Every tensor of the checkpoint, sorted."""
        return sorted(self._file_of)

    def has(self, name: str) -> bool:
        return name in self._file_of

    def is_low_bit(self, name: str) -> bool:
        """Never: what is stored in a low-bit layout is read by QuantizedWeights."""
        return False

    def check(self, name: str, shape: Sequence[int]) -> None:
        self.check_part(name, shape, *_PLAIN)

    def check_part(self, name: str, shape: Sequence[int], *dtypes: torch.dtype) -> None:
        """Raises WeightMismatchError where a tensor has another shape, or none of these dtypes."""
        check_shape(name, self.shape(name, shape), shape)
        check_dtype(name, self.dtype(name), dtypes)

    def shape(self, name: str, expected: Sequence[int] = ()) -> list[int]:
        """The stored shape. Raises WeightMismatchError where there is no such tensor."""
        file = self._file(name, expected)
        try:
            found: list[int] = file.get_slice(name).get_shape()
        except SafetensorError as error:
            raise ModelFormatError(f"{self._file_of[name]}: tensor {name!r}: {error}") from error
        return found

    def dtype(self, name: str) -> torch.dtype | str:
        """The stored dtype; as the file names it where no checkpoint we read has it."""
        file = self._file(name, ())
        try:
            stored = str(file.get_slice(name).get_dtype())
            return _DTYPES.get(stored, stored)
        except SafetensorError as error:
            raise ModelFormatError(f"{self._file_of[name]}: tensor {name!r}: {error}") from error

    def raw(self, name: str) -> torch.Tensor:
        """The tensor as it is stored; a copy. Raises WeightMismatchError, ModelFormatError."""
        file = self._file(name, ())
        try:
            values: torch.Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ModelFormatError(f"{self._file_of[name]}: tensor {name!r}: {error}") from error
        return values

    def raw_entry(self, name: str, index: int) -> torch.Tensor:
        """One entry of the first axis, without reading the others. Raises as `raw` does."""
        file = self._file(name, ())
        try:
            values: torch.Tensor = file.get_slice(name)[index]
        except SafetensorError as error:
            raise ModelFormatError(f"{self._file_of[name]}: tensor {name!r}: {error}") from error
        return values

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.check(name, shape)
        return self.raw(name).to(dtype, copy=True)

    def packed(self, name: str, shape: Sequence[int]) -> PackedWeight | None:
        return None

    def w4(self, name: str, shape: Sequence[int]) -> W4Weight | None:
        return None

    def fp8(self, name: str, shape: Sequence[int]) -> Fp8Weight | None:
        return None

    def _file(self, name: str, expected: Sequence[int]) -> Any:
        path = self._file_of.get(name)
        if path is None:
            wanted = f", expected shape {list(expected)}" if expected else ""
            raise WeightMismatchError(f"tensor {name!r}: found none in {self._directory}{wanted}")
        if path not in self._open:
            self._open[path] = _open(path)
        return self._open[path]


def _tensor_files(directory: Path) -> dict[str, Path]:
    index = directory / _INDEX
    if index.exists():
        entries: Any = read_json_object(index).get("weight_map")
        is_map = isinstance(entries, dict)
        if not is_map or not all(isinstance(file, str) for file in entries.values()):
            raise ModelFormatError(
                f"{index}: weight_map is {str(entries)[:80]}; allowed: the names of files by tensor"
            )
        missing = sorted({file for file in entries.values() if not _is_file(directory / file)})
        if missing:
            raise ModelNotFoundError(f"{index}: names files that are not there: {missing}")
        return {name: directory / file for name, file in entries.items()}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"model: {directory} has no *.safetensors file")
    found: dict[str, Path] = {}
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if name in found:
                    raise ModelFormatError(
                        f"{path}: tensor {name!r} is in {found[name].name} too; "
                        f"allowed: once, where there is no {_INDEX}"
                    )
                found[name] = path
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no name that a file can have
        return False


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(f"{path}: not a readable safetensors file: {error}") from error
