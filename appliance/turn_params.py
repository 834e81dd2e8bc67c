# SPDX-License-Identifier: Apache-2.0
"""What a turn was asked to do, in the form that is stored with it and survives a crash.

Does not know: HTTP, how a turn runs.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from appliance.api.wire_sessions import TurnCreate
from appliance.errors import ApiError
from engine import api
from tools_schema.response_format import ResponseFormat, parse_response_format
from tools_schema.tool_choice import ToolChoice, parse_tool_choice
from tools_schema.tool_spec import ToolSet

CLIENT_LIMIT = "max_output_tokens"
CONTEXT_LIMIT = "context_limit"


class TurnParams(msgspec.Struct, frozen=True, kw_only=True):
    """`limited_by`: what `incomplete` reports when the output reaches its limit.

    `tool_choice`: the turn's own, or the session's where the turn gave none.
    """

    sampling: api.SamplingParams
    stop: tuple[str, ...] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    min_tool_calls: int | None = None
    response_format: dict[str, Any] | None = None
    store_partial: bool = True
    limited_by: str = CLIENT_LIMIT

    def to_stored(self) -> dict[str, Any]:
        """As plain values, for the store."""
        stored: dict[str, Any] = msgspec.to_builtins(self)
        return stored

    @classmethod
    def from_stored(cls, stored: dict[str, Any]) -> TurnParams:
        """Read back what `to_stored` wrote."""
        known = {name: stored[name] for name in cls.__struct_fields__ if name in stored}
        return msgspec.convert(known, cls)

    def choice(self, toolset: ToolSet) -> ToolChoice:
        """Raises InvalidToolChoiceError naming the field."""
        return parse_tool_choice(
            self.tool_choice, toolset, self.parallel_tool_calls, self.min_tool_calls
        )

    def parsed_response_format(self) -> ResponseFormat | None:
        """Raises InvalidSchemaError naming the field."""
        return parse_response_format(self.response_format)


def turn_params(body: TurnCreate, session_tool_choice: Any, max_new: int) -> TurnParams:
    """Build the parameters of a turn from its body.

    Args:
        max_new: tokens that fit into the context behind the prompt.
    """
    wanted = body.max_output_tokens
    is_clamped = wanted is None or wanted > max_new
    num_new = max_new if wanted is None else min(wanted, max_new)
    sampling = api.SamplingParams(
        max_new_tokens=num_new,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        # Drawn here and stored: a turn that must be sampled again draws the same tokens.
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        ignore_eos=body.ignore_eos,
    )
    tool_choice = session_tool_choice if body.tool_choice is None else body.tool_choice
    return TurnParams(
        sampling=sampling,
        stop=stop_list(body.stop),
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        min_tool_calls=body.min_tool_calls,
        response_format=body.response_format,
        store_partial=body.store_partial,
        limited_by=CONTEXT_LIMIT if is_clamped else CLIENT_LIMIT,
    )


def stop_list(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return stop strings as a tuple. Raises ApiError for an empty one."""
    texts = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in texts:
        raise ApiError("invalid_value", "stop: an empty string never stops; leave it out", "stop")
    return texts
