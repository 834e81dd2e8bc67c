# SPDX-License-Identifier: Apache-2.0
"""Compiling grammars: asked once, loosened where needed and for the guilty tool alone."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from appliance.grammars import GrammarCompiler, GrammarQuestion
from engine import api
from engine.client import EngineClient
from tests.fakes.engine import FakeEngine, GrammarCheck
from tools_schema.formats.registry import get_format
from tools_schema.response_format import parse_response_format
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import parse_tools


def question(*minimums: int) -> GrammarQuestion:
    tools = parse_tools(
        [
            {
                "type": "function",
                "name": f"t{number}",
                "parameters": {
                    "type": "object",
                    "properties": {"n": {"type": "integer", "minimum": minimum}},
                },
            }
            for number, minimum in enumerate(minimums)
        ]
    )
    return GrammarQuestion(tools, parse_tool_choice("required", tools))


def with_compiler(
    check: GrammarCheck, work: Callable[[GrammarCompiler, FakeEngine], Awaitable[None]]
) -> None:
    async def run(folder: str) -> None:
        path = str(Path(folder) / "e.sock")
        with FakeEngine(path, lambda request: [], grammar_check=check) as engine:
            client = EngineClient(path)
            await client.start()
            try:
                await client.wait_ready(60)
                compiler = GrammarCompiler(client, get_format("smollm2"), budget_ms=500)
                await work(compiler, engine)
            finally:
                await client.close()

    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        asyncio.run(run(folder))


def refuses(*minimums: int) -> GrammarCheck:
    def check(spec: api.GrammarSpec) -> tuple[str, str] | None:
        text = spec.text.replace(" ", "")
        bad = any(f'"minimum":{minimum}' in text for minimum in minimums)
        return ("grammar_budget_exceeded", "too slow") if bad else None

    return check


def test_a_grammar_is_compiled_once_per_question_and_engine() -> None:
    async def work(compiler: GrammarCompiler, engine: FakeEngine) -> None:
        for _ in range(3):
            plan = await compiler.compiled(question(3, 4))
            assert plan.text is not None and not plan.fallbacks
        assert len(engine.grammars) == 1
        await compiler.compiled(question(5))
        assert len(engine.grammars) == 2

    with_compiler(refuses(), work)


def test_only_the_tools_that_do_not_compile_are_loosened() -> None:
    async def work(compiler: GrammarCompiler, engine: FakeEngine) -> None:
        plan = await compiler.compiled(question(11, 12, 13))
        assert {fallback.tool for fallback in plan.fallbacks} == {"t1"}
        assert plan.text is not None
        text = plan.text.replace(" ", "")
        assert '"minimum":11' in text and '"minimum":13' in text and '"minimum":12' not in text
        num_asked = len(engine.grammars)
        assert await compiler.compiled(question(11, 12, 13)) == plan
        assert len(engine.grammars) == num_asked

    with_compiler(refuses(12), work)


def test_a_set_too_large_to_search_is_loosened_as_a_whole() -> None:
    async def work(compiler: GrammarCompiler, engine: FakeEngine) -> None:
        plan = await compiler.compiled(question(*range(21, 41)))
        assert len({fallback.tool for fallback in plan.fallbacks}) == 20
        assert len(engine.grammars) == 2

    with_compiler(refuses(30), work)


def test_a_response_schema_is_loosened_under_its_own_name() -> None:
    async def work(compiler: GrammarCompiler, engine: FakeEngine) -> None:
        tools = parse_tools([])
        schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 51}}}
        response_format = parse_response_format(
            {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
        )
        asked = GrammarQuestion(tools, parse_tool_choice(None, tools), response_format)
        plan = await compiler.compiled(asked)
        assert {fallback.tool for fallback in plan.fallbacks} == {"response_format"}

    with_compiler(refuses(51), work)
