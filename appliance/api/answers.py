# SPDX-License-Identifier: Apache-2.0
"""What the session API answers, as types: the source of the OpenAPI document's answer schemas.

Requests never pass through these models (answers are built as plain JSON values); a test holds
real answers against them, undeclared fields included. Does not know: how answers come about.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

Status = Literal["completed", "incomplete", "in_progress"]


class TextPart(TypedDict):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: NotRequired[list[Any]]


class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


class MessageItem(TypedDict):
    type: Literal["message"]
    id: str
    role: Literal["system", "developer", "user", "assistant"]
    content: list[TextPart | RefusalPart]
    status: Status


class ReasoningItem(TypedDict):
    type: Literal["reasoning"]
    id: str
    content: list[TextPart]
    summary: NotRequired[list[TextPart]]
    status: Status


class FunctionCallItem(TypedDict):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class FunctionCallOutputItem(TypedDict):
    type: Literal["function_call_output"]
    id: str
    call_id: str
    output: str | list[TextPart]
    status: Literal["completed", "incomplete", "failed", "interrupted", "in_progress"]


class CompactionItem(TypedDict):
    type: Literal["compaction"]
    id: str
    summary: str
    num_replaced: int


Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem


class TierTokens(TypedDict):
    """Tokens per tier; an absent tier is unknown."""

    l1: NotRequired[int]
    l2: NotRequired[int]
    l3: NotRequired[int]


class Miss(TypedDict):
    reason: str
    first_diverging_item: str | None
    missed_tokens: int


class ErrorObject(TypedDict, extra_items=Any):  # type: ignore[call-arg]
    """Some codes add fields of their own: `turn_id`, `call_ids`, `open_call_ids`, ..."""

    type: str
    code: str
    message: str
    param: str | None


class ErrorAnswer(TypedDict):
    error: ErrorObject


class UsageDetails(TypedDict):
    cached_tokens: NotRequired[int]
    reasoning_tokens: NotRequired[int]


class TurnUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: NotRequired[UsageDetails]
    output_tokens_details: NotRequired[UsageDetails]
    x_cache: TierTokens


class TurnCache(TypedDict):
    """Where a turn's prompt came from; an absent count is unknown."""

    turn_id: str
    cached_l1: NotRequired[int]
    cached_l2: NotRequired[int]
    cached_l3: NotRequired[int]
    computed: NotRequired[int]
    expected: int
    miss: Miss | None


class TurnTimings(TypedDict):
    queued_ms: NotRequired[float]
    first_token_ms: NotRequired[float]


TurnStatus = Literal["queued", "running", "completed", "incomplete", "cancelled", "failed"]
StopReason = Literal["end_turn", "tool_use", "stop_sequence"]
IncompleteReason = Literal["max_output_tokens", "context_limit", "deadline"]


class Turn(TypedDict):
    """A turn; what is only known at its end is absent before."""

    id: str
    object: Literal["turn"]
    session_id: str
    status: TurnStatus
    input: list[Item]
    output: list[Item]
    created_at: NotRequired[float]
    finished_at: NotRequired[float]
    revision: NotRequired[int]
    committed: NotRequired[bool]
    committed_tokens: NotRequired[int]
    usage: NotRequired[TurnUsage]
    x_cache: NotRequired[TierTokens]
    cache: NotRequired[TurnCache]
    timings: NotRequired[TurnTimings]
    stop_reason: NotRequired[StopReason]
    reason: NotRequired[IncompleteReason]
    error: NotRequired[ErrorObject]
    x_grammar_fallback: NotRequired[Any]
    x_invalid_calls: NotRequired[list[Any]]
    x_parse_problems: NotRequired[list[Any]]


class OpenCall(TypedDict):
    call_id: str
    name: str


class ReasoningSettings(TypedDict):
    effort: str | None
    history: Literal["keep", "drop_before_last_user"]


class SessionUsage(TypedDict):
    input: int
    output: int
    cache_read: int
    cache_creation: int


class Hold(TypedDict):
    l1: str
    l2: str
    l3: str


class SessionCacheSettings(TypedDict):
    hold: Hold
    lease: dict[str, Any] | None


class ContextSettings(TypedDict):
    max_tokens: int | None
    on_overflow: Literal["error", "compact", "truncate_oldest"]
    compact_at: float
    compact_to: float


SessionStatus = Literal[
    "idle", "queued", "running", "requires_action", "suspended", "expired", "failed", "closed"
]


class Quota(TypedDict):
    """What the session's tenant may hold, and holds; None: no limit."""

    max_sessions: int | None
    max_tokens: int | None
    sessions: int
    tokens: int


