# SPDX-License-Identifier: Apache-2.0
"""Reads a TOML table, and `a.b=c` overrides, into nested frozen dataclasses, strictly typed.

Does not know: which settings exist, what they mean, or any default.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or out of range; the message names its path."""

    code = "invalid_config"

    def __init__(self, path: str, message: str, *, hint: str = "") -> None:
        self.path = path
        text = f"{path}: {message}" if path else message
        super().__init__(f"{text} (hint: {hint})" if hint else text)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises: ConfigError if it cannot be read or is not TOML.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from error


def apply_overrides(table: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `table` with each `a.b=c` applied; c is a TOML value, or else a plain string."""
    result = _copy_tables(table)
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            raise ConfigError("--set", f"wants a.b=value, got {override!r}")
        here = result
        for key in keys[:-1]:
            there = here.setdefault(key, {})
            if not isinstance(there, dict):
                raise ConfigError(path, f"{key!r} is a value, not a table")
            here = there
        here[keys[-1]] = parse_value(text.strip())
    return result


def parse_value(text: str) -> Any:
    """Read one TOML value; text that is none (a bare word, a path) stays a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def build(cls: type[T], table: Mapping[str, Any], path: str = "") -> T:
    """Build dataclass `cls` from a table; a missing key keeps its default.

    Raises: ConfigError for an unknown key (naming the closest), or a value of another type.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if key not in fields:
            raise ConfigError(where, "is no setting", hint=_closest(key, list(fields), path))
        values[key] = _convert(hints[key], value, where)
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(path, f"lacks a setting: {error}") from error


def flatten(config: Any, path: str = "") -> dict[str, Any]:
    """Return every leaf setting by its dotted path, in declaration order."""
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        where = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            leaves.update(flatten(value, where))
        else:
            leaves[where] = value
    return leaves


def to_plain(value: Any) -> Any:
    """Return config as tables, lists, strings and numbers, which `build` reads back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        plain = {f.name: to_plain(getattr(value, f.name)) for f in fields}
        return {key: item for key, item in plain.items() if item is not None}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _copy_tables(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copy_tables(value) if isinstance(value, dict) else value
        for key, value in table.items()
    }


def _closest(key: str, known: list[str], path: str) -> str:
    matches = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    if not matches:
        return "known here: " + ", ".join(sorted(known))
    closest = f"{path}.{matches[0]}" if path else matches[0]
    return f"did you mean {closest}?"


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(hint, value, where)
    if origin is tuple:
        return _convert_tuple(hint, value, where)
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        return _convert_mapping(hint, value, where)
    if origin is typing.Literal:
        return _one_of(typing.get_args(hint), value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise _wrong_type(where, "a table", value)
        return build(hint, value, where)
    return _convert_scalar(hint, value, where)


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(_one_of([member.value for member in hint], value, where))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value).expanduser()
    if hint is int and isinstance(value, bool):
        raise _wrong_type(where, "an integer", value)
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    raise _wrong_type(where, names.get(hint, str(hint)), value)


def _convert_union(hint: Any, value: Any, where: str) -> Any:
    if value is None:
        return None
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    for option in options[:-1]:
        try:
            return _convert(option, value, where)
        except ConfigError:
            continue
    return _convert(options[-1], value, where)


def _convert_tuple(hint: Any, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong_type(where, "a list", value)
    item_hint = typing.get_args(hint)[0]
    return tuple(_convert(item_hint, item, f"{where}[{i}]") for i, item in enumerate(value))


def _convert_mapping(hint: Any, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type(where, "a table", value)
    item_hint = typing.get_args(hint)[1]
    return {str(key): _convert(item_hint, item, f"{where}.{key}") for key, item in value.items()}


def _one_of(allowed: Sequence[Any], value: Any, where: str) -> Any:
    if value not in allowed:
        listed = ", ".join(map(str, allowed))
        raise ConfigError(where, f"must be one of {listed}; got {value!r}")
    return value


def _wrong_type(where: str, wanted: str, value: Any) -> ConfigError:
    return ConfigError(where, f"must be {wanted}; got {value!r}")
