# SPDX-License-Identifier: Apache-2.0
"""Drafts change nothing but the speed: the same tokens, endings and logprobs, no page is lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine import api
from engine.client import EngineClient
from engine.config import TOKENS_WITH_DRAFTS, EngineConfig
from engine.execution.batch import ForwardBatch
from engine.execution.model_loading import has_compiled_decoder
from engine.execution.model_runner import build_model_runner
from engine.transport import pack_ids
from kernels.selection import set_override
from tests.fakes.live_engine import EOS, Collected, LiveEngine, make_request, run, serve
from tests.fakes.scripted_runner import ScriptedRunner, expected_tokens, repeating_script
from tests.fakes.tiny_deepseek import write_tiny_deepseek

VOCAB = 130
BANNED = (0, 1)
_JSON = api.GrammarSpec(
    kind=api.GrammarKind.REGEX, text='(\\{"path": "[a-c/]{1,8}", "line": [0-9]{1,3}\\}){6}'
)
# Three calls, each between a control token that the tag names and text; 1 may come there alone.
_CALLS = api.GrammarSpec(
    kind=api.GrammarKind.STRUCTURAL_TAG,
    text=json.dumps(
        {
            "type": "structural_tag",
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "token", "token": 1},
                    {"type": "regex", "pattern": '\\{"path": "[a-c/]{1,6}"\\}'},
                ]
                * 3,
            },
        }
    ),
)
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot": {"sampling": {"temperature": 1.5, "seed": 5}},
    "cut": {"sampling": {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "seed": 6}},
    "late_stop": {"sampling": {"min_new_tokens": 90}},
    "stop_id": {"sampling": {"stop_token_ids": (40, 41, 42)}},
    "grammar": {"grammar": _JSON},
    "hot_grammar": {"grammar": _JSON, "sampling": {"temperature": 1.0, "seed": 8}},
    "calls": {"grammar": _CALLS, "sampling": {"allowed_control_ids": (1,)}},
    "penalties": {"sampling": {"frequency_penalty": 0.5}},
    "bias": {"sampling": {"logit_bias": {70: 4.0}}},
    "logprobs": {"sampling": {"num_logprobs": 2}},
}


class RowCounter(ScriptedRunner):
    """Notes the tokens of each step, and how often a slot had several rows in one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(repeating_script(VOCAB), vocab_size=VOCAB, max_context_len=512, **options)
        self.drafted_steps: list[int] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if len(batch.row_slots.unique()) < len(batch.row_slots):
            self.drafted_steps.append(len(batch.input_ids))
        return super().forward(batch)


def _engine(run_dir: Path, runner: Any, speculation: str) -> LiveEngine:
    return LiveEngine(
        str(run_dir), runner, token_budget=64, speculation=speculation, wait_grammar=True
    )


def _prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    piece = [rng.randrange(3, VOCAB) for _ in range(12)]
    return piece + [rng.randrange(3, VOCAB) for _ in range(seed % 5)] + piece[:8]


def _talk(run_dir: Path, runner: Any, speculation: str) -> tuple[dict[str, Collected], Any]:
    said: dict[str, Collected] = {}
    stats: dict[str, float] = {}

    async def work(client: EngineClient) -> None:
        async def one(kind: str, seed: int) -> None:
            said[kind] = await run(client, make_request(kind, _prompt(seed), 120, **_KINDS[kind]))

        await asyncio.gather(*(one(kind, seed) for seed, kind in enumerate(_KINDS)))
        stats.update(await client.stats())

    serve(_engine(run_dir, runner, speculation), work)
    return said, stats


