# SPDX-License-Identifier: Apache-2.0
"""The bodies of /v1/messages and /v1/responses, as pydantic models.

Content stays raw here: messages_input and responses_input read it. Does not know: what fields do.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from appliance.api.wire import DialectBody, SamplingFields, StreamOptions
from appliance.api.wire_values import PositiveInt

MAX_STOP_SEQUENCES = 16


class CountTokensRequest(DialectBody):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None


class MessagesRequest(SamplingFields):
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


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    input: str | list[Any] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: PositiveInt | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    stream_options: StreamOptions | None = None


# Fields that would change the answer and are refused, with the value that means "not asked for".
UNSUPPORTED_MESSAGES: dict[str, tuple[Any, ...]] = {
    "container": (None,),
    "mcp_servers": (None, []),
    "n": (None, 1),
}
UNSUPPORTED_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "prompt": (None,),
    "stop": (None, []),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
    "n": (None, 1),
}
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
