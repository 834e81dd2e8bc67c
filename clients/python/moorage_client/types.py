# SPDX-License-Identifier: Apache-2.0
# Generated from openapi.json (sha256 b8514f0d8fe9a807) by clients/generate.py; do not edit.

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict


class ArgumentsDelta(TypedDict):
    delta: str
    item_id: str
    output_index: int
    sequence_number: int
    session_id: str
    turn_id: str
    type: Literal["response.function_call_arguments.delta"]


class ArgumentsDone(TypedDict):
    arguments: str
    item_id: str
    name: str
    output_index: int
    sequence_number: int
    session_id: str
    turn_id: str
    type: Literal["response.function_call_arguments.done"]


class CompactionItem(TypedDict):
    id: str
    num_replaced: int
    summary: str
    type: Literal["compaction"]


class ContextBody(TypedDict):
    compact_at: NotRequired[float]
    compact_to: NotRequired[float]
    max_tokens: NotRequired[int | None]
    on_overflow: NotRequired[Literal["error", "compact", "truncate_oldest"]]


class ContextSettings(TypedDict):
    compact_at: float
    compact_to: float
    max_tokens: int | None
    on_overflow: Literal["error", "compact", "truncate_oldest"]


class ErrorObject(TypedDict):
    """
    Some codes add fields of their own: `turn_id`, `call_ids`, `open_call_ids`, ...
    """

    code: str
    message: str
    param: str | None
    type: str


class ForkCreate(TypedDict):
    """
    POST /v1/sessions/{id}/fork.
    """

    at: NotRequired[str]
    metadata: NotRequired[dict[str, str]]
    n: NotRequired[int]


class FunctionCallItem(TypedDict):
    arguments: str
    call_id: str
    id: str
    name: str
    status: Literal["completed", "incomplete", "in_progress"]
    type: Literal["function_call"]


class Hold(TypedDict):
    l1: str
    l2: str
    l3: str


class InputToolCall(TypedDict):
    arguments: str
    call_id: str
    id: NotRequired[str]
    name: str
    type: Literal["function_call"]


class Lease(TypedDict):
    expires_at: float
    id: str
    object: Literal["lease"]
    reason: str | None
    renew_on_use: bool
    session_id: str
    state: Literal["granted", "clipped", "queued", "denied"]
    tier: Literal["l1", "l2", "l3"]
    tokens_granted: int
    tokens_requested: int
    ttl: str
    upto: str


class LeaseCreate(TypedDict):
    """
    POST /v1/sessions/{id}/leases: `upto` is `head`, a turn or an item.
    """

    renew_on_use: NotRequired[bool]
    tier: NotRequired[Literal["l1", "l2", "l3"]]
    ttl: str
    upto: NotRequired[str]


class LeaseDeleted(TypedDict):
    deleted: Literal[True]
    id: str
    object: Literal["lease"]


class LeaseList(TypedDict):
    data: list[Lease]
    has_more: bool
    object: Literal["list"]


class LeaseWish(TypedDict):
    """
    A lease on the head of a history, in one tier.
    """

    renew_on_use: NotRequired[bool]
    tier: NotRequired[Literal["l1", "l2", "l3"]]
    ttl: str


class Miss(TypedDict):
    first_diverging_item: str | None
    missed_tokens: int
    reason: str


class OpenCall(TypedDict):
    call_id: str
    name: str


class PrefillAnswer(TypedDict):
    """
    How the KV of appended items is being computed.
    """

    state: str


class PrefillProgress(TypedDict):
    done: int
    sequence_number: int
    session_id: str
    total: int
    turn_id: str
    type: Literal["turn.prefill.progress"]


class Quota(TypedDict):
    """
    What the session's tenant may hold, and holds; None: no limit.
    """

    max_sessions: int | None
    max_tokens: int | None
    sessions: int
    tokens: int


class ReasoningBody(TypedDict):
    effort: NotRequired[str | None]
    history: NotRequired[Literal["keep", "drop_before_last_user"]]


class ReasoningSettings(TypedDict):
    effort: str | None
    history: Literal["keep", "drop_before_last_user"]