def test_every_kind_of_request_gets_what_it_gets_without_drafts(tmp_path: Path) -> None:
    without, _ = _talk(tmp_path / "none", RowCounter(num_pages=400), "none")
    runner = RowCounter(num_pages=400)
    drafted, stats = _talk(tmp_path / "ngram", runner, "ngram")
    for kind in _KINDS:
        assert drafted[kind].ids == without[kind].ids, kind
        first, second = drafted[kind].finished, without[kind].finished
        assert first is not None and second is not None
        assert (first.reason, first.stop_token_id) == (second.reason, second.stop_token_id), kind
    assert drafted["logprobs"].logprobs == without["logprobs"].logprobs
    assert [place for place, token in enumerate(drafted["calls"].ids) if token == 1][0] == 0
    assert drafted["calls"].ids.count(1) == 3
    assert stats["draft_tokens"] > stats["draft_tokens_accepted"] > 100
    for total in ("draft_tokens", "draft_tokens_accepted"):
        by_place = [stats[f"{total}.ngram.{place}"] for place in range(1, 9)]
        assert sum(by_place) == stats[total]
        assert by_place == sorted(by_place, reverse=True), "a draft stands behind those before it"
    assert stats["owned_pages"] == stats["in_flight_pages"] == 0
    assert runner.drafted_steps and max(runner.drafted_steps) <= TOKENS_WITH_DRAFTS


@pytest.mark.parametrize("seed", range(3))
def test_random_loads_with_aborts_and_retractions_get_the_tokens_of_a_plain_loop(
    tmp_path: Path, seed: int
) -> None:
    """Shared prefixes, a pool that is too small, aborts at random times, requests at any time."""
    rng = random.Random(seed)
    script = repeating_script(VOCAB)
    runner = RowCounter(num_pages=(20, 30, 80)[seed])

    async def one(client: EngineClient, number: int) -> None:
        await asyncio.sleep(rng.random() * 0.2)
        prompt = _prompt(rng.randrange(4))[: rng.randrange(8, 24)]
        num = rng.randrange(1, 50)
        request = make_request(f"r{number}", prompt, num, priority=rng.randrange(2))
        task = asyncio.create_task(run(client, request))
        is_aborted = rng.random() < 0.25
        if is_aborted:
            await asyncio.sleep(rng.random() * 0.05)
            await client.abort(f"r{number}")
        result = await task
        want = expected_tokens(script, prompt, num, stop_ids=[EOS], banned_ids=BANNED)
        assert result.finished is not None and result.finished.error_code is None
        if result.finished.reason is api.FinishReason.ABORTED:
            assert is_aborted and result.ids == want[: len(result.ids)]
        else:
            assert result.ids == want

    async def work(client: EngineClient) -> None:
        await asyncio.gather(*(one(client, number) for number in range(25)))
        stats = await client.stats()
        assert stats["owned_pages"] == stats["in_flight_pages"] == 0
        assert stats["free_pages"] + stats["cached_pages"] == stats["num_pages"]
        assert stats["draft_tokens_accepted"] > 0

    serve(_engine(tmp_path, runner, "ngram"), work)


def test_requests_that_say_the_same_side_by_side_keep_each_page_once_and_read_their_own(
    tmp_path: Path,
) -> None:
    """Their tables are switched to the page that is kept while all of them wait for results.

    So a plan without rows switches them; without that they would go on in pages that are free.
    """
    for seed in (1, 6, 9):
        rng = random.Random(seed)
        script = repeating_script(VOCAB, period=rng.choice([2, 3, 5]))
        runner = ScriptedRunner(script, vocab_size=VOCAB, num_pages=100, max_context_len=200)
        prompt = [rng.randrange(3, VOCAB) for _ in range(6)] * 2
        want = expected_tokens(script, prompt, 100, banned_ids=BANNED)

        async def work(
            client: EngineClient, prompt: list[int] = prompt, want: list[int] = want
        ) -> None:
            request = make_request("a", prompt, 100, sampling={"ignore_eos": True})
            same = msgspec.structs.replace(request, request_id="b")
            for result in await asyncio.gather(run(client, request), run(client, same)):
                assert result.ids == want

        engine = LiveEngine(str(tmp_path / str(seed)), runner, token_budget=64, speculation="ngram")
        serve(engine, work)


