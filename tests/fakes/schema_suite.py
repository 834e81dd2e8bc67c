# SPDX-License-Identifier: Apache-2.0
"""The JSON-Schema-Test-Suite (draft 2020-12; its licence is in tests/data) and our use of it.

`python -m tests.fakes.schema_suite` writes the pinned list of fallbacks anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools_schema.errors import InvalidSchemaError
from tools_schema.grammar_schema import LoweredSchema, lower_schema
from tools_schema.schema_check import check_schema

DATA = Path(__file__).parents[1] / "data"
PINNED = DATA / "schema_fallbacks.json"


@dataclass(frozen=True)
class SuiteGroup:
    """One schema and its cases: (what, instance, whether it is valid)."""

    name: str
    schema: dict[str, Any] | bool
    cases: tuple[tuple[str, Any, bool], ...]


def suite_groups() -> Iterator[SuiteGroup]:
    for path in sorted((DATA / "json-schema-test-suite").glob("*.json")):
        for group in json.loads(path.read_text()):
            cases = tuple((t["description"], t["data"], t["valid"]) for t in group["tests"])
            yield SuiteGroup(f"{path.stem}: {group['description']}", group["schema"], cases)


def is_refused(group: SuiteGroup) -> bool:
    """Whether a client sending this schema gets a 400 (it needs other documents)."""
    try:
        check_schema(group.schema, "schema")
    except InvalidSchemaError:
        return True
    return False


def lowered(group: SuiteGroup) -> LoweredSchema:
    return lower_schema(group.schema, must_be_object=False)


def current_fallbacks() -> dict[str, list[str]]:
    """Every schema the grammar does not hold fully, and why."""
    found: dict[str, list[str]] = {}
    for group in suite_groups():
        if is_refused(group):
            found.setdefault(group.name, []).append("refused: needs another document")
            continue
        for loss in lowered(group).losses:
            where = f"{loss.path}: " if loss.path else ""
            found.setdefault(group.name, []).append(where + loss.reason)
    return found


if __name__ == "__main__":
    PINNED.write_text(json.dumps(current_fallbacks(), indent=1, sort_keys=True) + "\n")