class RecentTurns(TypedDict):
    """
    The prompts of the last turns whose cache is known, summed up.
    """

    cached_tokens: int
    prompt_tokens: int
    turns: int


class RefusalPart(TypedDict):
    refusal: str
    type: Literal["refusal"]


class Rollback(TypedDict):
    """
    POST /v1/sessions/{id}/rollback: a turn, an item or a revision to go back to.
    """

    expect_revision: NotRequired[int | None]
    to: str | int


class SessionCacheSettings(TypedDict):
    hold: Hold
    lease: dict[str, Any] | None


class SessionDeleted(TypedDict):
    deleted: Literal[True]
    id: str
    object: Literal["session"]


class SessionTokens(TypedDict):
    num_tokens: int
    object: Literal["tokens"]
    revision: int
    session_id: str
    token_ids: list[int]


class SessionUsage(TypedDict):
    cache_creation: int
    cache_read: int
    input: int
    output: int


class SignalCreate(TypedDict):
    """
    POST /v1/sessions/{id}/signals. `eta_ms`: until the session's next turn, if known.
    """

    call_id: NotRequired[str | None]
    eta_ms: NotRequired[int | None]
    tool_name: NotRequired[str | None]
    type: Literal["tool.started", "tool.progress", "tool.returning", "user.active", "idle"]


class TextDelta(TypedDict):
    content_index: int
    delta: str
    item_id: str
    output_index: int
    sequence_number: int
    session_id: str
    turn_id: str
    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]


class TextDone(TypedDict):
    content_index: int
    item_id: str
    output_index: int
    sequence_number: int
    session_id: str
    text: str
    turn_id: str
    type: Literal["response.output_text.done", "response.reasoning_text.done"]


class TextPart(TypedDict):
    annotations: NotRequired[list[Any]]
    text: str
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]


class TierCosts(TypedDict):
    """
    Byte-seconds of KV so far.
    """

    l1_byte_s: float
    l2_byte_s: float
    l3_byte_s: float


class TierTokens(TypedDict):
    """
    Tokens per tier; an absent tier is unknown.
    """

    l1: NotRequired[int]
    l2: NotRequired[int]
    l3: NotRequired[int]


class Tool(TypedDict):
    """
    A function in the Responses shape; Chat Completions' nested shape is taken too.
    """

    description: NotRequired[str]
    name: str
    parameters: NotRequired[dict[str, Any]]
    strict: NotRequired[bool | None]
    type: Literal["function"]


class TurnCache(TypedDict):
    """
    Where a turn's prompt came from; an absent count is unknown.
    """

    cached_l1: NotRequired[int]
    cached_l2: NotRequired[int]
    cached_l3: NotRequired[int]
    computed: NotRequired[int]
    expected: int
    miss: Miss | None
    turn_id: str


class TurnCacheEvent(TypedDict):
    cached_l1: NotRequired[int]
    cached_l2: NotRequired[int]
    cached_l3: NotRequired[int]
    miss: Miss | None
    sequence_number: int
    session_id: str
    to_compute: NotRequired[int]
    turn_id: str
    type: Literal["turn.cache"]


class TurnInProgress(TypedDict):
    sequence_number: int
    session_id: str
    turn_id: str
    type: Literal["turn.in_progress"]


class TurnQueued(TypedDict):
    position: int
    sequence_number: int
    session_id: str
    turn_id: str
    type: Literal["turn.queued"]


class TurnTimings(TypedDict):
    first_token_ms: NotRequired[float]
    queued_ms: NotRequired[float]


class UsageDetails(TypedDict):
    cached_tokens: NotRequired[int]
    reasoning_tokens: NotRequired[int]


class CacheBody(TypedDict):
    hold: NotRequired[dict[str, str] | None]
    lease: NotRequired[LeaseWish | None]


