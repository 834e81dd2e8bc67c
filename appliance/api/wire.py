# SPDX-License-Identifier: Apache-2.0
"""The bodies of the OpenAI dialects, as pydantic models.

They take unknown fields (agents send many) and name those that would change the answer but are not
supported. Does not know: what fields do, the session API's bodies (wire_sessions).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from appliance.api.wire_values import (
    INT32_MAX,
    MinP,
    Penalty,
    PositiveInt,
    Priority,
    RepetitionPenalty,
    Seed,
    StopList,
    Temperature,
    TopP,
)
from appliance.errors import ApiError


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
