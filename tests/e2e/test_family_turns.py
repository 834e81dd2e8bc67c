# SPDX-License-Identifier: Apache-2.0
"""Turns of every tool format through the real engine, its markers control tokens, tokens or text.

A scripted model says what it would like; grammar, sampler and scheduler are real. What it samples
is read as a turn's reader does, kept as a history keeps it, and a next turn is rendered behind it.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from appliance.answer import AnswerReader
from appliance.grammars import constrained, control_markers, spec_of
from appliance.prompts import Head, HistoryEnd, PromptRenderer
from engine import api
from engine.client import EngineClient
from engine.config import GrammarConfig
from engine.text.assets import TextAssets
from engine.transport import pack_ids, unpack_ids
from sessions.items import FunctionCallOutput
from tests.fakes.live_engine import Collected, LiveEngine, serve
from tests.fakes.marker_model import KINDS, STOP, foreign_ids, marker_assets, vocab_size, vocabulary
from tests.fakes.scripted_runner import ScriptedRunner
from tests.fakes.tool_samples import (
    FLAGS,
    LIST,
    TIME,
    TOOLS,
    call_ids,
    calls_of,
    check_event_rules,
    problems_of,
    reasoning_of,
    text_of,
    turn_text,
)
from tools_schema.events import Event
from tools_schema.formats.base import ToolFormat
from tools_schema.formats.registry import FORMATS
from tools_schema.reasoning import Reasoning, reasoning_of_prompt
from tools_schema.rendering import CallText, render_system
from tools_schema.response_format import ResponseFormat
from tools_schema.stream_parser import StreamParser
from tools_schema.structural_tag import GrammarPlan, build_structural_tag
from tools_schema.tool_choice import parse_tool_choice
from tools_schema.tool_spec import ToolSet
from tools_schema.validation import validate_arguments

CONTEXT = 4096
NO_TOOLS = ToolSet(())
SAID = "See <b> \u00e9."
BUDGET = 6


@dataclass(kw_only=True)
class Case:
    """One turn: what is asked for, and what the model would say."""

    name: str
    fmt: ToolFormat
    kind: str
    choice: Any = "auto"
    parallel: bool = True
    toolset: ToolSet = TOOLS
    response_format: ResponseFormat | None = None
    thought: str | None = None
    prompt_opens: bool = False  # the prompt ends inside open reasoning
    budget: int | None = None
    text: str = ""
    calls: list[CallText] = field(default_factory=list)
    raw: str | None = None  # said instead of text and calls
    # Filled in by the run.
    prompt: list[int] = field(default_factory=list)
    plan: GrammarPlan | None = None
    sampled: list[int] = field(default_factory=list)
    finished: api.Finished | None = None

    @property
    def assets(self) -> TextAssets:
        return marker_assets(self.fmt, self.kind)

    @property
    def renderer(self) -> PromptRenderer:
        return PromptRenderer(self.assets, self.fmt)

    @property
    def wanted_text(self) -> str:
        tags, before = self.fmt.reasoning, ""
        if self.thought is not None and tags is not None:
            opening = "" if self.prompt_opens else tags.begin + tags.layout_after_begin
            before = opening + self.thought + tags.end + tags.layout_after_end
        said = self.raw
        if said is None:
            said = turn_text(self.fmt, self.text, self.calls)
        return before + said

    @property
    def num_thinking(self) -> int | None:
        """Tokens up to where its budget ends its reasoning."""
        if self.budget is None:
            return None
        thinking = self.wanted_text.partition(str(self.thought))[0] + str(self.thought)
        return len(self.assets.tokenizer.encode_with_control(thinking))

    @property
    def wanted(self) -> list[int]:
        return self.assets.tokenizer.encode_with_control(self.wanted_text)


def cases_of(fmt: ToolFormat, kind: str) -> list[Case]:
    """What a family's turns can be."""
    two = [LIST, FLAGS][: fmt.max_calls]
    said = "" if fmt.is_bare else SAID
    named = {"type": "function", "function": {"name": "get_time"}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "list_dir"}}],
        },
    }
    json_format = ResponseFormat("json_schema", json.dumps({"type": "object"}))

    def case(name: str, **fields: Any) -> Case:
        return Case(name=f"{fmt.name}/{kind}/{name}", fmt=fmt, kind=kind, **fields)

    found = [
        case("text", text=SAID),
        case("calls", text=said, calls=two),
        case("one", text=said, calls=[LIST], parallel=False),
        case("none", choice="none", text=SAID),
        case("no tools", toolset=NO_TOOLS, text=SAID),
        case("required", choice="required", calls=two),
        case("named", choice=named, calls=[TIME]),
        case("allowed", choice=allowed, text=said, calls=[LIST]),
        case("json", toolset=NO_TOOLS, response_format=json_format, raw=fmt.text_begin + "{}"),
    ]
    if fmt.reasoning is not None:
        # Harmony's prompts never end in open reasoning: its model opens it itself.
        opens = [False] if fmt.reasoning_anywhere else [False, True]
        for is_open in opens:
            way = "open" if is_open else "opened"
            thinks: dict[str, Any] = {"thought": "hm <x>", "prompt_opens": is_open}
            found += [
                case(f"{way}, calls", text=said, calls=two, **thinks),
                case(f"{way}, required", choice="required", calls=two[:1], **thinks),
                case(f"{way}, text", toolset=NO_TOOLS, text=SAID, **thinks),
                case(f"{way}, budget", text=SAID, budget=BUDGET, **{**thinks, "thought": "x" * 6}),
            ]
    return found