class CacheView(TypedDict):
    """
    `resident`: where a turn would find each token, the nearest tier; unknown without an engine.

    `copies`: tokens that each tier holds, in whole pages.
    """

    copies: TierTokens | None
    cost: TierCosts
    last_turn: TurnCache | None
    leased: int
    miss: Miss | None
    num_turns: int
    object: Literal["session.cache"]
    recent_turns: RecentTurns
    resident: NotRequired[TierTokens]
    session_id: str
    shared_tokens: int
    tokens_total: int


class ContentPart(TypedDict):
    content_index: int
    item_id: str
    output_index: int
    part: TextPart
    sequence_number: int
    session_id: str
    turn_id: str
    type: Literal["response.content_part.added", "response.content_part.done"]


class ErrorAnswer(TypedDict):
    error: ErrorObject


class FunctionCallOutputItem(TypedDict):
    call_id: str
    id: str
    output: str | list[TextPart]
    status: Literal["completed", "incomplete", "failed", "interrupted", "in_progress"]
    type: Literal["function_call_output"]


class InputMessage(TypedDict):
    """
    `type` may be left out where there is a `role`.
    """

    content: str | list[TextPart | RefusalPart]
    id: NotRequired[str]
    role: Literal["system", "developer", "user", "assistant"]
    type: NotRequired[Literal["message"]]


class InputReasoning(TypedDict):
    content: list[TextPart]
    id: NotRequired[str]
    type: Literal["reasoning"]


class InputToolOutput(TypedDict):
    call_id: str
    id: NotRequired[str]
    output: str | list[TextPart]
    status: NotRequired[Literal["completed", "incomplete", "failed", "interrupted"]]
    type: Literal["function_call_output"]


class MessageItem(TypedDict):
    content: list[TextPart | RefusalPart]
    id: str
    role: Literal["system", "developer", "user", "assistant"]
    status: Literal["completed", "incomplete", "in_progress"]
    type: Literal["message"]


class ReasoningItem(TypedDict):
    content: list[TextPart]
    id: str
    status: Literal["completed", "incomplete", "in_progress"]
    summary: NotRequired[list[TextPart]]
    type: Literal["reasoning"]


class Resumed(TypedDict):
    cache: SessionCacheSettings
    context: ContextSettings
    created_at: float
    current_turn: str | None
    error: ErrorObject | None
    expires_at: float
    id: str
    instructions: str | None
    last_turn: str | None
    metadata: dict[str, str]
    model: str
    num_items: int
    num_tokens: int
    object: Literal["session"]
    on_conflict: Literal["reject", "queue", "interrupt"]
    on_disconnect: Literal["continue", "cancel"]
    open_calls: list[OpenCall]
    parent_session_id: str | None
    priority: int
    quota: NotRequired[Quota]
    reasoning: ReasoningSettings
    recompute_tokens: int
    resident: TierTokens
    restored_tokens: int
    revision: int
    status: Literal[
        "idle", "queued", "running", "requires_action", "suspended", "expired", "failed", "closed"
    ]
    tenant: str
    tool_choice: str | dict[str, Any] | None
    tools: list[dict[str, Any]]
    updated_at: float
    usage: SessionUsage


class RolledBack(TypedDict):
    """
    `x_released_tokens`: of the superseded branch, whose KV was let go.
    """

    cache: SessionCacheSettings
    context: ContextSettings
    created_at: float
    current_turn: str | None
    error: ErrorObject | None
    expires_at: float
    id: str
    instructions: str | None
    last_turn: str | None
    metadata: dict[str, str]
    model: str
    num_items: int
    num_tokens: int
    object: Literal["session"]
    on_conflict: Literal["reject", "queue", "interrupt"]
    on_disconnect: Literal["continue", "cancel"]
    open_calls: list[OpenCall]
    parent_session_id: str | None
    priority: int
    quota: NotRequired[Quota]
    reasoning: ReasoningSettings
    revision: int
    status: Literal[
        "idle", "queued", "running", "requires_action", "suspended", "expired", "failed", "closed"
    ]
    tenant: str
    tool_choice: str | dict[str, Any] | None
    tools: list[dict[str, Any]]
    updated_at: float
    usage: SessionUsage
    x_released_tokens: int


