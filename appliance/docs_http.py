# SPDX-License-Identifier: Apache-2.0
"""Generates docs/http-api.md from the routes and their body models.

Does not know: other pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from appliance.app import ROUTERS

NOTE = "<!-- generated: {how} -->\n"
WRITE = "python -m appliance.docs docs"

TAGS = {
    "sessions": "Sessions",
    "turns": "Turns",
    "openai": "OpenAI dialects",
    "anthropic": "Anthropic's dialect",
    "operations": "Operations",
    "admin": "Admin (the CLI's own key, or any caller where no keys are configured)",
}

EVENTS = """
## The events of a turn

Each event has an `id:` line (its number), an `event:` line (its type) and JSON with `type`,
`sequence_number` (from 1), `session_id` and `turn_id`. A comment line comes at least every
`server.heartbeat_s` seconds.

| event | fields |
|---|---|
| turn.created | `turn` |
| turn.queued | `position`: turns that wait in front of this one |
| turn.cache | `cached_l1`, `cached_l2`, `cached_l3`, `to_compute`, `miss`; anew for a new engine |
| turn.prefill.progress | `done`, `total` |
| turn.in_progress | none: the first token is there |
| turn.stalled | `phase`: queued, prefill or decode; `waiting_s` without a word of the engine |
| response.output_item.added | `output_index`, `item` |
| response.content_part.added, .done | `item_id`, `output_index`, `content_index`, `part` |
| response.output_text.delta, .done | the same, but `delta` or `text` for `part` |
| response.reasoning_text.delta, .done | as for output_text |
| response.function_call_arguments.delta | `item_id`, `output_index`, `delta` |
| response.function_call_arguments.done | `item_id`, `output_index`, `name`, `arguments` |
| response.output_item.done | `output_index`, `item`; `x_invalid_arguments` of a call |
| turn.completed | `stop_reason`: end_turn, tool_use or stop_sequence |
| turn.incomplete | `reason`: max_output_tokens, context_limit or deadline |
| turn.cancelled | |
| turn.failed | `error` |

Exactly one of the last four ends a turn. It carries `items` (the output as it was committed),
`usage`, `x_cache`, `revision`, and `turn`, the whole turn as `GET .../turns/{turn_id}` returns it:
`committed_tokens` (output tokens that are in the history), `cache` (what was reused, what was
expected, and the `miss`), `x_grammar_fallback` (tools whose grammar is looser than their schema),
`x_invalid_calls` (calls whose arguments break their schema).

A stream that ends because the appliance stops, and not the turn, has one last frame without a
number: `stream.reconnect` with `starting_after` and `retry_after_ms`. The rest is to be had there.

A miss has a `reason`, the `first_diverging_item` and `missed_tokens`. Reasons: `evicted`;
`part_page` (lower tiers keep whole pages, the last tokens were in L1 alone); `suspended` (what a
suspend did not keep); `engine_restarted`; `model_changed`, `settings_changed`, `compacted`,
`reasoning_dropped` (the history became another).

## The events of a session, and of the cache

`GET /v1/sessions/{session_id}/events` and `GET /v1/cache/events` are live: they begin when they are
asked for, number their own events and replay nothing. They tell of what this API process did;
where several share a store, each tells its part. A reader that falls far behind gets `events.lost`
with `num`.