class Scripts:
    """Logits for many prompts: each says its case by its first two tokens, which are bytes."""

    def __init__(self, cases: Sequence[Case], *, bait: bool) -> None:
        self._bait = bait
        self._wanted = [case.wanted for case in cases]
        self._ends = [case.num_thinking for case in cases]
        self._foreign = [foreign_ids(case.assets.tokenizer) for case in cases]
        self._control = list(vocabulary().control_ids)
        self._closing = [i for i in range(vocab_size()) if vocabulary().token_bytes[i] in _CLOSING]

    def __call__(self, history: Sequence[int]) -> torch.Tensor:
        index = history[0] * 256 + history[1]
        wanted = self._wanted[index]
        place = len(history) - 2
        eos = vocabulary().eos_ids[0]
        if self._bait:
            return self._tempted(index, place, eos)
        values = torch.zeros(vocab_size())
        values[eos] = 1.0
        values[wanted[place] if place < len(wanted) else eos] = 10.0
        if place == self._ends[index]:
            values[ord("x")] = 20.0  # it would go on thinking
        return values

    def _tempted(self, index: int, place: int, eos: int) -> torch.Tensor:
        """Anything, control tokens first of all; and an end in sight."""
        rng = np.random.default_rng(zlib.crc32(f"{index}/{place}".encode()))
        values = rng.normal(0, 2, vocab_size()).astype(np.float32)
        values[self._foreign[index]] = -np.inf  # tokens that this model does not have
        values[self._control] += 8
        values[self._closing] += 1 + place / 8
        values[eos] = 4 + place / 40
        return torch.from_numpy(values)


SOME = ("calls", "none", "required", "json", "opened, calls", "open, text")
_CLOSING = frozenset((b'"', b"}", b"]", b'"}', b"}}", b"<", b"</", b">", b"true", b"null"))


def prepare(case: Case) -> api.GenerateRequest:
    """Render the prompt, build the grammar, as the API process does."""
    options = {"thinking": True} if case.prompt_opens else {}
    template = case.assets.chat_template
    system = render_system(case.fmt, case.toolset, "Be brief.")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Go. {STOP}"}]
    case.prompt = template.render(messages, add_generation_prompt=True, **options)
    tail = case.assets.tokenizer.decode(case.prompt[-40:], with_control=True)
    reasoning: Reasoning = reasoning_of_prompt(case.fmt, tail)
    assert reasoning == ("off" if case.fmt.reasoning is None else reasoning)
    if case.thought is None and reasoning != "on":
        reasoning = "off"
    case.plan = build_structural_tag(
        case.toolset,
        choice_of(case),
        case.fmt,
        reasoning=reasoning,
        response_format=case.response_format,
        reasoning_budget=case.budget,
        markers=control_markers(case.assets, case.fmt),
    )
    sampling = api.SamplingParams(max_new_tokens=600, temperature=0.0)
    return api.GenerateRequest(
        request_id=case.name,
        token_ids=b"",
        sampling=constrained(sampling, case.plan),
        grammar=spec_of(case.plan),
    )


