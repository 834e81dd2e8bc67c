# SPDX-License-Identifier: Apache-2.0
"""The events of a turn's stream, as types, for the OpenAPI document and the clients made from it.

Does not know: when an event is sent.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from appliance.api.answers import (
    ErrorObject,
    IncompleteReason,
    Item,
    Miss,
    StopReason,
    TextPart,
    TierTokens,
    Turn,
    TurnUsage,
)


class _Numbered(TypedDict):
    sequence_number: int
    session_id: str
    turn_id: str


class TurnCreated(_Numbered):
    type: Literal["turn.created"]
    turn: Turn


class TurnQueued(_Numbered):
    type: Literal["turn.queued"]
    position: int


class TurnCacheEvent(_Numbered):
    type: Literal["turn.cache"]
    cached_l1: NotRequired[int]
    cached_l2: NotRequired[int]
    cached_l3: NotRequired[int]
    to_compute: NotRequired[int]
    miss: Miss | None


class PrefillProgress(_Numbered):
    type: Literal["turn.prefill.progress"]
    done: int
    total: int


class TurnInProgress(_Numbered):
    type: Literal["turn.in_progress"]


class OutputItemAdded(_Numbered):
    type: Literal["response.output_item.added"]
    output_index: int
    item: Item


class OutputItemDone(_Numbered):
    type: Literal["response.output_item.done"]
    output_index: int
    item: Item
    x_invalid_arguments: NotRequired[Any]


class ContentPart(_Numbered):
    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: TextPart


class TextDelta(_Numbered):
    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str


class TextDone(_Numbered):
    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(_Numbered):
    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(_Numbered):
    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


class _Terminal(_Numbered):
    items: list[Item]
    turn: Turn
    usage: NotRequired[TurnUsage]
    x_cache: NotRequired[TierTokens]
    revision: NotRequired[int]


class TurnCompleted(_Terminal):
    type: Literal["turn.completed"]
    stop_reason: StopReason


class TurnIncomplete(_Terminal):
    type: Literal["turn.incomplete"]
    reason: IncompleteReason


class TurnCancelled(_Terminal):
    type: Literal["turn.cancelled"]


class TurnFailed(_Terminal):
    type: Literal["turn.failed"]
    error: ErrorObject


TurnEvent = (
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
