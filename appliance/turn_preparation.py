# SPDX-License-Identifier: Apache-2.0
"""From a request to a turn that can be stored, and from a stored turn to one that can run.

Does not know: when either happens, stores, HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from appliance.api.wire_sessions import TurnCreate
from appliance.cache_report import expected_reuse, of_session
from appliance.errors import ApiError
from appliance.grammars import GrammarQuestion
from appliance.services import Services
from appliance.text_limits import ContextExceeded, check_can_fit, num_chars
from appliance.turn_events import TurnEvents
from appliance.turn_params import TurnParams, turn_params
from appliance.turn_run import TurnRun
from sessions.ids import new_id
from sessions.items import item_to_wire, parse_items
from sessions.session import Session
from sessions.token_codec import count
from sessions.turn_log import PendingTurn, TurnLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request for a turn. `body_hash` says whether two bodies are the same."""

    tenant: str | None
    session_id: str
    body: TurnCreate
    idempotency_key: str | None = None
    body_hash: str = ""
    received_s: float = field(default_factory=time.monotonic)

    @property
    def num_chars(self) -> int:
        """How much text there is to tokenise."""
        return num_chars(self.body.input)

    @classmethod
    def of_waiting(cls, pending: PendingTurn) -> Ask:
        """The request of a turn that waits, as the store has it."""
        ask = pending.ask or {}
        return cls(
            tenant=ask.get("tenant"),
            session_id=pending.session_id,
            body=TurnCreate.model_validate(ask.get("body") or {}),
            idempotency_key=pending.idempotency_key,
            body_hash=pending.body_hash,
        )


def waiting_turn(services: Services, session: Session, ask: Ask, now_ms: int) -> PendingTurn:
    """Return a turn that is to wait, as the store keeps it: its items, not yet rendered.

    Its items get their ids now, so they have the same when it begins. Raises: ItemError.
    """
    items = parse_items(ask.body.input)
    body = ask.body.model_copy(update={"input": [item_to_wire(item) for item in items]})
    return PendingTurn(
        id=new_id("turn"),
        session_id=session.id,
        base_revision=session.revision,
        input_items=items,
        idempotency_key=ask.idempotency_key,
        body_hash=ask.body_hash,
        created_at_ms=now_ms,
        deadline_ms=body.deadline_ms,
        owner=services.owner,
        ask={"tenant": ask.tenant, "body": body.model_dump(exclude_unset=True)},
    )


def prepare_turn(
    services: Services,
    session: Session,
    log: TurnLog,
    ask: Ask,
    now_ms: int,
    *,
    turn_id: str | None = None,
) -> PendingTurn:
    """Check and render a turn; nothing is written and the engine hears nothing.

    Raises: the errors of the session room and of tools_schema; ApiError.
    """
    body = ask.body
    limit = services.context_limit(session)
    max_token_bytes = services.assets.tokenizer.max_token_bytes
    check_can_fit(ask.num_chars, limit - session.num_tokens, max_token_bytes, "input")
    items = session.prepare_input(parse_items(body.input), auto_close_calls=body.auto_close_calls)
    head = services.head_of(session)
    rendered = services.renderer.render_turn(services.end_of(session, log, items), items, head)
    prompt_len = session.num_tokens + count(rendered.token_ids)
    if not prompt_len:
        raise ApiError("invalid_value", "input: there is nothing to answer", "input")
    if prompt_len >= limit:
        num_new = count(rendered.token_ids)
        raise ContextExceeded(
            f"input: {num_new} new tokens behind {session.num_tokens} make {prompt_len}; the "
            f"context holds {limit}, output included",
            "input",
            num_new,
        )
    params = turn_params(body, session.settings.tool_choice, limit - prompt_len)
    question = GrammarQuestion(
        head.toolset,
        params.choice(head.toolset),
        params.parsed_response_format(),
        services.reasoning_of(rendered.token_ids),
    )
    plan = services.grammars.plan(question)
    if body.ignore_eos and plan.text is not None:
        message = "ignore_eos: cannot be had with a grammar (tools, response_format, reasoning)"
        raise ApiError("unsupported_parameter", message, "ignore_eos")
    return PendingTurn(
        id=turn_id or new_id("turn"),
        session_id=session.id,
        base_revision=session.revision,
        input_items=items,
        input_token_ids=rendered.token_ids,
        item_token_ends=rendered.item_token_ends,
        params=params.to_stored(),
        idempotency_key=ask.idempotency_key,
        body_hash=ask.body_hash,
        created_at_ms=now_ms,
        deadline_ms=body.deadline_ms,
        owner=services.owner,
    )


def build_run(
    services: Services,
    session: Session,
    log: TurnLog,
    pending: PendingTurn,
    events: TurnEvents,
) -> TurnRun:
    """Put together what a turn needs while it runs; the same before and after a restart."""
    params = TurnParams.from_stored(pending.params)
    toolset = services.head_of(session).toolset
    hello = services.client.hello
    page_size = hello.page_size if hello is not None else 1
    return TurnRun(
        pending=pending,
        params=params,
        events=events,
        answer=services.answer_reader(
            pending.id,
            toolset,
            params.choice(toolset),
            params.stop,
            services.reasoning_of(pending.input_token_ids),
        ),
        response=services.response_events(pending.id, toolset),
        client=services.client,
        records=log.records,
        history=log.token_ids,
        expected=of_session(expected_reuse(log), session, page_size),
        tenant=session.tenant,
        salt=services.salt_of(session.tenant),
        priority=session.settings.priority,
        session=session,
        model_fingerprint=services.assets.fingerprint,
    )
