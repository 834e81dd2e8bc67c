# SPDX-License-Identifier: Apache-2.0
"""More sessions than the pool holds, on the real engine loop and scheduler: nobody stops, nothing
leaks, and a session that lost its KV says what it would have said.

The model is a script of the whole history, whose KV is the tokens themselves: a page that is wrong
changes the answer.
"""

from __future__ import annotations

import concurrent.futures
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from engine.config import TiersConfig
from tests.fakes.appliance import Json, RunningApp, default_assets, sse_events, until
from tests.fakes.live_engine import LiveEngine
from tests.fakes.scripted_runner import ScriptedRunner

PAGE = 16
NUM_PAGES = 64
POOL = PAGE * NUM_PAGES  # tokens
CONTEXT = 640
VOCAB = 49152
EOS = 2
ANSWER_LEN = 12
TEXT = "look at this part of the repository and say what it does " * 12  # some 140 tokens


def next_id(history: Sequence[int]) -> int:
    """A plain word that depends on every token before it; an answer ends by itself."""
    seed = zlib.crc32(np.asarray(history, dtype=np.int32).tobytes())
    return EOS if seed % ANSWER_LEN == 0 else 1000 + seed % 5000


def script(history: Sequence[int]) -> torch.Tensor:
    logits = torch.zeros(VOCAB)
    logits[next_id(history)] = 20.0
    return logits


class Crowded:
    """An app on a small engine."""

    def __init__(self, app: RunningApp, engine: LiveEngine, runner: ScriptedRunner) -> None:
        self.app = app
        self.engine = engine
        self.runner = runner

    def stats(self) -> Json:
        return dict(self.app.get("/admin/engine/stats").json()["stats"])

    def settle(self) -> Json:
        """Wait until nothing runs, and check that every page has one place."""
        stats: Json = {}

        def is_settled() -> bool:
            stats.update(self.stats())
            return not (stats["running"] or stats["waiting"] or stats["owned_pages"])

        until(is_settled)
        places = ("free", "owned", "cached", "in_flight")
        assert sum(stats[f"{place}_pages"] for place in places) == NUM_PAGES, stats
        return stats

    def turn(self, session_id: str, text: str | list[Json] = TEXT, **fields: object) -> Json:
        body = {"input": text, "temperature": 0.0, "max_output_tokens": 2, **fields}
        with httpx.Client(base_url=self.app.url, timeout=60) as http:
            reply = http.post(f"/v1/sessions/{session_id}/turns", json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def tokens(self, session_id: str) -> list[int]:
        return list(self.app.get(f"/v1/sessions/{session_id}/tokens").json()["token_ids"])

    def check_said(self, session_id: str, turn: Json) -> None:
        """The answer is the one that the script gives to the whole history."""
        history = self.tokens(session_id)
        num_output = turn["usage"]["output_tokens"]
        for place in range(len(history) - num_output, len(history)):
            assert history[place] == next_id(history[:place])


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowded]:
    root: Path = tmp_path_factory.mktemp("c")
    runner = ScriptedRunner(
        script,
        vocab_size=VOCAB,
        page_size=PAGE,
        num_pages=NUM_PAGES,
        max_slots=4,
        max_context_len=CONTEXT,
    )
    with RunningApp(root, with_engine=False) as app:
        one_tier = TiersConfig(l2_bytes=0)  # what L1 has no room for is gone
        engine = LiveEngine(app.config.engine.run_dir, runner, token_budget=128, tiers=one_tier)
        assert engine.socket_path == app.config.engine.socket_path
        with engine:
            until(lambda: app.services.client.is_ready)
            yield Crowded(app, engine, runner)
        assert engine.error is None


def test_leases_on_twice_the_pool_stop_nobody(crowded: Crowded) -> None:
    sessions = [crowded.app.session(instructions=f"Session {n}.") for n in range(14)]
    leased = 0
    for session_id in sessions:
        crowded.turn(session_id)
        path = f"/v1/sessions/{session_id}/leases"
        lease = crowded.app.post(path, {"ttl": "10m"}).json()
        leased += lease["tokens_granted"]
    wanted = sum(len(crowded.tokens(session_id)) for session_id in sessions)
    assert wanted > 2 * POOL and 0 < leased <= POOL / 2
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        turns = list(pool.map(crowded.turn, sessions))
    for session_id, turn in zip(sessions, turns, strict=True):
        assert turn["status"] in ("completed", "incomplete")
        crowded.check_said(session_id, turn)
    crowded.settle()
    for session_id in sessions:
        crowded.app.http.delete(f"/v1/sessions/{session_id}")
    stats = crowded.settle()
    assert stats["leases"] == 0, stats


def test_a_session_that_lost_its_kv_says_what_it_would_have_said(crowded: Crowded) -> None:
    session_id = crowded.app.session()
    crowded.turn(session_id)
    for number in range(10):
        crowded.turn(crowded.app.session(instructions=f"Crowd {number}."))
    turn = crowded.turn(session_id)
    assert turn["cache"]["miss"]["reason"] == "evicted"
    crowded.check_said(session_id, turn)
    assert crowded.turn(session_id)["cache"]["miss"] is None