class Session(TypedDict):
    id: str
    object: Literal["session"]
    tenant: str
    status: SessionStatus
    revision: int
    model: str
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any] | None
    reasoning: ReasoningSettings
    open_calls: list[OpenCall]
    current_turn: str | None
    last_turn: str | None
    num_tokens: int
    num_items: int
    usage: SessionUsage
    cache: SessionCacheSettings
    context: ContextSettings
    on_conflict: Literal["reject", "queue", "interrupt"]
    on_disconnect: Literal["continue", "cancel"]
    priority: int
    created_at: float
    updated_at: float
    expires_at: float
    parent_session_id: str | None
    metadata: dict[str, str]
    error: ErrorObject | None
    quota: NotRequired[Quota]


class Lease(TypedDict):
    id: str
    object: Literal["lease"]
    session_id: str
    tier: Literal["l1", "l2", "l3"]
    upto: str
    state: Literal["granted", "clipped", "queued", "denied"]
    tokens_requested: int
    tokens_granted: int
    ttl: str
    renew_on_use: bool
    expires_at: float
    reason: str | None


class LeaseDeleted(TypedDict):
    id: str
    object: Literal["lease"]
    deleted: Literal[True]


class Signal(TypedDict):
    object: Literal["session.signal"]
    session_id: str
    signal: Literal["tool.started", "tool.progress", "tool.returning", "user.active", "idle"]
    decision: Literal["keep", "demote_l2", "demote_l3", "prefetch", "ignored"]
    reason: str | None
    cached_tokens: int
    resident: NotRequired[TierTokens | None]


class SessionTokens(TypedDict):
    object: Literal["tokens"]
    session_id: str
    revision: int
    num_tokens: int
    token_ids: list[int]


class SessionPage(TypedDict):
    object: Literal["list"]
    data: list[Session]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ItemPage(TypedDict):
    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TurnPage(TypedDict):
    object: Literal["list"]
    data: list[Turn]
    first_id: str | None
    last_id: str | None
    has_more: bool


class LeaseList(TypedDict):
    object: Literal["list"]
    data: list[Lease]
    has_more: bool


class TierCosts(TypedDict):
    """Byte-seconds of KV so far."""

    l1_byte_s: float
    l2_byte_s: float
    l3_byte_s: float


class RecentTurns(TypedDict):
    """The prompts of the last turns whose cache is known, summed up."""

    turns: int
    cached_tokens: int
    prompt_tokens: int


class CacheView(TypedDict, extra_items=Any):  # type: ignore[call-arg]
    """`resident`: where a turn would find each token, the nearest tier; unknown without an engine.

    `copies`: tokens that each tier holds, in whole pages.
    """

    object: Literal["session.cache"]
    session_id: str
    tokens_total: int
    leased: int
    shared_tokens: int
    cost: TierCosts
    copies: TierTokens | None
    last_turn: TurnCache | None
    recent_turns: RecentTurns
    num_turns: int
    miss: Miss | None
    resident: NotRequired[TierTokens]


class SessionUpdated(Session):
    """`x_invalidated_tokens`: history that must be computed again because of the change."""

    x_invalidated_tokens: int


class RolledBack(Session):
    """`x_released_tokens`: of the superseded branch, whose KV was let go."""

    x_released_tokens: int


class Suspended(Session):
    """`kept_tokens` are in `tier` and below; the others are computed again when wanted."""

    tier: Literal["l2", "l3"] | None
    resident: TierTokens
    kept_tokens: int
    dropped_tokens: int


class Resumed(Session):
    restored_tokens: int
    recompute_tokens: int
    resident: TierTokens


class ForkAnswer(TypedDict):
    object: Literal["list"]
    data: list[Session]


class SessionDeleted(TypedDict):
    id: str
    object: Literal["session"]
    deleted: Literal[True]


class PrefillAnswer(TypedDict, extra_items=Any):  # type: ignore[call-arg]
    """How the KV of appended items is being computed."""

    state: str


class ItemsAppended(TypedDict, extra_items=Any):  # type: ignore[call-arg]
    object: Literal["list"]
    data: list[Item]
    revision: int
    prefill: NotRequired[PrefillAnswer | None]


class Compacted(TypedDict):
    """What a compaction put in place of the older part of a history."""

    id: str
    object: Literal["session.compaction"]
    session_id: str
    status: Literal["completed"]
    revision: int
    items: list[Item]
    num_tokens: int
    num_tokens_before: int
    replaced_items: int
    kept_turns: int
    kept_tokens: int
    summary_tokens: int
    prefill: PrefillAnswer | None
