# SPDX-License-Identifier: Apache-2.0
"""Owns what of a JSON Schema the grammar holds: a plain schema of the few keywords it enforces.

Does not know: tools, formats, the engine itself. The rule: whatever the lowered schema accepts is
valid under the original, but for what `losses` names. It may accept less: properties come in
their declared order, undeclared ones only where the schema says `additionalProperties`.
Prompts and validation keep the original; this one is for the grammar alone.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

from tools_schema.disjoint import are_disjoint
from tools_schema.json_pointer import resolve_local
from tools_schema.lower_types import KNOWN_KEYWORDS, GrammarTypes
from tools_schema.schema_check import compile_schema
from tools_schema.schema_merge import Schema, both, is_same, merge

MAX_NODES = 4_000
MAX_BRANCHES = 64
_MAX_DEPTH = 64
_UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})


@dataclass(frozen=True, slots=True)
class Loss:
    """Something the grammar does not hold; `path` is inside the schema."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoweredSchema:
    schema: Schema
    losses: tuple[Loss, ...] = ()


class CannotHoldError(Exception):
    """The grammar can hold nothing of this schema (never leaves the room)."""


def lower_schema(schema: Schema | bool, *, must_be_object: bool) -> LoweredSchema:
    """What the grammar holds of `schema`; any object (or value) where it can hold nothing."""
    anything: Schema = {"type": "object"} if must_be_object else {}
    lowering = _Lowering(schema)
    root = both({"type": "object"}, schema) if must_be_object else schema
    try:
        node = lowering.lower(root, "")
        if node is None:
            raise CannotHoldError("no value is valid")
        lowering.check_ends()
    except CannotHoldError as error:
        return LoweredSchema(anything, (Loss("", f"not held by the grammar: {error}"),))
    if lowering.defs:
        node = {**node, "$defs": lowering.defs}
    return LoweredSchema(node, tuple(lowering.losses))


