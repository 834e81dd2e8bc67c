# SPDX-License-Identifier: Apache-2.0
"""How much a model shall reason, as the dialects say it -> variables of its template, and a budget.

Agents send efforts to every model by default, so an effort is a wish: where the chat template has
no switch it changes nothing, and that is logged once. `chat_template_kwargs` is no wish: what
cannot be had is refused. Does not know: prompts, grammars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.api.dialect import log_ignored_once
from appliance.api.wire import ChatRequest
from appliance.api.wire_agents import CountTokensRequest, MessagesRequest, ResponsesInput
from appliance.errors import ApiError
from appliance.services import Services
from appliance.thinking import SWITCHES, check_effort, thinking_options

# What the server itself fills in.
OWN_VARIABLES = frozenset(
    ("messages", "tools", "add_generation_prompt", "documents", "bos_token", "eos_token")
)
THINKING_EFFORTS: dict[str, str | None] = {
    "enabled": "medium",
    "disabled": "none",
    "adaptive": None,
    "auto": None,
}
Body = ChatRequest | MessagesRequest | CountTokensRequest | ResponsesInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """options: what to render with. budget: at most so many tokens of reasoning."""

    options: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None


def thinking_of(body: Body, services: Services) -> Thinking:
    """Raises: ApiError naming the field."""
    thinking = body.thinking or {}
    kind = thinking.get("type")
    if body.thinking is not None and kind not in tuple(THINKING_EFFORTS):
        where = "thinking.type"
        allowed = ", ".join(THINKING_EFFORTS)
        raise ApiError("invalid_value", f"{where}: must be one of {allowed}; got {kind!r}", where)
    path, effort = _effort(body)
    if effort is not None:
        check_effort(effort, path)
    if kind == "disabled":
        path, effort = "thinking.type", "none"
    elif effort is None and kind is not None:
        path, effort = "thinking.type", THINKING_EFFORTS[kind]
    options = _effort_options(effort, path, services)
    return Thinking(
        options={**options, **template_options(body.chat_template_kwargs, services)},
        budget=_budget(body, thinking),
    )


def template_options(kwargs: Mapping[str, Any] | None, services: Services) -> dict[str, Any]:
    """Return `chat_template_kwargs` as the template knows them.

    Raises: ApiError for a variable that would change nothing.
    """
    variables = services.assets.chat_template.variable_names - OWN_VARIABLES
    options: dict[str, Any] = {}
    for name, value in (kwargs or {}).items():
        if name in variables:
            options[name] = value
        elif name in SWITCHES:
            options.update(_switched(name, value, services))
        else:
            where = f"chat_template_kwargs.{name}"
            known = ", ".join(sorted(variables)) or "none"
            raise ApiError(
                "unsupported_parameter",
                f"{where}: the chat template of this model has no such variable; it has: {known}",
                where,
            )
    return options


def _switched(name: str, value: Any, services: Services) -> dict[str, Any]:
    """The switch under the name that the template has for it; none for what happens anyway."""
    known = [
        switch for switch in SWITCHES if switch in services.assets.chat_template.variable_names
    ]
    if known:
        return dict.fromkeys(known, value)
    reasons = services.renderer.tool_format.reasoning is not None
    if value is reasons:
        return {}
    where = f"chat_template_kwargs.{name}"
    does = "always reasons" if reasons else "does not reason"
    raise ApiError("unsupported_parameter", f"{where}: this model {does}", where)


def _effort_options(effort: str | None, path: str, services: Services) -> dict[str, Any]:
    try:
        return thinking_options(effort, services.assets.chat_template.variable_names, path)
    except ApiError as error:
        if error.code != "unsupported_parameter":
            raise
        log_ignored_once("this model's template has no switch for", f"{path}: {effort}")
        return {}


def _effort(body: Body) -> tuple[str, str | None]:
    """(path, value) of the effort that a body wishes for."""
    if isinstance(body, ChatRequest):
        if body.reasoning_effort is not None:
            return "reasoning_effort", body.reasoning_effort
        return "reasoning.effort", _text(body.reasoning, "reasoning", "effort")
    if isinstance(body, ResponsesInput):
        return "reasoning.effort", body.reasoning.effort if body.reasoning is not None else None
    return "output_config.effort", _text(body.output_config, "output_config", "effort")


def _budget(body: Body, thinking: Mapping[str, Any]) -> int | None:
    if body.thinking_token_budget is not None:
        return body.thinking_token_budget
    if isinstance(body, ChatRequest) and (body.reasoning or {}).get("max_tokens") is not None:
        return _count(body.reasoning or {}, "reasoning", "max_tokens")
    return _count(thinking, "thinking", "budget_tokens")


def _text(body: Mapping[str, Any] | None, path: str, key: str) -> str | None:
    value = (body or {}).get(key)
    if value is not None and not isinstance(value, str):
        where = f"{path}.{key}"
        raise ApiError("invalid_type", f"{where}: must be a string; got {value!r}", where)
    return value


def _count(body: Mapping[str, Any], path: str, key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        where = f"{path}.{key}"
        raise ApiError("invalid_value", f"{where}: must be a count of tokens; got {value!r}", where)
    return value