| event | fields besides session_id, status, revision, num_tokens, current_turn, at |
|---|---|
| session.state | none; the first event |
| session.turn_started | `turn_id` |
| session.turn_ended | `turn_id`, `turn_status` |
| session.items_appended | `num_items` |
| session.history_replaced | none: a rollback, a new head, another model |
| session.updated, session.suspended, session.expired | |
| session.closed | the last event |
| session.residency | only `session_id` and `l1`, `l2`, `l3`: tokens in each tier |
| session.prefilled | only `session_id`, `state`, `cached_tokens`, `computed_tokens`, `error` |
| session.signal | `signal`, `decision`, `reason`, `cached_tokens`, `resident`, what came with it |
| session.moved | only `session_id`, `tier`, `resident`: a signal's demotion or prefetch is over |
| session.compaction_started | only `session_id`, `replaced_items` |
| session.compacted | only what `POST .../compact` answers |
| session.compaction_failed | only `session_id`, `code`, `message` |
| lease.granted, .clipped, .queued, .denied, .demoted, .revoked, .expired | only those, `lease` |
| cache.stored, cache.moved, cache.removed | `tier`, `page_hash`, `parent_hash`, `num_tokens` |
| cache.reset | none that mean anything: forget what earlier events said |
"""


def http_api_page() -> str:
    """Return docs/http-api.md: every route with its query and body fields, and the events."""
    app = FastAPI()
    for router in ROUTERS:
        app.include_router(router)
    schema = app.openapi()
    lines = [
        NOTE.format(how=WRITE),
        "# HTTP API\n",
        "Bodies and answers are JSON; streams are server-sent events. Where API keys are",
        "configured, send `Authorization: Bearer <key>`; the key decides the tenant. Errors read",
        '`{"error": {type, code, message, param}}`; [errors.md](errors.md) lists the codes.',
        "Session endpoints refuse unknown fields; the OpenAI dialects accept and log them.",
        "[A first session](first-session.md) shows the calls in use; `GET /openapi.json` has all",
        "of this for programs.\n",
    ]
    routes = [
        (path, method, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    for tag, title in TAGS.items():
        lines.append(f"## {title}\n")
        of_tag = [route for route in routes if route[2]["tags"] == [tag]]
        # Routes stand as they are matched, `import` before `{session_id}`; a reader creates first.
        of_tag.sort(key=lambda route: route[0] != "/v1/sessions")
        for path, method, operation in of_tag:
            lines += _route_section(path, method, operation, schema)
    return "\n".join([*lines, EVENTS.strip()]) + "\n"


def _route_section(
    path: str, method: str, operation: dict[str, Any], schema: dict[str, Any]
) -> list[str]:
    lines = [f"### {method.upper()} {path}\n", f"{operation['description']}\n"]
    rows = [
        (f"{p['name']} ({p['in']})", _schema_type(p["schema"], schema), p["schema"].get("default"))
        for p in operation.get("parameters", ())
        if p["in"] != "path"
    ]
    content = operation.get("requestBody", {}).get("content", {})
    for media in content.values():
        rows += _body_rows("", media["schema"], schema)
    if rows:
        lines += ["| field | type | default |", "|---|---|---|"]
        lines += [f"| {name} | {kind} | {_shown_default(value)} |" for name, kind, value in rows]
        lines.append("")
    return lines


def _body_rows(
    prefix: str, node: dict[str, Any], schema: dict[str, Any]
) -> Iterator[tuple[str, str, Any]]:
    node = _resolve(node, schema)
    required = node.get("required", ())
    for name, field in node.get("properties", {}).items():
        default = "required" if name in required else field.get("default")
        yield f"{prefix}{name}", _schema_type(field, schema), default
        for option in field.get("anyOf", [field]):
            if "$ref" in option:
                yield from _body_rows(f"{prefix}{name}.", option, schema)


def _resolve(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        node = schema["components"]["schemas"][node["$ref"].rsplit("/", 1)[1]]
    return node


def _schema_type(node: dict[str, Any], schema: dict[str, Any]) -> str:
    if "anyOf" in node:
        options = [_schema_type(option, schema) for option in node["anyOf"]]
        return " or ".join(option for option in dict.fromkeys(options) if option != "null")
    if "enum" in node:
        return ", ".join(map(str, node["enum"]))
    kind = str(_resolve(node, schema).get("type", "any"))
    bounds = [
        f"{sign} {_plain(node[key])}"
        for key, sign in (
            ("exclusiveMinimum", ">"),
            ("minimum", ">="),
            ("exclusiveMaximum", "<"),
            ("maximum", "<="),
        )
        if key in node and abs(node[key]) < 2**53
    ]
    return " ".join([kind, ", ".join(bounds)]).strip()


def _plain(number: float) -> str:
    """All digits, and no `.0`: an exponent is not what a client would write."""
    return str(int(number)) if number == int(number) else str(number)


def _shown_default(value: Any) -> str:
    if value == "required":
        return "required"
    if value == "":
        return '`""`'
    return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"
