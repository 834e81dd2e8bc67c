# SPDX-License-Identifier: Apache-2.0
"""The bodies of the session API, as pydantic models: unknown fields and loose types are errors.

Items and tools stay raw here: sessions and tools_schema parse them. Does not know: what fields do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from appliance.api.wire_values import (
    INT32_MAX,
    Milliseconds,
    MinP,
    Penalty,
    PositiveInt,
    Priority,
    RepetitionPenalty,
    Seed,
    StopList,
    Temperature,
    TopK,
    TopP,
)

MAX_FORKS = 32


class StrictBody(BaseModel):
    """A body of our own API: an unknown field or a loosely typed value is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ReasoningBody(StrictBody):
    effort: str | None = None
    history: Literal["keep", "drop_before_last_user"] = "keep"


class LeaseWish(StrictBody):
    """A lease on the head of a history, in one tier."""

    tier: Literal["l1", "l2", "l3"] = "l1"
    ttl: str
    renew_on_use: bool = True


class LeaseCreate(LeaseWish):
    """POST /v1/sessions/{id}/leases: `upto` is `head`, a turn or an item."""

    upto: str = "head"


class SignalCreate(StrictBody):
    """POST /v1/sessions/{id}/signals. `eta_ms`: until the session's next turn, if known."""

    type: Literal["tool.started", "tool.progress", "tool.returning", "user.active", "idle"]
    call_id: str | None = None
    tool_name: str | None = None
    eta_ms: Annotated[int, Field(ge=0)] | None = None


class CacheBody(StrictBody):
    hold: dict[str, str] | None = None
    lease: LeaseWish | None = None


class ContextBody(StrictBody):
    max_tokens: PositiveInt | None = None
    on_overflow: Literal["error", "compact", "truncate_oldest"] = "error"
    compact_at: float = 0.9
    compact_to: float = 0.6


class SessionCreate(StrictBody):
    """POST /v1/sessions."""

    model: str
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning: ReasoningBody | None = None
    initial_items: list[Any] | str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    cache: CacheBody | None = None
    context: ContextBody | None = None
    on_conflict: Literal["reject", "queue", "interrupt"] = "reject"
    on_disconnect: Literal["continue", "cancel"] = "continue"
    priority: Priority = 0
    parent_session_id: str | None = None
    expires_after: str | None = None
    strict_model: bool = False


class SessionUpdate(StrictBody):
    """POST /v1/sessions/{id}: the fields that may change; absent ones stay, nested ones too.

    `instructions: null` takes them away, and a null in `metadata` its key.
    """

    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning: ReasoningBody | None = None
    metadata: dict[str, str | None] | None = None
    cache: CacheBody | None = None
    context: ContextBody | None = None
    on_conflict: Literal["reject", "queue", "interrupt"] | None = None
    on_disconnect: Literal["continue", "cancel"] | None = None
    priority: Priority | None = None
    expires_after: str | None = None


class TurnCreate(StrictBody):
    """POST /v1/sessions/{id}/turns."""

    input: list[Any] | str = Field(default_factory=list)
    stream: bool = False
    max_output_tokens: PositiveInt | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Seed | None = None
    stop: StopList = None
    ignore_eos: bool = False
    response_format: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    min_tool_calls: Annotated[int, Field(ge=0)] | None = None
    deadline_ms: Milliseconds | None = None
    expect_revision: Annotated[int, Field(ge=0)] | None = None
    store_partial: bool = True
    auto_close_calls: bool = False


class ItemsAppend(StrictBody):
    """POST /v1/sessions/{id}/items.

    With `partial` or `final`, `items` is the next piece of the output of the open call `call_id`;
    `offset` says where it begins, in characters, so that a piece that is sent again counts once.
    """

    items: list[Any] | str
    prefill: Literal["none", "background", "now"] = "none"
    partial: bool = False
    call_id: str | None = None
    final: bool = False
    offset: Annotated[int, Field(ge=0)] | None = None
    expect_revision: Annotated[int, Field(ge=0)] | None = None
    auto_close_calls: bool = False


class ForkCreate(StrictBody):
    """POST /v1/sessions/{id}/fork."""

    at: str = "head"
    n: Annotated[int, Field(ge=1, le=MAX_FORKS)] = 1
    metadata: dict[str, str] = Field(default_factory=dict)


class Rollback(StrictBody):
    """POST /v1/sessions/{id}/rollback: a turn, an item or a revision to go back to."""

    to: str | int
    expect_revision: Annotated[int, Field(ge=0)] | None = None


class CompactCreate(StrictBody):
    """POST /v1/sessions/{id}/compact.

    summary: the model writes it. items: `summary_items` stand for what goes. `warm`: the new
    prefix is prefilled before it is put in place.
    """

    mode: Literal["summary", "items"] = "summary"
    summary_items: list[Any] | str | None = None
    keep_last_turns: Annotated[int, Field(ge=0, le=INT32_MAX)] = 1
    warm: bool = True


class QuotaBody(StrictBody):
    """PUT /admin/quotas/{tenant}. null: as configured for all; 0: no limit."""

    max_sessions: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**53)] | None = None
