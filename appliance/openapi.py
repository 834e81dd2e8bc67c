# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document of the session API: what the clients under clients/ are generated from.

The routes and their bodies come from FastAPI; what they answer, and the events of their streams,
from appliance.api.answers and appliance.api.event_types. The OpenAI and Anthropic dialects are
left out: their own SDKs are their clients. Does not know: how a client is made.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from appliance.api import answers, event_types, history, input_types, sessions, turns
from appliance.cli_options import VERSION

SESSION = "/v1/sessions/{session_id}"
ANSWERS: dict[tuple[str, str], Any] = {
    ("get", "/v1/sessions"): answers.SessionPage,
    ("post", "/v1/sessions"): answers.Session,
    ("post", "/v1/sessions/import"): answers.Session,
    ("get", SESSION): answers.Session,
    ("post", SESSION): answers.SessionUpdated,
    ("delete", SESSION): answers.SessionDeleted,
    ("post", f"{SESSION}/fork"): answers.ForkAnswer,
    ("post", f"{SESSION}/rollback"): answers.RolledBack,
    ("post", f"{SESSION}/compact"): answers.Compacted,
    ("post", f"{SESSION}/suspend"): answers.Suspended,
    ("post", f"{SESSION}/resume"): answers.Resumed,
    ("get", f"{SESSION}/items"): answers.ItemPage,
    ("post", f"{SESSION}/items"): answers.ItemsAppended,
    ("get", f"{SESSION}/tokens"): answers.SessionTokens,
    ("get", f"{SESSION}/cache"): answers.CacheView,
    ("get", f"{SESSION}/leases"): answers.LeaseList,
    ("post", f"{SESSION}/leases"): answers.Lease,
    ("delete", f"{SESSION}/leases/{{lease_id}}"): answers.LeaseDeleted,
    ("post", f"{SESSION}/signals"): answers.Signal,
    ("get", f"{SESSION}/turns"): answers.TurnPage,
    ("post", f"{SESSION}/turns"): answers.Turn,
    ("get", f"{SESSION}/turns/{{turn_id}}"): answers.Turn,
    ("post", f"{SESSION}/turns/{{turn_id}}/cancel"): answers.Turn,
}
STREAMS: dict[tuple[str, str], Any] = {
    ("post", f"{SESSION}/turns"): event_types.TurnEvent,
    ("get", f"{SESSION}/turns/{{turn_id}}/events"): event_types.TurnEvent,
}
# Body fields that routes take raw, since other rooms parse them: what is in their arrays.
RAW_ARRAYS: dict[tuple[str, str], tuple[str, Any]] = {
    ("SessionCreate", "initial_items"): ("InputItem", input_types.InputItem),
    ("SessionCreate", "tools"): ("Tool", input_types.Tool),
    ("SessionUpdate", "tools"): ("Tool", input_types.Tool),
    ("ItemsAppend", "items"): ("InputItem", input_types.InputItem),
    ("CompactCreate", "summary_items"): ("InputItem", input_types.InputItem),
    ("TurnCreate", "input"): ("InputItem", input_types.InputItem),
}
REFERENCE = "#/components/schemas/{model}"


def openapi_document() -> dict[str, Any]:
    """Return the document as JSON values."""
    app = FastAPI(title="Moorage sessions", version=VERSION)
    for module in (history, sessions, turns):
        app.include_router(module.router)
    document = app.openapi()
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)  # FastAPI's own envelope, which is never sent
    for (body, field), (name, model) in RAW_ARRAYS.items():
        _array_of(schemas[body]["properties"][field])["items"] = _schema(model, schemas, name)
    error = _schema(answers.ErrorAnswer, schemas)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["operationId"] = _operation_id(operation)
            operation["responses"] = _responses((method, path), schemas, error)
    return dict(document)


def openapi_text() -> str:
    """Return the document as it is written to a file."""
    return json.dumps(openapi_document(), indent=2, sort_keys=True) + "\n"


def _responses(
    where: tuple[str, str], schemas: dict[str, Any], error: dict[str, Any]
) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if where in ANSWERS:
        content["application/json"] = {"schema": _schema(ANSWERS[where], schemas)}
    if where in STREAMS:
        # One event's `data` line; OpenAPI has no word for a stream of them.
        content["text/event-stream"] = {"schema": _schema(STREAMS[where], schemas, "TurnEvent")}
    answer: dict[str, Any] = {"description": "The answer."}
    if content:
        answer["content"] = content
    refusal = {"description": "A refusal.", "content": {"application/json": {"schema": error}}}
    return {"200": answer, "default": refusal}


def _schema(model: Any, schemas: dict[str, Any], name: str = "") -> dict[str, Any]:
    """The schema of a type as a reference, its definitions among `schemas`."""
    schema = TypeAdapter(model).json_schema(ref_template=REFERENCE)
    schemas.update(schema.pop("$defs", {}))
    name = name or model.__name__
    if "$ref" not in schema:
        schemas[name] = schema
    return {"$ref": REFERENCE.format(model=name)}


def _array_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The array among what a field may be."""
    return next(one for one in schema.get("anyOf", [schema]) if one.get("type") == "array")


def _operation_id(operation: dict[str, Any]) -> str:
    """The route's function, without the path FastAPI appends to its name."""
    return "_".join(str(operation["summary"]).lower().split())