class Session(TypedDict):
    cache: SessionCacheSettings
    context: ContextSettings
    created_at: float
    current_turn: str | None
    error: ErrorObject | None
    expires_at: float
    id: str
    instructions: str | None
    last_turn: str | None
    metadata: dict[str, str]
    model: str
    num_items: int
    num_tokens: int
    object: Literal["session"]
    on_conflict: Literal["reject", "queue", "interrupt"]
    on_disconnect: Literal["continue", "cancel"]
    open_calls: list[OpenCall]
    parent_session_id: str | None
    priority: int
    quota: NotRequired[Quota]
    reasoning: ReasoningSettings
    revision: int
    status: Literal[
        "idle", "queued", "running", "requires_action", "suspended", "expired", "failed", "closed"
    ]
    tenant: str
    tool_choice: str | dict[str, Any] | None
    tools: list[dict[str, Any]]
    updated_at: float
    usage: SessionUsage


class SessionPage(TypedDict):
    data: list[Session]
    first_id: str | None
    has_more: bool
    last_id: str | None
    object: Literal["list"]


class SessionUpdate(TypedDict):
    """
    POST /v1/sessions/{id}: the fields that may change; absent ones stay, nested ones too.

    `instructions: null` takes them away, and a null in `metadata` its key.
    """

    cache: NotRequired[CacheBody | None]
    context: NotRequired[ContextBody | None]
    expires_after: NotRequired[str | None]
    instructions: NotRequired[str | None]
    metadata: NotRequired[dict[str, str | None] | None]
    on_conflict: NotRequired[Literal["reject", "queue", "interrupt"] | None]
    on_disconnect: NotRequired[Literal["continue", "cancel"] | None]
    priority: NotRequired[int | None]
    reasoning: NotRequired[ReasoningBody | None]
    tool_choice: NotRequired[str | dict[str, Any] | None]
    tools: NotRequired[list[Tool] | None]


class SessionUpdated(TypedDict):
    """
    `x_invalidated_tokens`: history that must be computed again because of the change.
    """

    cache: SessionCacheSettings
    context: ContextSettings
    created_at: float
    current_turn: str | None
    error: ErrorObject | None
    expires_at: float
    id: str
    instructions: str | None
    last_turn: str | None
    metadata: dict[str, str]
    model: str
    num_items: int
    num_tokens: int
    object: Literal["session"]
    on_conflict: Literal["reject", "queue", "interrupt"]
    on_disconnect: Literal["continue", "cancel"]
    open_calls: list[OpenCall]
    parent_session_id: str | None
    priority: int
    quota: NotRequired[Quota]
    reasoning: ReasoningSettings
    revision: int
    status: Literal[
        "idle", "queued", "running", "requires_action", "suspended", "expired", "failed", "closed"
    ]
    tenant: str
    tool_choice: str | dict[str, Any] | None
    tools: list[dict[str, Any]]
    updated_at: float
    usage: SessionUsage
    x_invalidated_tokens: int


class Signal(TypedDict):
    cached_tokens: int
    decision: Literal["keep", "demote_l2", "demote_l3", "prefetch", "ignored"]
    object: Literal["session.signal"]
    reason: str | None
    resident: NotRequired[TierTokens | None]
    session_id: str
    signal: Literal["tool.started", "tool.progress", "tool.returning", "user.active", "idle"]


class Suspended(TypedDict):
    """
    `kept_tokens` are in `tier` and below; the others are computed again when wanted.
    """

    cache: SessionCacheSettings
    context: ContextSettings
    created_at: float
    current_turn: str | None
    dropped_tokens: int
    error: ErrorObject | None
    expires_at: float
    id: str
    instructions: str | None
    kept_tokens: int
    last_turn: str | None
    metadata: dict[str, str]
    model: str
    num_items: int
    num_tokens: int
    object: Literal["session"]
    on_conflict: Literal["reject", "queue", "interrupt"]
    on_disconnect: Literal["continue", "cancel"]
    open_calls: list[OpenCall]
    parent_session_id: str | None
    priority: int
    quota: NotRequired[Quota]
    reasoning: ReasoningSettings
    resident: TierTokens
    revision: int
    status: Literal[
        "idle", "queued", "running", "requires_action", "suspended", "expired", "failed", "closed"
    ]
    tenant: str
    tier: Literal["l2", "l3"] | None
    tool_choice: str | dict[str, Any] | None
    tools: list[dict[str, Any]]
    updated_at: float
    usage: SessionUsage


