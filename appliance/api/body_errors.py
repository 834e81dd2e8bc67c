# SPDX-License-Identifier: Apache-2.0
"""How a refused body reads: pydantic's findings as one error that names the first field's path.

Does not know: any body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from appliance.errors import ApiError

CODE_BY_PYDANTIC_TYPE = {
    "json_invalid": "invalid_json",
    "extra_forbidden": "unknown_field",
    "missing": "missing_field",
}
_VALUE_ERRORS = ("greater_than", "less_than", "too_long", "too_short", "literal_error", "value_err")


def as_body_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Turn pydantic's findings into one ApiError that names the first field's path."""
    first = _most_telling(errors)
    kind = str(first["type"])
    path = field_path(first["loc"])
    code = CODE_BY_PYDANTIC_TYPE.get(kind)
    if code == "invalid_json":
        reason = (first.get("ctx") or {}).get("error", "")
        return ApiError("invalid_json", f"the body is not JSON: {reason}")
    if code == "unknown_field":
        return ApiError(code, f"{path}: unknown field", path)
    if code == "missing_field":
        where = path or "body"
        return ApiError(code, f"{where}: required", path or None)
    if not path and isinstance(first.get("input"), bytes):  # not read as JSON: not called JSON
        return ApiError("invalid_type", "the body must be JSON with Content-Type: application/json")
    code = "invalid_value" if kind.startswith(_VALUE_ERRORS) else "invalid_type"
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ApiError(code, f"{path or 'body'}: {first['msg']}; got {shown}", path or None)


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
