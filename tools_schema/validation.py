# SPDX-License-Identifier: Apache-2.0
"""Owns whether finished arguments are valid against the client's ORIGINAL schema.

Does not know: grammars, formats, streams. A call is never altered by what is found here: the
problems go to the client and to the metrics beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from tools_schema.schema_check import compile_schema, json_path
from tools_schema.tool_spec import ToolSet

MAX_PROBLEMS = 16
_CACHED_SETS = 128


@dataclass(frozen=True, slots=True)
class ArgumentProblem:
    """`path` is rooted at `arguments`, as in `arguments.path` or `arguments.lines[2]`."""

    path: str
    message: str


class SchemaValidator:
    """One schema, compiled; `root` names the value in the problems' paths."""

    def __init__(
        self, schema: dict[str, Any] | bool, root: str, *, must_be_object: bool = False
    ) -> None:
        self._must_be_object = must_be_object  # whatever the schema forgets to say
        self._validator = compile_schema(schema, root)
        self._root = root

    def problems(self, text: str) -> list[ArgumentProblem]:
        """What is wrong with this JSON text; empty where it is valid."""
        try:
            value = parse_json(text)
        except ValueError as error:
            return [ArgumentProblem(self._root, f"not JSON: {error}")]
        if self._must_be_object and not isinstance(value, dict):
            return [ArgumentProblem(self._root, "not an object")]
        try:
            return self._check(value)
        except UnicodeEncodeError:  # a lone surrogate escape: no validator can hold one
            return self._check(_without_surrogates(value))
        except ValueError as error:  # a number past what JSON numbers can be
            return [ArgumentProblem(self._root, str(error))]

    def _check(self, value: Any) -> list[ArgumentProblem]:
        found = islice(self._validator.iter_errors(value), MAX_PROBLEMS)
        return [ArgumentProblem(self._root + json_path(e.instance_path), e.message) for e in found]


class ToolValidator:
    """The validators of one tool set."""

    def __init__(self, toolset: ToolSet) -> None:
        self._by_name = {
            tool.name: SchemaValidator(tool.schema(), "arguments", must_be_object=True)
            for tool in toolset
        }

    def problems(self, name: str, text: str) -> list[ArgumentProblem]:
        """What is wrong with a call's arguments; empty where they are valid."""
        validator = self._by_name.get(name)
        if validator is None:
            known = ", ".join(self._by_name) or "none"
            return [ArgumentProblem("name", f"no tool named {name!r}; allowed: {known}")]
        return validator.problems(text)


@lru_cache(maxsize=_CACHED_SETS)
def compile_validator(toolset: ToolSet) -> ToolValidator:
    """The validators of a set, compiled once per content."""
    return ToolValidator(toolset)


def validate_arguments(toolset: ToolSet, name: str, text: str) -> list[ArgumentProblem]:
    """Problems of one call against the original schema of its tool; empty where it is valid."""
    return compile_validator(toolset).problems(name, text)


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no Infinity. Raises ValueError (also for nesting past our stack)."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _without_surrogates(value: Any) -> Any:
    """The value with U+FFFD for each lone surrogate."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