class _Lowering:
    """One schema on its way down; `defs` are the grammar's definitions."""

    def __init__(self, root: Schema | bool) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._unfit: set[str] = set()
        self._recursive: set[str] = set()
        self._spine: tuple[str, ...] = ()
        self._num_nodes = 0
        self._depth = 0
        self._types = GrammarTypes(self._descend, self.lose, self._is_valid)
        self.defs: dict[str, Schema] = {}
        self.losses: list[Loss] = []

    def lose(self, path: str, reason: str) -> None:
        loss = Loss(path, reason)
        if loss not in self.losses:
            self.losses.append(loss)

    def lower(self, schema: Any, path: str) -> Schema | None:
        """The grammar's schema; None where no value is valid."""
        if schema is False:
            return None
        if not isinstance(schema, dict):
            return {}
        self._num_nodes += 1
        self._depth += 1
        if self._num_nodes > MAX_NODES or self._depth > _MAX_DEPTH:
            raise CannotHoldError("it is too large when its references are followed")
        try:
            return self._lower_shared(schema, path) if _refers(schema) else self._flat(schema, path)
        finally:
            self._depth -= 1

    def _descend(self, schema: Any, path: str) -> Schema | None:
        """Lower a part that lies inside its parent's value."""
        spine, self._spine = self._spine, ()
        try:
            return self.lower(schema, path)
        finally:
            self._spine = spine

    def _lower_shared(self, schema: Schema, path: str) -> Schema | None:
        """A schema with references becomes a definition: it may come back inside itself."""
        key = json.dumps(schema, sort_keys=True)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"d{len(self._names)}"
            spine, self._spine = self._spine, (*self._spine, name)
            node = self._flat(schema, path)
            self._spine = spine
            if node is None:
                if name in self._recursive:
                    raise CannotHoldError("a definition that no value fits")
                self._unfit.add(name)
                return None
            self.defs[name] = node
        elif name in self._unfit or name in self._spine:
            return None  # no value fits; or "itself or ...", which adds nothing
        elif name not in self.defs:
            self._recursive.add(name)
        return {"$ref": f"#/$defs/{name}"}

    # -- one schema without its references and unions ---------------------------------------

    def _flat(self, schema: Schema, path: str) -> Schema | None:
        parts: list[Schema] = []
        unions: list[list[Any]] = []
        if not self._collect(schema, path, parts, unions, set()):
            return None
        merged = parts[0]
        is_alone = not unions and sum(map(bool, parts)) == 1
        for part in parts[1:]:
            if not is_alone and _UNEVALUATED & set(part):
                # It must not see its neighbours' properties: that scope is lost in the merge.
                part = {key: value for key, value in part.items() if key not in _UNEVALUATED}
                self.lose(path, "unevaluated properties or items inside allOf or $ref")
            merged = merge(merged, part, lambda key: self.lose(path, f"two {key} at once"))
        if not unions:
            return self._types.lower(merged, path)
        return self._distribute(merged, unions, path)

    def _collect(
        self, schema: Any, path: str, parts: list[Schema], unions: list[list[Any]], seen: set[str]
    ) -> bool:
        """Gather a conjunction's parts; False where one of them admits nothing."""
        if not isinstance(schema, dict):
            return schema is not False
        parts.append(_own_keywords(schema))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            target = self._resolve(reference, path)
            if not self._collect(target, path, parts, unions, seen):
                return False
        unions.extend(schema[key] for key in ("anyOf", "oneOf") if key in schema)
        if "oneOf" in schema and not are_disjoint(schema["oneOf"], self._root):
            self.lose(path, "oneOf is held as anyOf")
        return all(
            self._collect(part, path, parts, unions, seen) for part in schema.get("allOf", [])
        )

    def _resolve(self, reference: str, path: str) -> Any:
        target = resolve_local(self._root, reference)
        if target is None or _has_inner_id(self._root):
            self.lose(path, f"the reference {reference}")
            return True
        return target

    def _distribute(self, merged: Schema, unions: list[list[Any]], path: str) -> Schema | None:
        """base and (a or b) = (base and a) or (base and b)."""
        if math.prod(len(branches) for branches in unions) > MAX_BRANCHES:
            self.lose(path, "too many alternatives at once")
            unions = [min(unions, key=len)]
            if len(unions[0]) > MAX_BRANCHES * 4:
                return self._types.lower(merged, path)
        found: list[Schema] = []
        for combination in itertools.product(*unions):
            parts = [part for part in (merged, *combination) if part is not True and part != {}]
            branch: Any = parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True
            node = self.lower(branch, path)
            if node is not None and not any(is_same(node, other) for other in found):
                found.append(node)
        if not found:
            return None
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _is_valid(self, schema: Schema, value: Any) -> bool:
        """Whether the validator accepts `value` for a part of this schema."""
        try:
            return compile_schema(schema, "").is_valid(value)
        except ValueError:
            raise CannotHoldError("an enum beside references") from None

    def check_ends(self) -> None:
        """Every definition must have a finite value, or generation could never end."""
        finite: set[str] = set()
        while grown := {n for n, d in self.defs.items() if n not in finite and _ends(d, finite)}:
            finite |= grown
        if len(finite) < len(self.defs):
            raise CannotHoldError("a definition has no finite value")


def _own_keywords(schema: Schema) -> Schema:
    base = {key: value for key, value in schema.items() if key in KNOWN_KEYWORDS}
    if "const" in base:
        value = base.pop("const")
        base = merge(base, {"enum": [value]}, lambda key: None)
    return base


def _refers(schema: Any) -> bool:
    """Whether a reference speaks of this very value (not only of a part of it)."""
    if not isinstance(schema, dict):
        return False
    parts = (part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, ()))
    return "$ref" in schema or any(map(_refers, parts))


def _has_inner_id(root: Any) -> bool:
    """Another `$id` inside changes what references mean."""
    return isinstance(root, dict) and '"$id"' in json.dumps(
        {key: value for key, value in root.items() if key != "$id"}
    )


def _ends(node: Schema, finite: set[str]) -> bool:
    if "$ref" in node:
        return node["$ref"].rpartition("/")[2] in finite
    if "anyOf" in node:
        return any(_ends(branch, finite) for branch in node["anyOf"])
    required = [node["properties"][key] for key in node.get("required", [])]
    least = node.get("minItems", 0)
    items = [*node.get("prefixItems", []), *[node.get("items", {})] * least][:least]
    return all(_ends(part, finite) for part in [*required, *items])
