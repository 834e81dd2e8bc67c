# SPDX-License-Identifier: Apache-2.0
"""Owns the grammar of one turn: (tools, choice, format, reasoning) -> structural-tag text.

Does not know: the grammar engine (it writes the JSON dialect of xgrammar 0.2.8 structural tags
and never imports it), streams, how a turn is built (`turn_grammar`); of the vocabulary only which
markers are control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache

from tools_schema.call_grammar import CallGrammar, Fallback
from tools_schema.control_markers import ControlMarkers
from tools_schema.errors import InvalidToolChoiceError, ReasoningUnsupportedError
from tools_schema.formats.base import ToolFormat
from tools_schema.reasoning import Reasoning
from tools_schema.response_format import ResponseFormat
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSet
from tools_schema.turn_grammar import TurnGrammar

_CACHED_PLANS = 256
NO_MARKERS = ControlMarkers()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarPlan:
    """`text` None: nothing to constrain. `kind` is a kind of `engine.api.GrammarSpec`.

    control_ids: the control tokens that the grammar names; no others may be sampled.
    """

    text: str | None
    kind: str = "structural_tag"
    fallbacks: tuple[Fallback, ...] = ()
    min_calls: int = 0
    control_ids: tuple[int, ...] = ()


def build_structural_tag(
    toolset: ToolSet,
    choice: ToolChoice,
    tool_format: ToolFormat,
    *,
    reasoning: Reasoning = "off",
    response_format: ResponseFormat | None = None,
    reasoning_budget: int | None = None,
    loosen: Set[str] = frozenset(),
    markers: ControlMarkers = NO_MARKERS,
) -> GrammarPlan:
    """The grammar of a turn, and where it is looser than what the client asked for.

    Args:
        reasoning: `on` where the rendered prompt ends inside open reasoning, `auto` where the
            model may open it itself, `off` where it may not.
        reasoning_budget: at most so many tokens of reasoning.
        loosen: tools (or `response_format`) whose schema the grammar engine refused or could not
            compile in time: any object is accepted, and the plan says so.
        markers: those of the format's markers that are control tokens of the model.

    Raises:
        ReasoningUnsupportedError: the format has no reasoning tags and `reasoning` is `on`.
        InvalidToolChoiceError: more calls are wanted than the family can write in one turn.
    """
    return _build_cached(
        toolset,
        choice,
        tool_format,
        reasoning,
        response_format,
        reasoning_budget,
        frozenset(loosen),
        markers,
    )


@lru_cache(maxsize=_CACHED_PLANS)
def _build_cached(
    toolset: ToolSet,
    choice: ToolChoice,
    tool_format: ToolFormat,
    reasoning: Reasoning,
    response_format: ResponseFormat | None,
    reasoning_budget: int | None,
    loosen: frozenset[str],
    markers: ControlMarkers,
) -> GrammarPlan:
    _check_abilities(tool_format, choice, reasoning)
    calls = CallGrammar(tool_format, loosen)
    builder = TurnGrammar(tool_format, calls, markers)
    tools = list(toolset.restrict(choice.names)) if choice.kind != "none" else []
    answer = builder.answer(response_format, has_tools=len(toolset) > 0)
    turn = builder.turn(tools, choice, answer) if tools else answer
    turn = builder.with_reasoning(turn, reasoning, reasoning_budget)
    if turn is None:
        return GrammarPlan(text=None)
    placed, control_ids = markers.place(turn)
    tag = {"type": "structural_tag", "format": placed}
    return GrammarPlan(
        text=json.dumps(tag, ensure_ascii=False, separators=(",", ":")),
        fallbacks=tuple(calls.fallbacks),
        min_calls=choice.min_calls,
        control_ids=control_ids,
    )


def _check_abilities(tool_format: ToolFormat, choice: ToolChoice, reasoning: Reasoning) -> None:
    if tool_format.reasoning is None and reasoning == "on":
        raise ReasoningUnsupportedError(
            param="reasoning",
            message=f"the model's format {tool_format.name} has no reasoning",
            value=reasoning,
            allowed='"off"',
        )
    if tool_format.max_calls is not None and choice.min_calls > tool_format.max_calls:
        raise InvalidToolChoiceError(
            param="min_tool_calls",
            message=f"the model's format {tool_format.name} has no parallel calls",
            value=choice.min_calls,
            allowed=f"at most {tool_format.max_calls}",
        )
