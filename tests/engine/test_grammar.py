# SPDX-License-Identifier: Apache-2.0
"""Grammars compile beside the loop, hold their requests to them, and harm nobody else."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from engine import api
from engine.client import EngineClient
from engine.config import GrammarConfig
from engine.errors import GrammarError
from engine.grammar.compiler import CompileJob, GrammarCompiler
from engine.grammar.matcher import GrammarMatcher
from engine.loop.grammar_desk import GrammarDesk
from engine.transport import pack_ids
from tests.fakes.live_engine import (
    EOS,
    LiveEngine,
    byte_vocabulary,
    make_request,
    run,
    serve,
    spell,
)
from tests.fakes.scripted_runner import ScriptedRunner, hashed_script

VOCAB = 128
STRICT = api.GrammarSpec(kind=api.GrammarKind.REGEX, text="(yes|no)( [a-c]{2,4})?!")
SCHEMA = api.GrammarSpec(
    kind=api.GrammarKind.JSON_SCHEMA,
    text=json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"enum": ["read", "write"]},
                "on": {"type": "boolean"},
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["name", "on", "n"],
        }
    ),
)


class Compiling:
    """A compiler and a way to wait for its jobs."""

    def __init__(self, **config: int) -> None:
        self.woken = threading.Semaphore(0)
        vocabulary = byte_vocabulary(VOCAB)
        self.compiler = GrammarCompiler(
            vocabulary.token_bytes,
            vocabulary.eos_ids,
            VOCAB,
            GrammarConfig(**config),
            self.woken.release,
        )
        self.compiler.wait_warm()

    def compile(self, kind: str, text: str) -> tuple[CompileJob, bool]:
        job, cached = self.compiler.compile(api.GrammarSpec(kind=api.GrammarKind(kind), text=text))
        while not job.is_done:
            assert self.woken.acquire(timeout=60)
        return job, cached


@pytest.fixture(scope="module")
def compiling() -> Compiling:
    return Compiling()


def allowed(matcher: GrammarMatcher, **how: bool) -> set[int]:
    bitmask = np.zeros((1, VOCAB // 32), dtype=np.int32)
    matcher.fill(bitmask, 0, **how)
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("kind", "text", "accepted"),
    [
        ("regex", "ab?", "ab"),
        ("ebnf", 'root ::= "x" | "y" root', "yyx"),
        ("json_schema", '{"type": "integer"}', "42"),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "const_string", "value": "hi"}}',
            "hi",
        ),
    ],
)
def test_every_kind_of_grammar_compiles_and_accepts_its_text_then_only_the_end(
    compiling: Compiling, kind: str, text: str, accepted: str
) -> None:
    job, _ = compiling.compile(kind, text)
    assert job.error is None
    matcher = GrammarMatcher(job.compiled, [EOS], VOCAB)
    for token_id in spell(accepted):
        assert token_id in allowed(matcher)
        assert matcher.accept(token_id)
    assert EOS in allowed(matcher)
    assert matcher.accept(EOS) and matcher.is_over


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", '{"type": "any"}', 'Unsupported type "any"'),
        ("json_schema", '{"type":', "Failed to parse JSON"),
        ("regex", "(?=a)b", "Lookahead"),
        ("ebnf", "root ::= missing", "missing"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "nope"}}', "nope"),
        ("structural_tag", "not json", "JSON"),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "nests 5001 deep"),
        ("json_schema", "[" * 100_000, "nests 100000 deep"),
        ("regex", "a\0b", "NUL"),
        ("regex", "(" * 100_000, ""),
    ],
)
def test_a_bad_grammar_is_an_error_with_a_reason_and_no_source_path(
    compiling: Compiling, kind: str, text: str, said: str
) -> None:
    job, _ = compiling.compile(kind, text)
    assert job.error is not None
    assert job.error.code == "invalid_grammar"
    assert said in str(job.error)
    assert not re.search(r"\.cc:\d+|^\[", str(job.error))


def test_brackets_inside_json_strings_do_not_count_as_nesting(compiling: Compiling) -> None:
    job, _ = compiling.compile("json_schema", json.dumps({"enum": ['[{\\"' * 200]}))
    assert job.error is None


def test_control_tokens_are_never_allowed_even_where_any_text_is(compiling: Compiling) -> None:
    job, _ = compiling.compile("regex", "[^Z]*")
    matcher = GrammarMatcher(job.compiled, [EOS], VOCAB)
    assert matcher.accept(spell("a")[0])
    assert allowed(matcher) & {0, 1, EOS} == {EOS}
    assert not matcher.accept(0)


def test_the_end_can_be_forbidden_unless_nothing_else_may_come(compiling: Compiling) -> None:
    job, _ = compiling.compile("regex", "ab*")
    matcher = GrammarMatcher(job.compiled, [EOS], VOCAB)
    assert matcher.accept(spell("a")[0])
    assert allowed(matcher) == {EOS, spell("b")[0]}
    assert allowed(matcher, forbid_stop=True) == {spell("b")[0]}
    job, _ = compiling.compile("regex", "a")
    matcher = GrammarMatcher(job.compiled, [EOS], VOCAB)
    assert matcher.accept(spell("a")[0])
    assert allowed(matcher, forbid_stop=True) == {EOS}


def test_a_grammar_is_compiled_once_and_the_oldest_is_dropped_beyond_the_cache_size() -> None:
    compiling = Compiling(cache_bytes=0)
    first, cached = compiling.compile("regex", "once")
    assert not cached
    assert compiling.compile("regex", "once")[0] is not first, "a cache of 0 bytes keeps nothing"

    compiling = Compiling()
    first, _ = compiling.compile("regex", "once")
    again, cached = compiling.compile("regex", "once")
    assert again is first and cached
    other, cached = compiling.compile("ebnf", "once")
    assert other is not first and not cached, "the same text of another kind is another grammar"
    failed, _ = compiling.compile("json_schema", "{")
    assert compiling.compile("json_schema", "{") == (failed, True), "errors are kept too"
    assert compiling.compiler.stats()["grammars_cached"] == 3


def test_waiters_give_up_after_their_budget_and_the_result_serves_the_next() -> None:
    class SlowCompiler:
        """compile() as GrammarCompiler has it; a job is done when the test says so."""

        def __init__(self) -> None:
            self.job = CompileJob(STRICT)

        def compile(self, spec: api.GrammarSpec) -> tuple[CompileJob, bool]:
            return self.job, self.job.is_done

    compiler = SlowCompiler()
    desk = GrammarDesk(compiler)  # type: ignore[arg-type]
    heard: list[object] = []

    def ask(owner: str, budget_ms: int, now_ms: int = 1000) -> None:
        desk.ask(
            STRICT,
            owner,
            now_ms=now_ms,
            budget_ms=budget_ms,
            on_ready=lambda job, cached: heard.append((owner, cached)),
            on_error=lambda error: heard.append((owner, error.code)),
        )

    ask("hasty", 100)
    ask("patient", 5000)
    ask("gone", 50)
    desk.withdraw("gone")
    assert desk.next_deadline_ms == 1100
    desk.serve(1099)
    assert heard == []
    desk.serve(1100)
    assert heard == [("hasty", "grammar_budget_exceeded")]
    compiler.job.is_done = True
    desk.serve(1200)
    ask("late", 1, 1300)
    assert heard[1:] == [("patient", False), ("late", True)]
    assert desk.next_deadline_ms is None


def make_runner() -> ScriptedRunner:
    return ScriptedRunner(hashed_script(VOCAB), vocab_size=VOCAB)


def text_of(ids: list[int]) -> str:
    return b"".join(byte_vocabulary(VOCAB).token_bytes[i] for i in ids).decode()


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_grammar_rows_beside_free_rows_keep_to_their_grammar_and_end_with_the_stop_token(
    tmp_path: Path, temperature: float
) -> None:
    async def work(client: EngineClient) -> None:
        sampling = {"temperature": temperature, "seed": 3}
        requests = [
            make_request(
                f"r{i}",
                [10 + i, 11, 12],
                60,
                sampling=sampling,
                grammar=(STRICT, SCHEMA, None)[i % 3],
            )
            for i in range(12)
        ]
        results = await asyncio.gather(*(run(client, request) for request in requests))
        for request, result in zip(requests, results, strict=True):
            assert result.finished is not None and result.finished.error_code is None
            if request.grammar is None:
                continue
            assert result.finished.reason is api.FinishReason.STOP
            assert result.finished.stop_token_id == EOS
            assert result.ids[-1] == EOS, "history holds the token that ended the turn"
            text = text_of(result.ids)
            if request.grammar is STRICT:
                assert re.fullmatch(STRICT.text, text)
            else:
                value = json.loads(text)
                assert value["name"] in ("read", "write") and 0 <= value["n"] <= 99
                assert value["on"] in (True, False)

    serve(LiveEngine(str(tmp_path), make_runner(), wait_grammar=True), work)


def test_a_grammar_row_is_continued_after_a_restart_where_it_was(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        sampling = {"temperature": 1.0, "seed": 9}

        def request(name: str, resumed: list[int]) -> api.GenerateRequest:
            return make_request(
                name,
                [20, 21],
                60,
                sampling=sampling,
                grammar=SCHEMA,
                resume_token_ids=pack_ids(resumed),
            )

        whole = (await run(client, request("whole", []))).ids
        for cut in (1, 9, len(whole) - 1):
            assert (await run(client, request(f"c{cut}", whole[:cut]))).ids == whole[cut:]
        done = await run(client, request("done", whole))
        assert done.ids == [] and done.finished is not None
        assert done.finished.reason is api.FinishReason.STOP
        wrong = await run(client, request("wrong", spell("oops")))
        assert wrong.finished is not None
        assert wrong.finished.error_code == "grammar_rejected"
        assert "resume_token_ids[0]" in str(wrong.finished.error_message)

    serve(LiveEngine(str(tmp_path), make_runner(), wait_grammar=True), work)


def test_min_new_tokens_lengthens_a_grammar_row_only_as_far_as_the_grammar_can(
    tmp_path: Path,
) -> None:
    async def work(client: EngineClient) -> None:
        for text, length in (("[ab]*", 10), ("ab", 2)):
            grammar = api.GrammarSpec(kind=api.GrammarKind.REGEX, text=text)
            request = make_request(
                text, [9, 9], 30, sampling={"min_new_tokens": 10}, grammar=grammar
            )
            result = await run(client, request)
            assert result.finished is not None and result.finished.error_code is None
            assert len(result.ids) > length if length == 10 else len(result.ids) == length + 1

    serve(LiveEngine(str(tmp_path), make_runner(), wait_grammar=True), work)


def test_an_invalid_grammar_fails_its_request_and_compile_answers_its_client(
    tmp_path: Path,
) -> None:
    async def work(client: EngineClient) -> None:
        bad = api.GrammarSpec(kind=api.GrammarKind.JSON_SCHEMA, text='{"type": "any"}')
        compiled, result, fine = await asyncio.gather(
            client.compile(bad, budget_ms=60_000),
            run(client, make_request("bad", [5, 6], 5, grammar=bad)),
            run(client, make_request("fine", [5, 6], 5, grammar=STRICT)),
        )
        assert compiled.error_code == "invalid_grammar"
        assert result.finished is not None
        assert result.finished.error_code == "invalid_grammar"
        assert 'Unsupported type "any"' in str(result.finished.error_message)
        assert fine.finished is not None and fine.finished.error_code is None
        again = await client.compile(STRICT, budget_ms=60_000)
        assert again.cached and again.error_code is None
        stats = await client.stats()
        assert stats["grammars_cached"] == 2 and stats["running"] == 0

    serve(LiveEngine(str(tmp_path), make_runner(), wait_grammar=True), work)


def test_a_request_that_waits_for_its_grammar_can_be_aborted_and_blocks_nobody(
    tmp_path: Path,
) -> None:
    heavy = api.GrammarSpec(
        kind=api.GrammarKind.JSON_SCHEMA,
        text=json.dumps(
            {
                "type": "object",
                "properties": {
                    f"p{i}": {"type": "string", "maxLength": 3000 + i} for i in range(30)
                },
            }
        ),
    )

    async def work(client: EngineClient) -> None:
        waiting = asyncio.create_task(run(client, make_request("waits", [5], 5, grammar=heavy)))
        free = await run(client, make_request("free", [6], 5))
        assert free.finished is not None and free.finished.error_code is None
        await client.abort("waits")
        result = await waiting
        assert result.finished is not None
        assert result.finished.reason in (api.FinishReason.ABORTED, api.FinishReason.LENGTH)

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_a_broken_backend_is_an_error_not_a_hang() -> None:
    compiling = Compiling()
    compiling.compiler._backend = None
    with pytest.raises(GrammarError, match="could not be loaded"):
        compiling.compiler.wait_warm()