def choice_of(case: Case) -> Any:
    if not len(case.toolset):
        return parse_tool_choice(None, case.toolset)
    return parse_tool_choice(case.choice, case.toolset, case.parallel)


def sample(cases: Sequence[Case], folder: Path, *, bait: bool = False) -> None:
    """Run all cases through one engine."""
    requests = [prepare(case) for case in cases]
    for index, request in enumerate(requests):
        request.token_ids = pack_ids([index // 256, index % 256])  # no model reads more
    runner = ScriptedRunner(
        Scripts(cases, bait=bait),
        vocab_size=vocab_size(),
        page_size=64,
        num_pages=2048,
        max_slots=24,
        max_context_len=CONTEXT,
    )
    engine = LiveEngine(
        str(folder), runner, max_slots=24, token_budget=2048, wait_grammar=True,
        grammar=GrammarConfig(budget_ms=120_000),
        vocabulary=vocabulary(),
    )  # fmt: skip

    async def work(client: EngineClient) -> None:
        results = await asyncio.gather(
            *(Collected().read(client.generate(request)) for request in requests)
        )
        for case, result in zip(cases, results, strict=True):
            case.sampled, case.finished = result.ids, result.finished

    serve(engine, work)


def reader_of(case: Case) -> AnswerReader:
    markers = control_markers(case.assets, case.fmt)
    parser = StreamParser(
        case.fmt,
        case.toolset,
        choice_of(case),
        reasoning_open=case.prompt_opens,
        call_id_factory=call_ids(),
    )
    ends = case.assets.chat_template.ends
    return AnswerReader(
        tokenizer=case.assets.tokenizer,
        eos_ids=frozenset(case.assets.eos_ids),
        parser=parser,
        shown_control=markers.token_ids,
        closing_ids=ends.replacements(case.assets.eos_ids),
    )


def read(case: Case, ids: Sequence[int], *, is_cut: bool) -> tuple[AnswerReader, list[Event]]:
    reader = reader_of(case)
    events = [event for token_id in ids for event in reader.push(token_id)]
    events += reader.finish(is_cut=is_cut)
    check_event_rules(events)
    return reader, events


def check_next_turn(case: Case, reader: AnswerReader, calls: Sequence[tuple[str, str]]) -> None:
    """The answer as history keeps it, and what is rendered behind it, read as one conversation."""
    kept = reader.kept()
    outputs = tuple(
        FunctionCallOutput(id=f"item_{i}", call_id=f"call_{i}", output=f"done {i} {STOP}")
        for i in range(len(calls))
    )
    role, names = "assistant", {f"call_{i}": name for i, (name, _) in enumerate(calls)}
    end = HistoryEnd(role=role, is_closed=kept.is_closed, call_names=names)
    following = case.renderer.render_turn(end, outputs, Head("Be brief.", case.toolset))
    ids = [*case.prompt, *unpack_ids(kept.token_ids), *unpack_ids(following.token_ids)]
    control = case.assets.tokenizer.token_id(STOP)
    before = case.prompt.count(control)
    assert ids.count(control) == before + 1 + bool(outputs), "each message ends once"
    text = case.assets.tokenizer.decode(ids, with_control=True)
    for i in range(len(outputs)):
        assert f"done {i} {STOP}" in text


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_model_says_in_its_family_s_format_is_sampled_read_and_kept(
    kind: str, tmp_path: Path
) -> None:
    cases = [case for fmt in FORMATS for case in cases_of(fmt, kind)]
    if kind == "markup":  # as bytes to the grammar: the other kinds cover the rest
        cases = [case for case in cases if case.name.rpartition("/")[2] in SOME]
    sample(cases, tmp_path)
    for case in cases:
        eos = list(case.assets.eos_ids)
        assert case.sampled == case.wanted + eos, (
            case.name,
            case.assets.tokenizer.decode(case.sampled, with_control=True),
        )
        reader, events = read(case, case.sampled, is_cut=False)
        assert problems_of(events) == [], case.name
        text = case.text if case.raw is None else "{}"
        assert text_of(events) == text, case.name
        assert reasoning_of(events) == (case.thought or ""), case.name
        calls = [(call.name, json.loads(call.arguments)) for call in case.calls]
        found = [(name, json.loads(arguments)) for name, arguments in calls_of(events)]
        assert found == calls, case.name
        kept = reader.kept()
        assert kept.is_closed and unpack_ids(kept.token_ids).tolist() == case.sampled
        check_next_turn(case, reader, calls_of(events))


def test_a_model_drawn_to_control_tokens_writes_none_but_its_grammar_s_markers(
    tmp_path: Path,
) -> None:
    cases = [
        case
        for fmt in FORMATS
        for case in cases_of(fmt, "control")
        if case.name.rpartition("/")[2] in SOME
    ]
    sample(cases, tmp_path, bait=True)
    num_ended = 0
    for case in cases:
        assert case.finished is not None and case.finished.error_code is None, case.name
        assert case.plan is not None
        control = set(vocabulary().control_ids) - set(vocabulary().eos_ids)
        assert control.intersection(case.sampled) <= set(case.plan.control_ids), case.name
        is_whole = case.finished.reason is api.FinishReason.STOP
        num_ended += is_whole
        reader, events = read(case, case.sampled, is_cut=not is_whole)
        spelled = case.assets.tokenizer.decode(case.sampled, with_control=True)
        if is_whole:
            assert problems_of(events) == [], (case.name, spelled)
            assert len(calls_of(events)) >= choice_of(case).min_calls, (case.name, spelled)
        shown = [text_of(events), *(arguments for _, arguments in calls_of(events))]
        for marker, _ in control_markers(case.assets, case.fmt).ids:
            assert not any(marker in text for text in shown), (case.name, spelled)
        losses = {fallback.tool for fallback in case.plan.fallbacks}
        for name, arguments in calls_of(events):
            if name not in losses:
                assert validate_arguments(TOOLS, name, arguments) == [], (case.name, arguments)
        check_next_turn(case, reader, calls_of(events))
    assert num_ended > len(cases) // 4


def test_parallel_calls_switched_off_end_the_turn_after_one_call(tmp_path: Path) -> None:
    cases = []
    for fmt in FORMATS:
        if fmt.max_calls == 1:
            continue
        for kind in KINDS:
            cases.append(
                Case(
                    name=f"{fmt.name}/{kind}", fmt=fmt, kind=kind, parallel=False,
                    choice="required", calls=[LIST, FLAGS],
                )
            )  # fmt: skip
    sample(cases, tmp_path)
    for case in cases:
        _, events = read(case, case.sampled, is_cut=False)
        assert [name for name, _ in calls_of(events)] == ["list_dir"], case.name
        assert problems_of(events) == []


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_an_answer_cut_at_any_token_keeps_whole_calls_closed_by_their_markers(
    fmt: ToolFormat,
) -> None:
    case = cases_of(fmt, "control")[1]
    prepare(case)
    ids, spell = case.wanted, case.assets.tokenizer.decode
    whole = spell(ids, with_control=True)
    checked: list[int] = []
    for end in range(len(ids) + 1):
        reader, events = read(case, ids[:end], is_cut=True)
        kept = reader.kept()
        kept_ids = unpack_ids(kept.token_ids).tolist()
        assert kept_ids[: kept.num_sampled] == ids[: kept.num_sampled]
        if len(calls_of(events)) == len(case.calls):
            assert spell(kept_ids, with_control=True).strip() == whole.strip()
        if kept_ids == checked:
            continue
        again_reader, again = read(case, kept_ids, is_cut=False)
        assert calls_of(again) == calls_of(events) and problems_of(again) == []
        assert unpack_ids(again_reader.kept().token_ids).tolist() == kept_ids
        checked = kept_ids
