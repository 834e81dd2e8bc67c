# SPDX-License-Identifier: Apache-2.0
"""Gets the grammar of a turn compiled by the engine, loosening it where the engine cannot.

Does not know: turns, tokens. A schema the grammar cannot hold (or not within the budget) becomes
"any object" for that tool alone; the caller announces it and validates against the original.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from engine import api
from engine.client import EngineClient
from engine.errors import EngineUnavailableError
from engine.text.assets import TextAssets
from tools_schema.control_markers import ControlMarkers
from tools_schema.formats.base import ToolFormat
from tools_schema.reasoning import Reasoning
from tools_schema.response_format import RESPONSE_FORMAT, ResponseFormat
from tools_schema.structural_tag import NO_MARKERS, GrammarPlan, build_structural_tag
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSet

MAX_REMEMBERED = 512
# With more tools than this, the guilty one is not searched for: all of them are loosened.
MAX_SEARCHED_TOOLS = 16


@dataclass(frozen=True, slots=True)
class GrammarQuestion:
    """What a grammar is made of."""

    toolset: ToolSet
    choice: ToolChoice
    response_format: ResponseFormat | None = None
    reasoning: Reasoning = "off"  # as the rendered prompt says
    reasoning_budget: int | None = None  # tokens


@dataclass(slots=True)
class GrammarCompiler:
    """Remembers which questions compiled, and what had to be loosened for the others."""

    client: EngineClient
    tool_format: ToolFormat
    budget_ms: int
    markers: ControlMarkers = NO_MARKERS
    _loosened: OrderedDict[tuple[GrammarQuestion, str], frozenset[str]] = field(
        default_factory=OrderedDict
    )

    def plan(self, question: GrammarQuestion, loosen: frozenset[str] = frozenset()) -> GrammarPlan:
        """Return the grammar text; raises ToolSchemaError for what no grammar can express."""
        return build_structural_tag(
            question.toolset,
            question.choice,
            self.tool_format,
            reasoning=question.reasoning,
            response_format=question.response_format,
            reasoning_budget=question.reasoning_budget,
            loosen=loosen,
            markers=self.markers,
        )

    def ready(self, question: GrammarQuestion) -> GrammarPlan | None:
        """Return what `compiled` would, if it is known without asking the engine."""
        strict = self.plan(question)
        if strict.text is None:
            return strict
        key = self._key(question)
        loosen = self._loosened.get(key)
        if loosen is None:
            return None
        self._loosened.move_to_end(key)
        return self.plan(question, loosen) if loosen else strict

    def _key(self, question: GrammarQuestion) -> tuple[GrammarQuestion, str]:
        hello = self.client.hello
        return question, hello.instance_id if hello is not None else ""

    async def compiled(self, question: GrammarQuestion) -> GrammarPlan:
        """Return a plan whose grammar the engine holds compiled.

        Without an engine the strict plan is returned: the engine compiles it when it is back.
        """
        known = self.ready(question)
        if known is not None:
            return known
        strict, key = self.plan(question), self._key(question)
        try:
            loosen = await self._find_loosen(question, strict)
        except EngineUnavailableError:
            return strict
        self._loosened[key] = loosen
        while len(self._loosened) > MAX_REMEMBERED:
            self._loosened.popitem(last=False)
        return self.plan(question, loosen) if loosen else strict

    async def _find_loosen(self, question: GrammarQuestion, strict: GrammarPlan) -> frozenset[str]:
        if await self._compiles(strict):
            return frozenset()
        owners = set(question.choice.names)
        if question.response_format is not None:
            owners.add(RESPONSE_FORMAT)
        guilty = owners
        if len(owners) <= MAX_SEARCHED_TOOLS:
            guilty = {owner for owner in owners if not await self._stands(question, owner, owners)}
        for loosen in (frozenset(guilty), frozenset(owners)):
            if loosen and await self._compiles(self.plan(question, loosen)):
                return loosen
        return frozenset(owners)

    async def _stands(self, question: GrammarQuestion, owner: str, owners: set[str]) -> bool:
        """Whether the grammar compiles when all but `owner` are loosened."""
        return await self._compiles(self.plan(question, frozenset(owners - {owner})))

    async def _compiles(self, plan: GrammarPlan) -> bool:
        spec = spec_of(plan)
        if spec is None:
            return True
        reply = await self.client.compile(spec, budget_ms=self.budget_ms)
        return reply.error_code is None


def spec_of(plan: GrammarPlan) -> api.GrammarSpec | None:
    """Wrap a plan for the engine; None where nothing is constrained."""
    if plan.text is None:
        return None
    return api.GrammarSpec(kind=api.GrammarKind(plan.kind), text=plan.text)


def constrained(sampling: api.SamplingParams, plan: GrammarPlan) -> api.SamplingParams:
    """The sampling of a turn that may write the control tokens of its plan."""
    if not plan.control_ids:
        return sampling
    return msgspec.structs.replace(sampling, allowed_control_ids=plan.control_ids)


def control_markers(assets: TextAssets, tool_format: ToolFormat) -> ControlMarkers:
    """Return which markers of the format are control tokens of the model.

    What ends a turn is none: it comes where the grammar is complete.
    """
    ids = {
        token.text: token.token_id
        for token in assets.tokenizer.added_tokens.values()
        if not token.is_markup and token.token_id not in assets.eos_ids
    }
    return ControlMarkers.among(tool_format.grammar_texts(), ids)
