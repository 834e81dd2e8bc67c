# SPDX-License-Identifier: Apache-2.0
"""Whole turns of a family, right ones and wrong ones, walked through a compiled grammar's masks.

A right turn calls every tool with all of its parameters; a wrong one differs from it in what its
name says. Each walk asks the mask before each token, as a sampler does, and the grammar's byte
parser whether the mask was right about other tokens.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xgrammar

from engine import api
from engine.config import GrammarConfig
from engine.grammar.compiler import CompileJob, GrammarCompiler
from tests.fakes.tool_samples import turn_text
from tools_schema.control_markers import ControlMarkers
from tools_schema.formats.base import ToolFormat
from tools_schema.json_pointer import resolve_local
from tools_schema.rendering import CallText
from tools_schema.structural_tag import GrammarPlan, build_structural_tag
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import ToolSet, ToolSpec
from tools_schema.validation import validate_arguments

_WAIT_S = 300.0


@dataclass(frozen=True)
class WalkVocabulary:
    """Tokens by id, b"" for control tokens and holes; `control`: the first of these by text."""

    token_bytes: Sequence[bytes]
    control: Mapping[str, int]
    eos_id: int
    _ids: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for token_id, spelled in enumerate(self.token_bytes):
            if spelled:
                self._ids.setdefault(bytes(spelled), token_id)

    def encode(self, text: str, rng: random.Random | None = None) -> list[int]:
        """Control tokens where their text stands, else the longest token that fits.

        With `rng` a token is now and then cut short: another spelling of the same bytes.
        """
        pattern = "|".join(re.escape(t) for t in sorted(self.control, key=len, reverse=True))
        ids: list[int] = []
        for index, piece in enumerate(re.split(f"({pattern})", text) if pattern else [text]):
            if index % 2:
                ids.append(self.control[piece])
            else:
                ids += self._plain(piece.encode(), rng)
        return ids

    def _plain(self, data: bytes, rng: random.Random | None) -> Iterator[int]:
        start = 0
        while start < len(data):
            most = 1 + rng.randrange(6) if rng and rng.random() < 0.3 else 48
            for size in range(min(most, len(data) - start), 0, -1):
                token_id = self._ids.get(data[start : start + size])
                if token_id is not None:
                    break
            else:
                raise AssertionError(f"no token for byte {data[start]}")
            yield token_id
            start += size


class Compiling:
    """The engine's own compiler over such a vocabulary."""

    def __init__(self, vocabulary: WalkVocabulary) -> None:
        self.vocabulary = vocabulary
        self._woken = threading.Semaphore(0)
        self._compiler = GrammarCompiler(
            vocabulary.token_bytes,
            (vocabulary.eos_id,),
            len(vocabulary.token_bytes),
            GrammarConfig(),
            self._woken.release,
            control_ids=tuple(vocabulary.control.values()),
        )
        self._compiler.wait_warm()
        self._markers: dict[str, ControlMarkers] = {}

    def markers(self, tool_format: ToolFormat) -> ControlMarkers:
        """Found once for each family, as where a model is loaded."""
        if tool_format.name not in self._markers:
            texts, control = tool_format.grammar_texts(), self.vocabulary.control
            self._markers[tool_format.name] = ControlMarkers.among(texts, control)
        return self._markers[tool_format.name]

    def plan(self, tools: ToolSet, fmt: ToolFormat, choice: object = "auto") -> GrammarPlan:
        return build_structural_tag(
            tools,
            parse_tool_choice(choice, tools),
            fmt,
            reasoning="auto" if fmt.reasoning is not None else "off",
            markers=self.markers(fmt),
        )

    def compile(self, plan: GrammarPlan) -> CompileJob:
        assert plan.text is not None
        job, _ = self._compiler.compile(
            api.GrammarSpec(kind=api.GrammarKind(plan.kind), text=plan.text)
        )
        while not job.is_done:
            assert self._woken.acquire(timeout=_WAIT_S)
        assert job.error is None, job.error
        return job

    def close(self) -> None:
        self._compiler.close()


# -- turns ---------------------------------------------------------------------------------


