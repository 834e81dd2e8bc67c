# SPDX-License-Identifier: Apache-2.0
"""The bodies of the OpenAI dialects, as pydantic models.

They take unknown fields (agents send many); `known_fields` says which of those are refused. Does
not know: what fields do, the session API's bodies (wire_sessions).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from appliance.api.packed_ids import PackedIds
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

MAX_CHOICES = 16
MAX_STOP_IDS = 64  # as many as the engine takes, and so many biases
MAX_BIASES = 1024

Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


class DialectBody(BaseModel):
    """A body of a dialect. Unknown fields are kept aside; null is as good as absent."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


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
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_BIASES)] | None = None
    seed: Seed | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    priority: Priority = 0


class ThinkingFields(DialectBody):
    """How a model that reasons is told how much: `thinking_fields` reads them."""

    thinking: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class SamplingBody(SamplingFields):
    """What chat and plain completions have in common."""

    stream_options: StreamOptions | None = None
    stop: StopList = None
    max_tokens: PositiveInt | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    return_token_ids: bool = False


class ChatRequest(SamplingBody, ThinkingFields):
    """POST /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: PositiveInt | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    min_tool_calls: Annotated[int, Field(ge=0)] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def _unless_packed(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return value if isinstance(value, PackedIds) else check(value)


class CompletionRequest(SamplingBody):
    """POST /v1/completions."""

    prompt: Annotated[str | list[int] | list[str] | list[list[int]], WrapValidator(_unless_packed)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    best_of: int | None = None


class TokenizeRequest(DialectBody):
    """POST /tokenize: a prompt, or messages rendered with the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(DialectBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
