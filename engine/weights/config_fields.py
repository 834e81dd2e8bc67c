# SPDX-License-Identifier: Apache-2.0
"""Reads the fields of a config.json one by one. Torch-free.

What is missing or has no fitting value is named, with the value found and those allowed. A field
that is null counts as missing: published files have both. Does not know: which fields there are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.weights.errors import ModelFormatError

ROPE_FIELDS = ("rope_parameters", "rope_scaling")  # the newer and the older name
_MOST = (1 << 31) - 1  # sizes and counts are int32 further down


class ConfigFields:
    """One object of a config.json. Every reader raises ModelFormatError."""

    def __init__(self, values: Mapping[str, Any], path: Path, inside: str = "") -> None:
        """`inside`: the field of the file that the object is the value of."""
        self._values = values
        self._path = path
        self._inside = f"{inside}." if inside else ""

    def has(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self._values

    def expect(self, *names: str) -> None:
        """Refuse a file in which one of these fields is not there, be it null."""
        for name in names:
            if not self.has(name):
                raise self._missing(name)

    def raw(self, name: str) -> Any:
        """The value as it is; None where there is none."""
        return self._values.get(name)

    def whole(self, name: str, *, low: int = 1, default: int | None = None) -> int:
        """A whole number of at least `low`; needed, unless there is a default."""
        allowed = f"a whole number of {low} or more"
        value = self._found(name, default, allowed)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not low <= value <= _MOST:
            raise self._wrong(name, value, allowed)
        return int(value)

    def number(
        self, name: str, *, default: float | None = None, zero: float | None = None
    ) -> float:
        """A finite number above 0; needed, unless there is a default. `zero`: what 0 stands for,
        where it may be there."""
        allowed = "a number above 0" if zero is None else "0 or a number above it"
        value = self._found(name, default, allowed)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and value == 0 and zero is not None:
            return zero
        if not is_number or not 0 < value <= sys.float_info.max:
            raise self._wrong(name, value, allowed)
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false; needed, and not null, unless there is a default."""
        value = self._found(name, default, "true or false")
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def table(self, *names: str) -> ConfigFields:
        """The object that the first of these fields there is holds; an empty one where none is."""
        for name in names:
            value = self.raw(name)
            if value is None or value == {}:
                continue
            if not isinstance(value, Mapping):
                raise self._wrong(name, value, "an object")
            return ConfigFields(value, self._path, name)
        return ConfigFields({}, self._path, names[0])

    def context_len(self) -> int:
        """Positions of the model: `max_position_embeddings`, or what YaRN stretches the original
        context to where that is more (Qwen's files leave the first as it was). Of dual chunk
        attention (arXiv 2402.17463) the first chunk: positions behind it are counted otherwise."""
        length = self.whole("max_position_embeddings")
        if self.raw("dual_chunk_attention_config") is not None:
            chunks = self.table("dual_chunk_attention_config")
            local_len = chunks.whole("local_size", low=0)
            chunk_len = chunks.whole("chunk_size", low=local_len + 1) - local_len
            length = min(length, chunk_len)
        rope = self.table(*ROPE_FIELDS)
        name, original = "factor", "original_max_position_embeddings"
        is_yarn = "yarn" in (rope.raw("rope_type"), rope.raw("type"))
        if not is_yarn or rope.raw(name) is None or rope.raw(original) is None:
            return length
        stretched = rope.number(name) * rope.whole(original)
        if stretched > _MOST:
            raise rope._wrong(name, rope.raw(name), f"contexts of up to {_MOST} tokens")
        return max(length, int(stretched))

    def _found(self, name: str, default: float | None, allowed: str) -> Any:
        value = self.raw(name)
        if value is None and default is None:
            raise self._wrong(name, None, allowed) if self.has(name) else self._missing(name)
        return default if value is None else value

    def _missing(self, name: str) -> ModelFormatError:
        return ModelFormatError(f"{self._path}: key {self._inside + name!r} is missing")

    def _wrong(self, name: str, value: object, allowed: str) -> ModelFormatError:
        return ModelFormatError(
            f"{self._path}: {self._inside}{name} is {value!r}; allowed: {allowed}"
        )