class TurnUsage(TypedDict):
    input_tokens: int
    input_tokens_details: NotRequired[UsageDetails]
    output_tokens: int
    output_tokens_details: NotRequired[UsageDetails]
    total_tokens: int
    x_cache: TierTokens


class Compacted(TypedDict):
    """
    What a compaction put in place of the older part of a history.
    """

    id: str
    items: list[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
    ]
    kept_tokens: int
    kept_turns: int
    num_tokens: int
    num_tokens_before: int
    object: Literal["session.compaction"]
    prefill: PrefillAnswer | None
    replaced_items: int
    revision: int
    session_id: str
    status: Literal["completed"]
    summary_tokens: int


class ForkAnswer(TypedDict):
    data: list[Session]
    object: Literal["list"]


InputItem: TypeAlias = InputMessage | InputToolOutput | InputToolCall | InputReasoning


class ItemPage(TypedDict):
    data: list[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
    ]
    first_id: str | None
    has_more: bool
    last_id: str | None
    object: Literal["list"]


class ItemsAppend(TypedDict):
    """
    POST /v1/sessions/{id}/items.

    With `partial` or `final`, `items` is the next piece of the output of the open call `call_id`;
    `offset` says where it begins, in characters, so that a piece that is sent again counts once.
    """

    auto_close_calls: NotRequired[bool]
    call_id: NotRequired[str | None]
    expect_revision: NotRequired[int | None]
    final: NotRequired[bool]
    items: list[InputItem] | str
    offset: NotRequired[int | None]
    partial: NotRequired[bool]
    prefill: NotRequired[Literal["none", "background", "now"]]


class ItemsAppended(TypedDict):
    data: list[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
    ]
    object: Literal["list"]
    prefill: NotRequired[PrefillAnswer | None]
    revision: int


class OutputItemAdded(TypedDict):
    item: MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
    output_index: int
    sequence_number: int
    session_id: str
    turn_id: str
    type: Literal["response.output_item.added"]


class OutputItemDone(TypedDict):
    item: MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
    output_index: int
    sequence_number: int
    session_id: str
    turn_id: str
    type: Literal["response.output_item.done"]
    x_invalid_arguments: NotRequired[Any]


class SessionCreate(TypedDict):
    """
    POST /v1/sessions.
    """

    cache: NotRequired[CacheBody | None]
    context: NotRequired[ContextBody | None]
    expires_after: NotRequired[str | None]
    initial_items: NotRequired[list[InputItem] | str | None]
    instructions: NotRequired[str | None]
    metadata: NotRequired[dict[str, str]]
    model: str
    on_conflict: NotRequired[Literal["reject", "queue", "interrupt"]]
    on_disconnect: NotRequired[Literal["continue", "cancel"]]
    parent_session_id: NotRequired[str | None]
    priority: NotRequired[int]
    reasoning: NotRequired[ReasoningBody | None]
    strict_model: NotRequired[bool]
    tool_choice: NotRequired[str | dict[str, Any] | None]
    tools: NotRequired[list[Tool] | None]


class Turn(TypedDict):
    """
    A turn; what is only known at its end is absent before.
    """

    cache: NotRequired[TurnCache]
    committed: NotRequired[bool]
    committed_tokens: NotRequired[int]
    created_at: NotRequired[float]
    error: NotRequired[ErrorObject]
    finished_at: NotRequired[float]
    id: str
    input: list[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
    ]
    object: Literal["turn"]
    output: list[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
    ]
    reason: NotRequired[Literal["max_output_tokens", "context_limit", "deadline"]]
    revision: NotRequired[int]
    session_id: str
    status: Literal["queued", "running", "completed", "incomplete", "cancelled", "failed"]
    stop_reason: NotRequired[Literal["end_turn", "tool_use", "stop_sequence"]]
    timings: NotRequired[TurnTimings]
    usage: NotRequired[TurnUsage]
    x_cache: NotRequired[TierTokens]
    x_grammar_fallback: NotRequired[Any]
    x_invalid_calls: NotRequired[list[Any]]
    x_parse_problems: NotRequired[list[Any]]