def test_clients_that_never_close_leave_the_memory_as_it_is(crowded: Crowded) -> None:
    rng = random.Random(1)
    sessions = [crowded.app.session(instructions=f"Open {n}.") for n in range(20)]
    hot = sessions[:5]
    for _ in range(30):
        session_id = rng.choice(hot if rng.random() < 0.6 else sessions)
        if len(crowded.tokens(session_id)) < CONTEXT - 200:
            assert crowded.turn(session_id)["status"] in ("completed", "incomplete")
    crowded.settle()
    assert not crowded.app.services.client._streams
    assert crowded.app.asgi.state.context.turns.num_running == 0


def test_an_input_past_the_context_touches_no_kv(crowded: Crowded) -> None:
    session_id = crowded.app.session()
    crowded.turn(session_id)
    before = crowded.tokens(session_id)
    for verb, body in (
        ("turns", {"input": TEXT * 6}),
        ("items", {"items": [{"role": "user", "content": TEXT * 6}]}),
    ):
        reply = crowded.app.post(f"/v1/sessions/{session_id}/{verb}", body)
        assert crowded.app.error(reply)[:2] == (400, "context_length_exceeded")
    assert crowded.tokens(session_id) == before
    turn = crowded.turn(session_id)
    assert turn["cache"]["miss"] is None, turn["cache"]


@pytest.mark.parametrize("until", ["turn.created", "turn.cache", "response.output_text.delta"])
def test_a_session_closed_in_any_state_of_a_turn_gives_everything_back(
    crowded: Crowded, until: str
) -> None:
    crowded.runner.step_s = 0.02
    try:
        session_id = crowded.app.session()
        body = {"input": TEXT, "stream": True, "ignore_eos": True, "max_output_tokens": 100}
        path = f"/v1/sessions/{session_id}"
        with crowded.app.http.stream("POST", f"{path}/turns", json=body) as reply:
            events = sse_events(reply)
            next(event for event in events if event["type"] == until)
            with httpx.Client(base_url=crowded.app.url, timeout=30) as http:
                assert http.delete(path).json()["deleted"]
                assert http.delete(path).json()["deleted"]
            list(events)
        assert crowded.app.get(path).status_code == 404
    finally:
        crowded.runner.step_s = 0.0
    crowded.settle()


def test_no_sampling_option_breaks_the_accounting(crowded: Crowded) -> None:
    rng = random.Random(2)
    options: dict[str, list[object]] = {
        "temperature": [0.0, 0.7, 2.0],
        "top_p": [0.1, 1.0],
        "top_k": [0, 1, 40],
        "min_p": [0.0, 0.3],
        "repetition_penalty": [1.0, 1.3],
        "presence_penalty": [0.0, 1.0],
        "frequency_penalty": [0.0, -1.0],
        "seed": [None, 7],
        "stop": [None, ["a", "zz"]],
        "ignore_eos": [False, True],
        "max_output_tokens": [1, 3, 6],
        "store_partial": [True, False],
        "deadline_ms": [None, 1, 5000],
    }
    sessions = [crowded.app.session(instructions=f"Fuzz {n}.") for n in range(6)]
    for _ in range(24):
        session_id = rng.choice(sessions)
        if len(crowded.tokens(session_id)) > CONTEXT - 150:
            continue
        chosen = {name: rng.choice(values) for name, values in options.items()}
        fields = {name: value for name, value in chosen.items() if value is not None}
        turn = crowded.turn(session_id, "a short one", **fields)
        session = crowded.app.get(f"/v1/sessions/{session_id}").json()
        assert session["num_tokens"] == len(crowded.tokens(session_id))
        assert turn["revision"] == session["revision"]
    crowded.settle()


def test_forks_that_start_cold_compute_their_shared_prefix_once(crowded: Crowded) -> None:
    parent = crowded.app.session(instructions="A shared start. " + TEXT)
    crowded.turn(parent)
    shared = len(crowded.tokens(parent))
    for number in range(10):  # its KV goes
        crowded.turn(crowded.app.session(instructions=f"Flood {number}."))
    reply = crowded.app.post(f"/v1/sessions/{parent}/fork", {"n": 8}).json()
    children = [child["id"] for child in reply["data"]]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        turns = list(pool.map(lambda c: crowded.turn(c[1], f"Part {c[0]}"), enumerate(children)))
    computed = sum(turn["cache"]["computed"] for turn in turns)
    new = sum(len(crowded.tokens(c)) - shared for c in children)
    assert computed < shared + new + 8 * PAGE, (computed, shared, new)
    for child, turn in zip(children, turns, strict=True):
        crowded.check_said(child, turn)
    crowded.settle()


def test_three_times_the_pool_still_reuses_what_it_can(crowded: Crowded) -> None:
    sessions = [crowded.app.session(instructions=f"Third {n}.") for n in range(16)]
    for session_id in sessions:
        crowded.turn(session_id)
    wanted = sum(len(crowded.tokens(session_id)) for session_id in sessions)
    assert wanted > 2 * POOL
    rng = random.Random(3)
    order = [rng.choice(sessions) for _ in range(20)]
    turns = [crowded.turn(session_id, "More.") for session_id in order]
    found = sum(sum(turn["x_cache"].values()) for turn in turns)
    # Sessions that come back in any order find about the share of the pool: no collapse.
    asked = sum(turn["usage"]["input_tokens"] for turn in turns)
    assert found > asked / 5, (found, asked)
    crowded.settle()


def test_default_assets_are_the_vocabulary_the_script_speaks() -> None:
    assert default_assets().vocab_size == VOCAB and default_assets().eos_ids[0] == EOS
