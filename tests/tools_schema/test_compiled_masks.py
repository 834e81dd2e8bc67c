# SPDX-License-Identifier: Apache-2.0
"""Turns of every family through masks over a real vocabulary: right ones pass, wrong ones do not.

The same walks over the vocabularies of large models are in `benchmarks.grammars --walk`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.text.assets import load_text_assets
from tests.fakes.grammar_walks import Compiling, WalkVocabulary, check_family
from tests.fakes.marker_model import markers_of
from tools_schema.formats.base import ToolFormat
from tools_schema.formats.registry import FORMATS
from tools_schema.tool_spec import parse_tools

_SETS = Path(__file__).parents[1] / "data" / "tool_sets"


@pytest.fixture(scope="module", params=["control", "plain"])
def compiling(request: pytest.FixtureRequest) -> Iterator[Compiling]:
    """49,152 tokens of a real model; in one of the two, every family's markers behind them."""
    assets = load_text_assets("smollm2")
    spelled = [bytes(token) for token in assets.token_bytes]
    markers: list[str] = []
    if request.param == "control":
        markers = list(dict.fromkeys(m for fmt in FORMATS for m in markers_of(fmt)))
    control = {marker: len(spelled) + place for place, marker in enumerate(markers)}
    spelled += [b""] * len(control)
    compiling = Compiling(WalkVocabulary(spelled, control, assets.eos_ids[0]))
    yield compiling
    compiling.close()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_right_turns_are_allowed_token_by_token_and_wrong_ones_refused(
    fmt: ToolFormat, compiling: Compiling
) -> None:
    tools = parse_tools(json.loads((_SETS / "mcp_like.json").read_text()), skip_unknown=True)
    assert check_family(compiling, fmt, tools) > 200