class TurnCancelled(TypedDict):
    items: list[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
    ]
    revision: NotRequired[int]
    sequence_number: int
    session_id: str
    turn: Turn
    turn_id: str
    type: Literal["turn.cancelled"]
    usage: NotRequired[TurnUsage]
    x_cache: NotRequired[TierTokens]


class TurnCompleted(TypedDict):
    items: list[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
    ]
    revision: NotRequired[int]
    sequence_number: int
    session_id: str
    stop_reason: Literal["end_turn", "tool_use", "stop_sequence"]
    turn: Turn
    turn_id: str
    type: Literal["turn.completed"]
    usage: NotRequired[TurnUsage]
    x_cache: NotRequired[TierTokens]


class TurnCreate(TypedDict):
    """
    POST /v1/sessions/{id}/turns.
    """

    auto_close_calls: NotRequired[bool]
    deadline_ms: NotRequired[int | None]
    expect_revision: NotRequired[int | None]
    frequency_penalty: NotRequired[float]
    ignore_eos: NotRequired[bool]
    input: NotRequired[list[InputItem] | str]
    max_output_tokens: NotRequired[int | None]
    min_p: NotRequired[float]
    min_tool_calls: NotRequired[int | None]
    parallel_tool_calls: NotRequired[bool | None]
    presence_penalty: NotRequired[float]
    repetition_penalty: NotRequired[float]
    response_format: NotRequired[dict[str, Any] | None]
    seed: NotRequired[int | None]
    stop: NotRequired[str | list[str] | None]
    store_partial: NotRequired[bool]
    stream: NotRequired[bool]
    temperature: NotRequired[float]
    tool_choice: NotRequired[str | dict[str, Any] | None]
    top_k: NotRequired[int]
    top_p: NotRequired[float]


class TurnCreated(TypedDict):
    sequence_number: int
    session_id: str
    turn: Turn
    turn_id: str
    type: Literal["turn.created"]


class TurnFailed(TypedDict):
    error: ErrorObject
    items: list[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
    ]
    revision: NotRequired[int]
    sequence_number: int
    session_id: str
    turn: Turn
    turn_id: str
    type: Literal["turn.failed"]
    usage: NotRequired[TurnUsage]
    x_cache: NotRequired[TierTokens]


class TurnIncomplete(TypedDict):
    items: list[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
    ]
    reason: Literal["max_output_tokens", "context_limit", "deadline"]
    revision: NotRequired[int]
    sequence_number: int
    session_id: str
    turn: Turn
    turn_id: str
    type: Literal["turn.incomplete"]
    usage: NotRequired[TurnUsage]
    x_cache: NotRequired[TierTokens]


class TurnPage(TypedDict):
    data: list[Turn]
    first_id: str | None
    has_more: bool
    last_id: str | None
    object: Literal["list"]


class CompactCreate(TypedDict):
    """
    POST /v1/sessions/{id}/compact.

    summary: the model writes it. items: `summary_items` stand for what goes. `warm`: the new
    prefix is prefilled before it is put in place.
    """

    keep_last_turns: NotRequired[int]
    mode: NotRequired[Literal["summary", "items"]]
    summary_items: NotRequired[list[InputItem] | str | None]
    warm: NotRequired[bool]


TurnEvent: TypeAlias = (
    TurnCreated
    | TurnQueued
    | TurnCacheEvent
    | PrefillProgress
    | TurnInProgress
    | OutputItemAdded
    | OutputItemDone
    | ContentPart
    | TextDelta
    | TextDone
    | ArgumentsDelta
    | ArgumentsDone
    | TurnCompleted
    | TurnIncomplete
    | TurnCancelled
    | TurnFailed
)