def example(schema: Any, root: Any, depth: int = 0) -> Any:
    """A value of the schemas that tools have, with every declared property in it."""
    if not isinstance(schema, dict):
        return "x"
    if "$ref" in schema:
        return example(resolve_local(root, schema["$ref"]), root, depth + 1)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return example(schema[key][0], root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        declared = schema.get("properties", {})
        required = schema.get("required", [])
        keys = dict.fromkeys([*(declared if depth < 4 else ()), *required])
        return {key: example(declared.get(key, {}), root, depth + 1) for key in keys}
    if kind == "array":
        least = schema.get("minItems", 0 if depth > 3 else 1)
        return [example(schema.get("items", {}), root, depth + 1) for _ in range(least)]
    number = schema.get("minimum", schema.get("exclusiveMinimum", 1) + 1)
    step = schema.get("multipleOf", 1)
    known = {"integer": -(-int(number) // step) * step, "number": number, "boolean": True}
    return known[kind] if kind in known else None if kind == "null" else _text_of(schema)


_TEXTS = ('src/caf\u00e9 \u2013 "a\\b"\n\tx = {1: [2]}', "owner/name", "2026-11-30", "a-1", "12-40")


def _text_of(schema: dict[str, Any]) -> str:
    texts = ("2026-11-30",) if schema.get("format") == "date" else _TEXTS
    pattern, most = schema.get("pattern", ""), schema.get("maxLength")
    return next(text for text in texts if re.search(pattern, text))[:most]


def example_call(tool: ToolSpec, number: int) -> CallText:
    schema = tool.schema()
    arguments = json.dumps(example(schema, schema), ensure_ascii=False)
    return CallText(name=tool.name, arguments=arguments, call_id=f"aB3dE6g{number:02d}")


def example_calls(tools: ToolSet) -> list[CallText]:
    """A valid call of each tool, but for the few whose schemas `example` is too simple for."""
    calls = [example_call(tool, number) for number, tool in enumerate(tools)]
    valid = [c for c in calls if validate_arguments(tools, c.name, c.arguments) == []]
    assert len(valid) >= 0.6 * len(calls)
    return valid


def thought_of(fmt: ToolFormat, text: str) -> str:
    """Reasoning as the family's model opens and ends it itself."""
    tags = fmt.reasoning
    if tags is None:
        return ""
    begin, end = tags.begin + tags.layout_after_begin, tags.end + tags.layout_after_end
    return begin + text + tags.layout_before_end + end


def right_turns(fmt: ToolFormat, tools: ToolSet, at_once: int = 8) -> list[str]:
    """Turns that call each of the tools, some after reasoning and text."""
    calls = example_calls(tools)
    size = min(at_once, fmt.max_calls or at_once)
    turns = []
    for start in range(0, len(calls), size):
        text = "" if fmt.is_bare or start % 2 else "I look at \u00e9 <b> and [x]."
        thought = "" if start % 4 else thought_of(fmt, "hm {<x>}")
        turns.append(thought + turn_text(fmt, text, calls[start : start + size]))
    return [*turns, turn_text(fmt, "No tool: <b> {x} [y] \u00e9.", [])]


def wrong_turns(fmt: ToolFormat, tools: ToolSet) -> dict[str, str]:
    """Turns that begin as right ones do and are none, by what is wrong with them."""
    needing = [tool for tool in tools if tool.schema().get("required")]
    turns = {
        "an unknown tool": turn_text(fmt, "", [CallText(name="zz_top", arguments="{}")]),
        "text after calls": turn_text(fmt, "", example_calls(tools)[:1]) + "\nDone.",
    }
    for tool in needing[:3]:
        none = CallText(name=tool.name, arguments="{}", call_id="aB3dE6g00")
        turns[f"{tool.name} without what it requires"] = turn_text(fmt, "", [none])
    for tool in tools:
        for key, part in tool.schema().get("properties", {}).items():
            if part.get("type") in ("integer", "boolean", "array"):
                bad = {**json.loads(example_call(tool, 0).arguments), key: {"no": "such"}}
                call = CallText(name=tool.name, arguments=json.dumps(bad), call_id="aB3dE6g00")
                turns[f"{tool.name}.{key} of another type"] = turn_text(fmt, "", [call])
                break
    return turns


# -- walks ---------------------------------------------------------------------------------


class Walk:
    """One matcher and the masks that it fills."""

    def __init__(self, job: CompileJob, vocabulary: WalkVocabulary, plan: GrammarPlan) -> None:
        self._vocabulary = vocabulary
        self._matcher = xgrammar.GrammarMatcher(job.compiled)
        self._mask = np.zeros((1, -(-len(vocabulary.token_bytes) // 32)), dtype=np.int32)
        self._foreign = sorted(set(vocabulary.control.values()) - set(plan.control_ids))

    def take(self, ids: Sequence[int], rng: random.Random, num_probes: int) -> int:
        """How many of these tokens the masks allow, one after the other."""
        for place, token_id in enumerate(ids):
            self._matcher.fill_next_token_bitmask(self._mask)
            assert not any(map(self._allows, self._foreign)), "a control token it does not name"
            self._probe(rng, num_probes)
            if not self._allows(token_id):
                assert not self._matcher.accept_token(token_id)
                return place
            assert self._matcher.accept_token(token_id)
        return len(ids)

    def ends(self) -> bool:
        """Whether the turn may end here."""
        self._matcher.fill_next_token_bitmask(self._mask)
        return self._allows(self._vocabulary.eos_id)

    def _allows(self, token_id: int) -> bool:
        return bool(self._mask.view(np.uint32)[0, token_id // 32] >> (token_id % 32) & 1)

    def _probe(self, rng: random.Random, num_probes: int) -> None:
        """The mask's word on some tokens against that of the byte parser."""
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: len(self._vocabulary.token_bytes)])
        picked = [rng.randrange(len(self._vocabulary.token_bytes)) for _ in range(num_probes)]
        picked += [int(allowed[rng.randrange(len(allowed))]) for _ in range(num_probes)]
        for token_id in picked:
            spelled = self._vocabulary.token_bytes[token_id]
            if spelled:
                fits = bool(self._matcher.accept_string(bytes(spelled)))
                if fits:
                    self._matcher.rollback(1)
                assert fits is self._allows(token_id), (token_id, spelled)


def check_family(
    compiling: Compiling, fmt: ToolFormat, tools: ToolSet, *, seed: int = 0, num_probes: int = 4
) -> int:
    """Every right turn is allowed to its end, every wrong one is not; the tokens walked."""
    rng = random.Random(seed)
    num_tokens = 0
    jobs = {choice: compiling.plan(tools, fmt, choice) for choice in ("auto", "required")}
    for choice, plan in jobs.items():
        job = compiling.compile(plan)
        turns = right_turns(fmt, tools)
        for turn in turns if choice == "auto" else turns[1:-1] or turns[:-1]:
            if choice == "required" and fmt.lead:
                turn = turn[turn.index(fmt.lead + fmt.open_marker) :]
            elif choice == "required":
                turn = turn[turn.index(fmt.open_marker) :] if fmt.open_marker else turn
            for spelling in (None, rng):
                ids = compiling.vocabulary.encode(turn, spelling)
                walk = Walk(job, compiling.vocabulary, plan)
                taken = walk.take(ids, rng, num_probes)
                assert taken == len(ids), (fmt.name, choice, _shown(compiling, ids, taken))
                assert walk.ends(), (fmt.name, choice, turn)
                num_tokens += len(ids)
        for what, turn in wrong_turns(fmt, tools).items():
            ids = compiling.vocabulary.encode(turn)
            walk = Walk(job, compiling.vocabulary, plan)
            taken = walk.take(ids, rng, num_probes)
            assert taken < len(ids) or not walk.ends(), (fmt.name, choice, what, turn)
            num_tokens += taken
    return num_tokens


def _shown(compiling: Compiling, ids: Sequence[int], place: int) -> str:
    spelled = [bytes(compiling.vocabulary.token_bytes[i]) or b"#%d" % i for i in ids]
    before, at = b"".join(spelled[:place]), spelled[place]
    return f"{before[-200:].decode('utf-8', 'replace')} >>> {at!r}"
