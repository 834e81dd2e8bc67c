# SPDX-License-Identifier: Apache-2.0
"""The bodies of /v1/messages and /v1/responses, as pydantic models.

Content stays raw here: messages_input and responses_input read it. Does not know: what fields do.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from appliance.api.wire import DialectBody, SamplingFields, StreamOptions, ThinkingFields
from appliance.api.wire_values import PositiveInt

MAX_STOP_SEQUENCES = 16


class CountTokensRequest(ThinkingFields):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(SamplingFields, ThinkingFields):
    """POST /v1/messages."""

    messages: list[Any]
    max_tokens: PositiveInt
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class TextOptions(DialectBody):
    format: dict[str, Any] | None = None


class ReasoningOptions(DialectBody):
    effort: str | None = None
    summary: str | None = None


class ResponsesInput(ThinkingFields):
    """POST /v1/responses/input_tokens: what a request's prompt is made of."""

    model: str
    input: str | list[Any] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    reasoning: ReasoningOptions | None = None


class ResponsesRequest(SamplingFields, ResponsesInput):
    """POST /v1/responses."""

    store: bool = True
    background: bool = False
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: PositiveInt | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    stream_options: StreamOptions | None = None


# `include` values that ask for nothing this server has, or for what it always sends.
ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDES = (
    ENCRYPTED_REASONING,
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
)
