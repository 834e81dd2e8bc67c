# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document says exactly what the session API answers: no field more, none less."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from appliance.openapi import SESSION, openapi_document
from tests.fakes.appliance import Json, RunningApp, says

ROOT = Path(__file__).parents[2]
TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


def closed(schema: Any) -> Any:
    """The schema with every object closed to fields it does not declare."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    copied = {key: closed(value) for key, value in schema.items()}
    if copied.get("type") == "object" and "properties" in copied:
        copied.setdefault("additionalProperties", False)
    return copied


class Document:
    """Holds answers against the document."""

    def __init__(self) -> None:
        self.paths: Json = openapi_document()["paths"]
        self.components = closed(copy.deepcopy(openapi_document()["components"]))

    def check(self, method: str, path: str, answer: Any, kind: str = "application/json") -> None:
        content = self.paths[path][method]["responses"]["200"]["content"]
        schema = {**content[kind]["schema"], "components": self.components}
        validator = jsonschema_rs.Draft202012Validator(schema)
        problems = [
            f"{error.instance_path}: {error.message}" for error in validator.iter_errors(answer)
        ]
        assert not problems, (method, path, problems, answer)


@pytest.fixture(scope="module")
def document() -> Document:
    return Document()


def test_every_answer_of_a_session_s_life_is_as_the_document_says(
    app: RunningApp, document: Document
) -> None:

    def call(method: str, below: str, body: Json | None = None, **params: Any) -> Any:
        reply = app.http.request(
            method, f"/v1/sessions/{session_id}{below}", json=body, params=params
        )
        assert reply.status_code == 200, reply.text
        return reply.json()

    made = app.post(
        "/v1/sessions",
        {"model": "default", "instructions": "Add.", "tools": [TOOL], "metadata": {"k": "v"}},
    ).json()
    document.check("post", "/v1/sessions", made)
    session_id = made["id"]
    app.engine.script = says('<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>', "3")
    turn = call("POST", "/turns", {"input": "1 and 2?", "max_output_tokens": 60})
    assert turn["stop_reason"] == "tool_use"
    document.check("post", f"{SESSION}/turns", turn)
    document.check("get", SESSION, call("GET", ""))
    signal = {"type": "tool.started", "call_id": turn["output"][-1]["call_id"], "eta_ms": 10}
    document.check("post", f"{SESSION}/signals", call("POST", "/signals", signal))
    result = {"type": "function_call_output", "call_id": signal["call_id"], "output": "3"}
    document.check("post", f"{SESSION}/items", call("POST", "/items", {"items": [result]}))
    events = app.stream(session_id, "So?", max_output_tokens=8)
    for event in events:
        document.check("post", f"{SESSION}/turns", event, "text/event-stream")
    turn_id = events[0]["turn_id"]
    document.check("get", f"{SESSION}/turns/{{turn_id}}", call("GET", f"/turns/{turn_id}"))
    document.check(
        "post", f"{SESSION}/turns/{{turn_id}}/cancel", call("POST", f"/turns/{turn_id}/cancel", {})
    )
    document.check("get", f"{SESSION}/turns", call("GET", "/turns"))
    document.check("get", f"{SESSION}/items", call("GET", "/items"))
    document.check("get", f"{SESSION}/tokens", call("GET", "/tokens"))
    document.check("get", f"{SESSION}/cache", call("GET", "/cache"))
    lease = call("POST", "/leases", {"ttl": "1m"})
    document.check("post", f"{SESSION}/leases", lease)
    document.check("get", f"{SESSION}/leases", call("GET", "/leases"))
    released = call("DELETE", f"/leases/{lease['id']}")
    document.check("delete", f"{SESSION}/leases/{{lease_id}}", released)
    document.check("post", f"{SESSION}/fork", call("POST", "/fork", {"n": 2}))
    updated = call("POST", "", {"metadata": {"k": "w"}})
    document.check("post", SESSION, updated)
    document.check("post", f"{SESSION}/suspend", call("POST", "/suspend"))
    document.check("post", f"{SESSION}/resume", call("POST", "/resume"))
    summary = [{"type": "message", "role": "user", "content": "We added."}]
    compacted = call(
        "POST", "/compact", {"mode": "items", "summary_items": summary, "keep_last_turns": 1}
    )
    document.check("post", f"{SESSION}/compact", compacted)
    document.check("get", "/v1/sessions", app.get("/v1/sessions").json())
    rolled = call("POST", "/rollback", {"to": turn_id})
    document.check("post", f"{SESSION}/rollback", rolled)
    lines = app.get(f"/v1/sessions/{session_id}/export").text
    imported = app.http.post("/v1/sessions/import", content=lines)
    assert imported.status_code == 200, imported.text
    document.check("post", "/v1/sessions/import", imported.json())
    document.check("delete", SESSION, call("DELETE", ""))


def test_a_failed_and_a_cancelled_turn_end_as_the_document_says(
    app: RunningApp, document: Document
) -> None:
    session_id = app.session()
    app.engine.script = says("word " * 50)
    app.engine.hold_at = 5
    with app.http.stream(
        "POST", f"/v1/sessions/{session_id}/turns", json={"input": "x", "stream": True}
    ) as reply:
        turn_id = reply.headers["x-turn-id"]
        app.post(f"/v1/sessions/{session_id}/turns/{turn_id}/cancel")
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert events[-1]["type"] == "turn.cancelled"
    for event in events:
        document.check("post", f"{SESSION}/turns", event, "text/event-stream")


def test_refusals_are_the_document_s_error(app: RunningApp, document: Document) -> None:
    schema = {"$ref": "#/components/schemas/ErrorAnswer", "components": document.components}
    validator = jsonschema_rs.Draft202012Validator(schema)
    for reply in (
        app.get("/v1/sessions/sess_none"),
        app.post("/v1/sessions", {"model": "default", "colour": 1}),
        app.post("/v1/sessions", {"model": "nobody"}),
    ):
        assert reply.status_code in (400, 404)
        assert validator.is_valid(reply.json()), reply.json()


def test_what_the_clients_are_generated_from_is_fresh() -> None:
    ran = subprocess.run(
        [sys.executable, "clients/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
