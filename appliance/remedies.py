# SPDX-License-Identifier: Apache-2.0
"""What whoever gets an error code should do about it; docs/errors.md shows it.

Does not know: statuses, messages. The message of an error says what was wrong this time.
"""

from __future__ import annotations

REMEDY_BY_CODE: dict[str, str] = {
    # what was sent cannot be understood
    "invalid_json": "Send one JSON object, in UTF-8; the message says where it breaks off.",
    "invalid_type": "Send the type that the message names at `param`.",
    "invalid_value": "Send a value that the message allows at `param`.",
    "missing_field": "Add the field `param`.",
    "unknown_field": "Remove the field `param`, or spell it as the message guesses.",
    "unknown_item_type": "Send one of the item types that the message lists.",
    "unsupported_parameter": "Leave `param` out; docs/dialects.md lists what each dialect takes.",
    "invalid_schema": "Mend the JSON schema at `param`.",
    "invalid_setting": "Send a value for the session's setting `param` that the message allows.",
    "invalid_fork_point": "Name a turn, an item or a revision of the session's own history.",
    "invalid_import": "Send the export as it was written; one cut short or changed is not taken.",
    "invalid_tool_choice": "Choose `auto`, `none`, `required` or a tool that the request declares.",
    "reasoning_unsupported": "Leave reasoning out, or serve a model that has it.",
    "invalid_message": "Give the message the shape that the error's text names.",
    "template_refused": "Order the messages as the model's chat template wants; it says how.",
    "invalid_request": "Mend what the message names; the same request fails again.",
    "invalid_grammar": "Mend the schema, pattern or grammar; the message is the compiler's.",
    "previous_response_not_found": "Send the whole conversation, with no `previous_response_id`.",
    "grammar_budget_exceeded": "Try again (the compile goes on and is kept), use a simpler schema, "
    "or raise `engine.grammar.budget_ms`.",
    "context_length_exceeded": "Send less, compact or roll back the session, or set "
    "`context.on_overflow`.",
    # who asks, and for what
    "invalid_api_key": "Send one of the server's keys, as `Authorization: Bearer` or `x-api-key`.",
    "cross_site_request": "List the page's origin in `server.cors_origins`.",
    "model_not_found": "Use a name that `GET /v1/models` lists.",
    "not_found": "Check the path against docs/http-api.md.",
    "session_not_found": "Create the session anew; it was deleted, or is another tenant's.",
    "turn_not_found": "List the session's turns; a rollback or compaction takes turns away.",
    "item_not_found": "List the items again; ids are of one session or response.",
    "response_not_found": "Send the whole conversation; it was deleted, expired or not stored.",
    "implicit_session_not_found": "List them again; one that is not used is forgotten.",
    "lease_not_found": "Take a new lease; this one was released or has run out.",
    "method_not_allowed": "Use a method that the `Allow` header or docs/http-api.md names.",
    # the state of the session is against it
    "turn_in_progress": "Wait for the turn, cancel it, or set the session's `on_conflict: queue`.",
    "revision_conflict": "Read the session: it went on. Decide anew, with its `revision`.",
    "session_exists": "Use the session that is there, or another id.",
    "version_conflict": "Try again; others changed the session at the same moment.",
    "model_changed": "Begin a new session, or set `strict_model: false` and pay a prefill.",
    "compaction_in_progress": "Wait for `session.compacted`; compact again only if it must be.",
    "session_expired": "Create a new session, with a longer `expires_after` if it should last.",
    "events_expired": "Read the turn itself, at the error's `turn`: it holds all that was said.",
    "request_too_large": "Send less at a time, or raise `server.max_body_mb`.",
    "unsupported_encoding": "Send the body plain, or as gzip, deflate or zstd.",
    "unresolved_tool_calls": "Send a `function_call_output` for each of `call_ids`, or "
    "`auto_close_calls: true`.",
    "unknown_call_id": "Answer calls that are open; the message lists them.",
    "idempotency_key_reused": "Use a new key for another body, the old body for the old key.",
    "nothing_to_compact": "Keep fewer turns (`keep_last_turns`), or leave the session as it is.",
    "compaction_failed": "Send a summary of your own (`items`), shorter than what it replaces.",
    # load and trouble
    "kv_quota_exceeded": "Delete sessions, or raise the tenant's tokens (`moorage quota set`).",
    "session_quota_exceeded": "Delete sessions, or raise their number (`moorage quota set`).",
    "queue_full": "Come back after `Retry-After`, and a little later each time.",
    "internal_error": "Try again once; report it with the `X-Request-Id`, which the log has too.",
    "capacity": "Come back after `Retry-After`, and a little later each time.",
    "draining": "Come back after `Retry-After`: the server restarts, sessions are kept.",
    "engine_unavailable": "Come back after `Retry-After`; if it stays, ask `moorage doctor`.",
    "engine_restarted": "Send the turn again: the session is as it was before it.",
    "api_restarted": "Send the request again; a turn of a session goes on: read it by its id.",
    "store_unavailable": "Come back after `Retry-After`; the operator looks at the session store.",
    "store_full": "Delete sessions, or give the session store more disk or memory; reads go on.",
    "store_corrupt": "Restore the session from an export or a backup; others are not touched.",
    "store_schema_too_new": "Serve the state directory with the version that wrote it, or later.",
}
