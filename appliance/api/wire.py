# SPDX-License-Identifier: Apache-2.0
"""The bodies clients send, as pydantic models; and how a refused body reads.

Session endpoints refuse unknown fields and loose types. The OpenAI dialects take unknown fields
(agents send many) and name those that would change the answer but are not supported. Items and
tools stay raw here: sessions and tools_schema parse them. Does not know: what fields do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from appliance.errors import ApiError

MAX_STOPS = 16
MAX_FORKS = 32

Temperature = Annotated[float, Field(ge=0.0, le=10.0)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
INT32_MAX = 2**31 - 1
TopK = Annotated[int, Field(ge=0, le=INT32_MAX)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10.0)]  # less, and logits overflow
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]
PositiveInt = Annotated[int, Field(ge=1, le=INT32_MAX)]
Milliseconds = Annotated[int, Field(ge=1, lt=2**53)]
StopList = str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None


class StrictBody(BaseModel):
    """A body of our own API: an unknown field or a loosely typed value is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ReasoningBody(StrictBody):
    effort: str | None = None
    history: Literal["keep", "drop_before_last_user"] = "keep"


class LeaseWish(StrictBody):
    """A lease on the head of a history. Only L1 is there: other tiers are denied."""

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
    """POST /v1/sessions/{id}: the fields that may change; absent ones stay."""

    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
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
    """POST /v1/sessions/{id}/items."""

    items: list[Any] | str
    prefill: Literal["none", "background", "now"] = "none"
    partial: bool = False
    call_id: str | None = None
    final: bool = False
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


class DialectBody(BaseModel):
    """A body of an OpenAI dialect: unknown fields are kept aside and logged once."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(DialectBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(DialectBody):
    """What every dialect has in common: the model, and how it is sampled."""

    model: str
    stream: bool = False
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, float] | None = None
    seed: Seed | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    priority: Priority = 0


class SamplingBody(SamplingFields):
    """What chat and plain completions have in common."""

    stream_options: StreamOptions | None = None
    stop: StopList = None
    max_tokens: PositiveInt | None = None
    n: int | None = None
    return_token_ids: bool = False


class ChatRequest(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: PositiveInt | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    min_tool_calls: Annotated[int, Field(ge=0)] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class CompletionRequest(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None


class TokenizeRequest(DialectBody):
    """POST /tokenize: a prompt, or messages rendered with the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True


class DetokenizeRequest(DialectBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


# Fields that would change the answer and are refused, with the value that means "not asked for".
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None,),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_grammar": (None,),
    "thinking_token_budget": (None,),
}
UNSUPPORTED_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "echo": (False, None),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "prompt_embeds": (None,),
}
# Fields that other servers or OpenAI's own backend read and that cannot change our answer.
TOLERATED = frozenset(
    {
        "cache_control",
        "chat_template_kwargs",
        "client_metadata",
        "context_management",
        "inference_geo",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "request_id",
        "safety_identifier",
        "service_tier",
        "skip_special_tokens",
        "store",
        "thinking",
        "user",
        "verbosity",
    }
)


def refuse_unsupported(body: DialectBody, table: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ApiError for a field that asks for what is not supported."""
    values = {**body.model_dump(include=set(table)), **(body.model_extra or {})}
    for name, harmless in table.items():
        if name in values and values[name] not in harmless:
            raise ApiError("unsupported_parameter", f"{name}: not supported", name)
    if isinstance(body, SamplingBody) and body.n not in (None, 1):
        raise ApiError("unsupported_parameter", f"n: only 1 is supported; got {body.n}", "n")


def unknown_fields(body: BaseModel) -> list[str]:
    """Return the names of fields nobody knows, for the log."""
    return sorted(set(body.model_extra or ()) - TOLERATED)


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