def test_a_turn_goes_on_over_the_cached_pages_of_one_that_had_drafts(tmp_path: Path) -> None:
    """What rejected drafts left behind is in no page that another request finds."""
    script = repeating_script(VOCAB)

    async def work(client: EngineClient) -> None:
        history = _prompt(1)
        for turn in range(4):
            answer = await run(client, make_request(f"t{turn}", history, 40))
            want = expected_tokens(script, history, 40, stop_ids=[EOS], banned_ids=BANNED)
            assert answer.ids == want
            assert answer.started is not None
            if turn:
                assert answer.started.cache.l1 >= len(history) - 1 - len(_prompt(turn))
            history = [*history, *answer.ids, *_prompt(turn + 1)]
            lease = await client.lease(f"l{turn % 2}", pack_ids(history), 60_000)
            assert lease.tokens_granted > 0
        for name, length in (("fork", 50), ("rolled back", len(history) - 60)):
            start = history[:length]  # in the middle of what drafts were accepted for
            want = expected_tokens(script, start, 40, stop_ids=[EOS], banned_ids=BANNED)
            assert (await run(client, make_request(name, start, 40))).ids == want
        await client.drop_prefix(pack_ids(history), 30)
        want = expected_tokens(script, history, 20, stop_ids=[EOS], banned_ids=BANNED)
        assert (await run(client, make_request("again", history, 20))).ids == want
        assert (await client.stats())["draft_tokens_accepted"] > 0

    serve(_engine(tmp_path, RowCounter(num_pages=200), "ngram"), work)


def test_a_row_that_fails_behind_a_draft_keeps_the_tokens_before_it(tmp_path: Path) -> None:
    """As without drafts: the tokens up to the broken logits, then the error."""
    poison = 60
    plain = repeating_script(VOCAB, period=10_000)

    def script(history: Any) -> torch.Tensor:
        logits = plain(history)
        return torch.full_like(logits, torch.nan) if len(history) >= poison else logits

    found = []
    for speculation in ("none", "ngram"):
        runner = ScriptedRunner(script, vocab_size=VOCAB, num_pages=60)

        async def work(client: EngineClient) -> None:
            found.append(await run(client, make_request("r", _prompt(2), 80)))
            stats = await client.stats()
            assert stats["owned_pages"] == stats["in_flight_pages"] == 0

        serve(_engine(tmp_path / speculation, runner, speculation), work)
    for answer in found:
        assert answer.finished is not None and answer.finished.error_code == "invalid_logits"
    assert found[0].ids == found[1].ids
    assert len(_prompt(2)) + len(found[0].ids) == poison


def _answer(run_dir: Path, runner: Any, speculation: str, is_random: bool) -> list[int]:
    ids: list[int] = []
    prompt = [7 + place % 5 for place in range(32)]

    async def work(client: EngineClient) -> None:
        # Few words, so that a model that knows none says many of them again.
        bias = {token_id: 20.0 for token_id in (20, 40, 60)} if is_random else {}
        sampling = {"ignore_eos": True, "logit_bias": bias}
        request = make_request("r", prompt, 256, sampling=sampling)
        ids.extend((await run(client, request)).ids)
        accepted = (await client.stats())["draft_tokens_accepted"]
        assert (accepted > 20) == (speculation == "ngram")

    serve(_engine(run_dir / speculation, runner, speculation), work)
    return ids


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    set_override("mla_decode_form", None)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "model",
    ["latent attention, fp32", "latent attention, folded", "packaged model, packed weights"],
)
def test_a_real_model_says_the_same_256_tokens(tmp_path: Path, model: str) -> None:
    """In fp32, and in low precision: steps of up to 16 tokens round alike."""
    settings: dict[str, Any] = {}
    is_random = model.startswith("latent")
    if is_random:
        tiny = str(write_tiny_deepseek(tmp_path / "tiny"))
        form = "folded" if model.endswith("folded") else "rows"
        settings = {"model": tiny, "load_format": "dummy", "dtype": "float32"}
        settings["kernels"] = f"mla_decode_form={form}"
    elif not has_compiled_decoder():
        pytest.skip("the CPU extension is not built")
    config = EngineConfig(
        num_threads=1,
        kv_pool_tokens=2048,
        max_context_len=512,
        max_slots=4,
        speculation="ngram",
        **settings,
    )
    runner = build_model_runner(config)
    without = _answer(tmp_path, runner, "none", is_random)
    assert len(without) == 256
    assert _answer(tmp_path, runner, "ngram", is_random) == without
