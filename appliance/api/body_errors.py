# SPDX-License-Identifier: Apache-2.0
"""How a refused body reads: pydantic's findings as one error that names the first field's path.

Does not know: any body but by the model it is given.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from appliance.errors import ApiError

CODE_BY_PYDANTIC_TYPE = {
    "json_invalid": "invalid_json",
    "extra_forbidden": "unknown_field",
    "missing": "missing_field",
}
# What pydantic looked for, in JSON's words.
EXPECTED_BY_PYDANTIC_TYPE = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "an object",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "list_type": "an array",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}
_VALUE_ERRORS = ("greater_than", "less_than", "too_long", "too_short", "literal_error", "value_err")


def as_body_error(errors: Sequence[Mapping[str, Any]], model: object = None) -> ApiError:
    """Turn pydantic's findings into one ApiError that names the first field's path.

    Args:
        model: what the body was read as; an unknown field is held against its fields.
    """
    first = _most_telling(errors)
    kind = str(first["type"])
    path = field_path(first["loc"])
    code = CODE_BY_PYDANTIC_TYPE.get(kind)
    if code == "invalid_json":
        reason = (first.get("ctx") or {}).get("error", "")
        return ApiError("invalid_json", f"the body is not JSON: {reason}")
    if code == "unknown_field":
        return ApiError(code, f"{path}: unknown field{_hint(model, first['loc'])}", path)
    if code == "missing_field":
        where = path or "body"
        return ApiError(code, f"{where}: required", path or None)
    if not path and isinstance(first.get("input"), bytes):  # not read as JSON: not called JSON
        return ApiError("invalid_type", "the body must be JSON with Content-Type: application/json")
    code = "invalid_value" if kind.startswith(_VALUE_ERRORS) else "invalid_type"
    shown = json.dumps(first.get("input"), ensure_ascii=False, default=repr)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    reason = _expected(errors, path) if code == "invalid_type" else ""
    return ApiError(code, f"{path or 'body'}: {reason or first['msg']}; got {shown}", path or None)


def _expected(errors: Sequence[Mapping[str, Any]], path: str) -> str:
    """What may stand there, of every arm of a union; empty where pydantic has to say it."""
    kinds = [str(e["type"]) for e in errors if field_path(e["loc"]) == path]
    words = dict.fromkeys(EXPECTED_BY_PYDANTIC_TYPE.get(kind, "") for kind in kinds)
    return "" if "" in words else "expected " + " or ".join(words)


def _hint(model: object, loc: Sequence[int | str]) -> str:
    """Say which field may have been meant, else which there are."""
    *way, wrong = loc[1:]
    models = list(_models_in(model))
    for part in map(str, way):
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        models = [inner for field in fields for inner in _models_in(field.annotation)]
    known = list(dict.fromkeys(name for m in models for name in m.model_fields))
    if not known:
        return ""
    close = difflib.get_close_matches(str(wrong), known, n=1)
    return f" (hint: did you mean {close[0]}?)" if close else f" (known: {', '.join(known)})"


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The models that a field's annotation names, itself or in a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for arm in get_args(annotation):
        yield from _models_in(arm)


def field_path(loc: Sequence[int | str]) -> str:
    """Return `input[0].role` for ("body", "input", 0, "role"); names of union arms are left out."""
    path = ""
    for part in loc[1:] if loc and loc[0] in ("body", "query", "path", "header") else loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "dict", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path


def _most_telling(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Prefer an unknown field (a typo explains what is missing), else the first field's finding:
    of the arms of a union, the one of the right type.
    """
    for error in errors:
        if error["type"] == "extra_forbidden":
            return error
    path = field_path(errors[0]["loc"])
    of_type = (e for e in errors if str(e["type"]).startswith(_VALUE_ERRORS))
    return next((e for e in of_type if field_path(e["loc"]) == path), errors[0])
