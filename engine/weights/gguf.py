# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files: metadata, tensor directory, raw bytes by memory map. numpy only.

Does not know: torch, what a tensor means, tokenizers.
Source: the GGUF specification (ggml project, docs/gguf.md), version 3 (2 reads the same).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.weights.errors import ModelFormatError, ModelNotFoundError, WeightMismatchError
from engine.weights.gguf_blocks import BLOCK_FORMATS, dequantise_blocks

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_SCALAR_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One entry of the tensor directory. `shape` is row-major (outermost first)."""

    name: str
    shape: tuple[int, ...]
    format_name: str  # F32, Q4_1, ...
    offset: int  # from the start of the file
    num_bytes: int


class GgufFile:
    """An open GGUF file; the map lives as long as an array of it does."""

    def __init__(
        self,
        path: Path,
        metadata: dict[str, Any],
        tensors: dict[str, GgufTensor],
        data: NDArray[np.uint8],
        header_len: int,
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self.header_len = header_len
        self._data = data

    @property
    def data(self) -> NDArray[np.uint8]:
        """The whole file as bytes; read-only view."""
        return self._data

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor; a read-only view of the map."""
        tensor = self._tensor(name)
        return self._data[tensor.offset : tensor.offset + tensor.num_bytes]

    def dequantise(self, name: str) -> NDArray[np.float32]:
        """A tensor as fp32, shaped; owned by the caller."""
        tensor = self._tensor(name)
        return dequantise_blocks(self.raw(name), tensor.format_name).reshape(tensor.shape)

    def _tensor(self, name: str) -> GgufTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise WeightMismatchError(f"{self.path.name}: tensor {name!r} is missing") from None


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and parse its header.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFormatError: it is not GGUF, is cut short, or holds an unknown block format.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"model: no file {path}") from None
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path}: cannot be mapped: {error}") from error
    reader = _HeaderReader(path, mapped)
    try:
        metadata, tensors = reader.read()
    except struct.error:
        raise ModelFormatError(f"{path}: header is cut short") from None
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path}: a header string is not UTF-8: {error}") from None
    data: NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)
    return GgufFile(path, metadata, tensors, data, reader.position)


class _HeaderReader:
    """A cursor over the header bytes."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.position = 0
        self._path = path
        self._mapped = mapped

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._mapped[:4] != _MAGIC:
            raise ModelFormatError(f"{self._path}: not a GGUF file (first bytes are not 'GGUF')")
        self.position = 4
        version = self._unpack(_U32)
        if version not in _VERSIONS:
            raise ModelFormatError(f"{self._path}: GGUF version {version}; readable: 2, 3")
        num_tensors = self._unpack(_U64)
        num_keys = self._unpack(_U64)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._unpack(_U32))
        directory = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        data_start = -(-self.position // alignment) * alignment
        return metadata, {entry[0]: self._locate(entry, data_start) for entry in directory}

    def _unpack(self, form: struct.Struct) -> Any:
        value = form.unpack_from(self._mapped, self.position)[0]
        self.position += form.size
        return value

    def _string(self) -> str:
        length = self._unpack(_U64)
        start, end = self.position, self.position + length
        if end > len(self._mapped):
            raise ModelFormatError(f"{self._path}: header is cut short")
        self.position = end
        return self._mapped[start:end].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        raise ModelFormatError(f"{self._path}: metadata value of unknown type {kind}")

    def _array(self) -> list[Any]:
        kind = self._unpack(_U32)
        count = self._unpack(_U64)
        if kind == _STRING:
            return self._string_array(count)
        if kind not in _SCALAR_DTYPES:
            return [self._value(kind) for _ in range(count)]
        dtype = np.dtype(_SCALAR_DTYPES[kind])
        end = self.position + count * dtype.itemsize
        if end > len(self._mapped):
            raise ModelFormatError(f"{self._path}: header is cut short")
        values = np.frombuffer(self._mapped[self.position : end], dtype=dtype)
        self.position = end
        result: list[Any] = values.tolist()
        return result

    def _string_array(self, count: int) -> list[Any]:
        """Vocabularies have 100,000 entries: no call per string but the decoding itself."""
        data, position, length_of = self._mapped, self.position, _U64.unpack_from
        strings: list[Any] = []
        for _ in range(count):
            start = position + 8
            position = start + length_of(data, position)[0]
            strings.append(data[start:position].decode("utf-8"))
        if position > len(data):
            raise ModelFormatError(f"{self._path}: header is cut short")
        self.position = position
        return strings

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._unpack(_U32)
        # ggml lists the innermost dimension first.
        shape = tuple(self._unpack(_U64) for _ in range(num_dims))[::-1]
        return name, shape, self._unpack(_U32), self._unpack(_U64)

    def _locate(self, entry: tuple[str, tuple[int, ...], int, int], data_start: int) -> GgufTensor:
        name, shape, type_id, offset = entry
        block = BLOCK_FORMATS.get(type_id)
        if block is None:
            known = ", ".join(sorted(form.name for form in BLOCK_FORMATS.values()))
            raise ModelFormatError(
                f"{self._path}: tensor {name!r} has ggml type {type_id}; readable: {known}"
            )
        num_values = int(np.prod(shape, dtype=np.int64))
        if shape and shape[-1] % block.block_len:
            raise ModelFormatError(
                f"{self._path}: tensor {name!r} rows of {shape[-1]} values do not split in "
                f"{block.name} blocks of {block.block_len}"
            )
        num_bytes = num_values // block.block_len * block.block_bytes
        start = data_start + offset
        if start + num_bytes > len(self._mapped):
            raise ModelFormatError(
                f"{self._path}: tensor {name!r} ends at byte {start + num_bytes}, "
                f"the file has {len(self._mapped)}"
            )
        return GgufTensor(
            name=name, shape=shape, format_name=block.name, offset=start, num_bytes=num_bytes
        )
