# SPDX-License-Identifier: Apache-2.0
"""The loop around a scripted runner: same tokens as a plain loop, and nobody harms anybody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq

from engine import api
from engine.client import EngineClient
from engine.config import TiersConfig
from engine.loop.server import WakeSignal
from engine.sampling.params import RowSampling, uniform
from engine.sampling.sampler import draw
from engine.transport import decode_outputs, encode_input, endpoint, pack_ids
from tests.fakes.late_runner import HarshRunner
from tests.fakes.live_engine import EOS, Collected, LiveEngine, make_request, run, serve
from tests.fakes.scripted_runner import ScriptedRunner, expected_tokens, hashed_script

VOCAB = 64
CONTROL = (0, 1)  # and EOS, which is a stop id


def make_runner(**extra: object) -> ScriptedRunner:
    return ScriptedRunner(hashed_script(VOCAB), vocab_size=VOCAB, **extra)  # type: ignore[arg-type]


def prompt_of(seed: int, length: int) -> list[int]:
    return [3 + (seed * 31 + 7 * i) % (VOCAB - 3) for i in range(length)]


def test_overlapped_steps_give_the_tokens_of_a_plain_loop(tmp_path: Path) -> None:
    runner = make_runner()

    async def work(client: EngineClient) -> None:
        prompts = [prompt_of(i, 1 + 5 * i) for i in range(12)]
        results = await asyncio.gather(
            *(run(client, make_request(f"r{i}", p, 3 + 2 * i)) for i, p in enumerate(prompts))
        )
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            want = expected_tokens(
                hashed_script(VOCAB), prompt, 3 + 2 * i, stop_ids=[EOS], banned_ids=CONTROL
            )
            assert result.ids == want
            assert result.finished is not None
            assert result.finished.num_output_tokens == len(want)
            is_stop = want[-1] == EOS
            assert result.finished.reason == ("stop" if is_stop else "length")

    serve(LiveEngine(str(tmp_path), runner), work)
    assert max(runner.row_counts) == 4, "requests ran in one batch"


def test_a_later_turn_finds_its_whole_history_cached_but_the_last_token(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        prompt = prompt_of(3, 21)
        first = await run(client, make_request("one", prompt, 9))
        assert first.started is not None and first.started.cache.l1 == 0
        assert first.finished is not None
        history = prompt + first.ids
        assert first.finished.num_cached_tokens == len(history) - 1
        assert len(first.finished.page_hashes) == 16 * ((len(history) - 1) // 4)
        later = [*history, 5, 6, 7]
        second = await run(client, make_request("two", later, 9))
        assert second.started is not None
        assert second.started.cache == api.CacheHit(l1=len(history) - 1, to_compute=4)
        want = expected_tokens(hashed_script(VOCAB), later, 9, stop_ids=[EOS], banned_ids=CONTROL)
        assert second.ids == want

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_a_stop_id_ends_the_request_and_is_part_of_its_output(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        prompt = prompt_of(5, 6)
        free = expected_tokens(hashed_script(VOCAB), prompt, 12, banned_ids=(*CONTROL, EOS))
        stop_id = free[5]
        place = free.index(stop_id)
        sampling = {"stop_token_ids": (stop_id,), "ignore_eos": True}
        result = await run(client, make_request("stop", prompt, 12, sampling=sampling))
        assert result.ids == free[: place + 1]
        assert result.finished is not None
        assert result.finished.reason is api.FinishReason.STOP
        assert result.finished.stop_token_id == stop_id

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_min_new_tokens_keeps_stop_ids_away_for_so_long(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        prompt = prompt_of(5, 6)
        everything = tuple(range(3, 40))
        short = await run(
            client, make_request("a", prompt, 12, sampling={"stop_token_ids": everything})
        )
        longer = await run(
            client,
            make_request(
                "b", prompt, 12, sampling={"stop_token_ids": everything, "min_new_tokens": 7}
            ),
        )
        assert len(short.ids) < 7 < len(longer.ids) <= 12
        assert not set(longer.ids[:7]) & {*everything, EOS}

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_a_long_prefill_reports_progress_and_lets_others_decode(tmp_path: Path) -> None:
    runner = make_runner()
    runner.hold_at = 3

    async def work(client: EngineClient) -> None:
        short = asyncio.create_task(run(client, make_request("short", prompt_of(1, 3), 40)))
        while not runner.is_held:
            await asyncio.sleep(0.001)
        long = asyncio.create_task(run(client, make_request("long", prompt_of(2, 80), 3)))
        while (await client.stats())["requests_received"] < 2:
            await asyncio.sleep(0.001)
        runner.gate.set()
        result = await long
        await short
        assert result.progress, "a prompt of several chunks says how far it is"
        assert result.progress == sorted(result.progress)
        want = expected_tokens(hashed_script(VOCAB), prompt_of(2, 80), 3, banned_ids=CONTROL)
        assert result.ids == want

    serve(LiveEngine(str(tmp_path), runner), work)
    assert 2 in runner.row_counts, "prefill chunks and decode rows shared steps"


@pytest.mark.parametrize(
    ("when", "num_steps", "num_tokens"), [("queued", 0, 0), ("prefill", 2, 0), ("decode", 5, 5)]
)
def test_an_abort_gives_all_pages_back_within_the_steps_under_way(
    tmp_path: Path, when: str, num_steps: int, num_tokens: int
) -> None:
    runner = make_runner(max_slots=1)
    runner.hold_at = num_steps

    async def work(client: EngineClient) -> None:
        sampling = {"ignore_eos": True}
        if when == "queued":
            first = make_request("first", prompt_of(9, 4), 3, sampling=sampling)
            blocker = asyncio.create_task(run(client, first))
        prompt_len = 100 if when == "prefill" else 10
        request = make_request("gone", prompt_of(4, prompt_len), 28, sampling=sampling)
        task = asyncio.create_task(run(client, request))
        while not runner.is_held:
            await asyncio.sleep(0.001)
        await client.abort("gone")
        await client.stats()  # the engine has read the abort
        runner.gate.set()
        result = await task
        assert result.finished is not None
        assert result.finished.reason is api.FinishReason.ABORTED
        assert result.finished.num_output_tokens == len(result.ids)
        assert num_tokens - 1 <= len(result.ids) <= num_tokens
        assert runner.num_steps <= num_steps + 2, "only the steps under way ran on"
        if when == "queued":
            await blocker
        stats = await client.stats()
        assert stats["owned_pages"] == 0, "no page is held by a request"
        assert stats["free_pages"] + stats["cached_pages"] == stats["num_pages"]
        assert stats["running"] == stats["waiting"] == stats["requests_live"] == 0

    serve(LiveEngine(str(tmp_path), runner, max_slots=1), work)


def test_requests_beyond_the_memory_wait_and_still_get_their_own_tokens(tmp_path: Path) -> None:
    runner = make_runner(num_pages=24)  # 96 tokens; each request below needs up to 45

    async def work(client: EngineClient) -> None:
        prompts = [prompt_of(i, 20) for i in range(6)]
        sampling = {"ignore_eos": True}
        results = await asyncio.gather(
            *(
                run(client, make_request(f"r{i}", p, 25, sampling=sampling))
                for i, p in enumerate(prompts)
            )
        )
        for prompt, result in zip(prompts, results, strict=True):
            banned = (*CONTROL, EOS)
            assert result.ids == expected_tokens(
                hashed_script(VOCAB), prompt, 25, banned_ids=banned
            )

    serve(LiveEngine(str(tmp_path), runner), work)


def test_seeds_give_the_same_tokens_alone_and_in_company(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        def request(name: str, seed: int) -> api.GenerateRequest:
            sampling = {"temperature": 1.3, "seed": seed, "top_p": 0.95, "ignore_eos": True}
            return make_request(name, prompt_of(seed, 9), 15, sampling=sampling)

        alone = [(await run(client, request(f"alone{i}", i))).ids for i in range(4)]
        together = await asyncio.gather(*(run(client, request(f"both{i}", i)) for i in range(4)))
        assert [result.ids for result in together] == alone

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_a_draw_is_what_seed_and_output_position_make_it(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        prompt = prompt_of(2, 9)
        sampling = {"temperature": 1.1, "seed": 12345, "ignore_eos": True}
        result = await run(client, make_request("drawn", prompt, 10, sampling=sampling))
        row = RowSampling(temperature=1.1)
        history = list(prompt)
        for position in range(10):
            values = hashed_script(VOCAB)(history).numpy()
            values[[*CONTROL, EOS]] = -np.inf
            chance = uniform(12345, position)
            history.append(draw(values, float(values.max()), row, chance))
        assert result.ids == history[len(prompt) :]

    serve(LiveEngine(str(tmp_path), make_runner()), work)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resumed_output_is_continued_as_if_nothing_had_happened(
    tmp_path: Path, temperature: float
) -> None:
    async def work(client: EngineClient) -> None:
        sampling = {
            "temperature": temperature,
            "seed": 77,
            "ignore_eos": True,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.3,
            "repetition_penalty": 1.2,
        }
        prompt = prompt_of(8, 10)
        whole = await run(client, make_request("whole", prompt, 20, sampling=sampling))
        assert len(whole.ids) == 20
        for cut in (1, 7, 19):
            request = make_request(
                f"cut{cut}",
                prompt,
                20,
                sampling=sampling,
                resume_token_ids=pack_ids(whole.ids[:cut]),
            )
            rest = await run(client, request)
            assert rest.ids == whole.ids[cut:]
            assert rest.finished is not None
            assert rest.finished.num_output_tokens == 20

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_output_that_was_complete_before_the_restart_just_finishes(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        prompt = prompt_of(8, 10)
        full = make_request("full", prompt, 3, resume_token_ids=pack_ids([5, 6, 7]))
        result = await run(client, full)
        assert (result.ids, result.finished and result.finished.reason) == ([], "length")
        stopped = make_request("stopped", prompt, 9, resume_token_ids=pack_ids([5, EOS]))
        result = await run(client, stopped)
        assert result.finished is not None
        assert (result.finished.reason, result.finished.stop_token_id) == ("stop", EOS)
        assert result.finished.num_output_tokens == 2

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_logprobs_come_with_their_tokens_and_survive_an_attach(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        prompt = prompt_of(6, 5)
        sampling = {"num_logprobs": 3, "ignore_eos": True}
        result = await run(client, make_request("lp", prompt, 6, sampling=sampling))
        assert len(result.logprobs) == 6
        history = list(prompt)
        for token_id, logprob in zip(result.ids, result.logprobs, strict=True):
            model = hashed_script(VOCAB)(history).log_softmax(-1)
            assert logprob.logprob == pytest.approx(float(model[token_id]), abs=1e-5)
            assert list(logprob.top_ids) == model.topk(3).indices.tolist()
            history.append(token_id)
        again = await asyncio.wait_for(Collected().read(client.attach("lp", 2)), 10)
        assert (again.ids, again.logprobs) == (result.ids[2:], result.logprobs[2:])

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_nan_logits_fail_their_request_alone_and_their_step_enters_no_cache(tmp_path: Path) -> None:
    script = hashed_script(VOCAB)
    poison = prompt_of(50, 9)

    def poisoned(history: list[int]) -> object:
        logits = script(history)
        if list(history[:9]) == poison and len(history) >= 11:
            logits[30] = float("nan")
        return logits

    runner = ScriptedRunner(poisoned, vocab_size=VOCAB)  # type: ignore[arg-type]

    async def work(client: EngineClient) -> None:
        healthy = prompt_of(1, 9)
        sampling = {"ignore_eos": True}
        bad, good = await asyncio.gather(
            run(client, make_request("bad", poison, 12, sampling=sampling)),
            run(client, make_request("good", healthy, 12, sampling=sampling)),
        )
        assert bad.finished is not None
        assert (bad.finished.reason, bad.finished.error_code) == ("error", "invalid_logits")
        assert len(bad.ids) == 2
        assert good.ids == expected_tokens(script, healthy, 12, banned_ids=(*CONTROL, EOS))
        # Two pages were full before the bad step; what followed them is nowhere.
        assert (await client.query_prefix(poison + bad.ids)).l1 == 8
        assert (await client.query_prefix(healthy)).l1 == len(healthy)

    serve(LiveEngine(str(tmp_path), runner), work)


def test_a_step_that_raises_fails_its_rows_and_the_next_ones_run(tmp_path: Path) -> None:
    runner = make_runner()
    runner.failing_steps = {3}

    async def work(client: EngineClient) -> None:
        result = await run(client, make_request("hit", prompt_of(1, 4), 10))
        assert result.finished is not None
        assert result.finished.error_code == "step_failed"
        assert "told to fail" in str(result.finished.error_message)
        again = await run(client, make_request("again", prompt_of(1, 4), 10))
        want = expected_tokens(
            hashed_script(VOCAB), prompt_of(1, 4), 10, stop_ids=[EOS], banned_ids=CONTROL
        )
        assert again.ids == want

    serve(LiveEngine(str(tmp_path), runner), work)


@pytest.mark.parametrize("how", ["the step raises", "its logits are NaN"])
def test_what_fails_under_an_aborted_request_enters_no_cache(tmp_path: Path, how: str) -> None:
    """What an aborted request still computed is kept, but not what went wrong meanwhile."""
    script, prompt = hashed_script(VOCAB), prompt_of(1, 9)
    is_bad = [True]

    def poisoned(history: Sequence[int]) -> torch.Tensor:
        logits = script(history)
        return logits * torch.nan if is_bad[0] and "NaN" in how else logits

    runner = HarshRunner(poisoned, vocab_size=VOCAB, delay_s=lambda: 0.0, drafts=False)
    runner.hold_at = 0
    runner.bad_steps = {1} if "raises" in how else set()

    async def work(client: EngineClient) -> None:
        task = asyncio.create_task(run(client, make_request("gone", prompt, 10)))
        while not runner.is_held:
            await asyncio.sleep(0.001)
        await client.abort("gone")
        await client.stats()  # it is aborted by now
        runner.gate.set()
        result = await task
        assert result.finished is not None and result.finished.reason == "aborted"
        assert (await client.query_prefix(prompt)).l1 == 0
        is_bad[0] = False
        again = await run(client, make_request("again", prompt, 10))
        assert again.ids == expected_tokens(script, prompt, 10, stop_ids=[EOS], banned_ids=CONTROL)

    serve(LiveEngine(str(tmp_path), runner), work)


def test_many_clients_get_their_own_tokens(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        clients = [EngineClient(client._socket_path) for _ in range(12)]
        for each in clients:
            await each.start()
        results = await asyncio.gather(
            *(
                run(each, make_request(f"c{i}-{j}", prompt_of(i * 5 + j, 5 + i), 10))
                for i, each in enumerate(clients)
                for j in range(3)
            )
        )
        for place, result in enumerate(results):
            i, j = divmod(place, 3)
            want = expected_tokens(
                hashed_script(VOCAB),
                prompt_of(i * 5 + j, 5 + i),
                10,
                stop_ids=[EOS],
                banned_ids=CONTROL,
            )
            assert result.ids == want
        for each in clients:
            await each.close()

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_two_requests_with_one_id_are_one_request(tmp_path: Path) -> None:
    runner = make_runner(step_s=0.002)

    async def work(client: EngineClient) -> None:
        other = EngineClient(client._socket_path)
        await other.start()
        request = make_request("same", prompt_of(1, 4), 30, sampling={"ignore_eos": True})
        first, second = await asyncio.gather(run(client, request), run(other, request))
        assert first.ids == second.ids and len(first.ids) == 30
        assert (await client.stats())["requests_received"] == 1
        await other.close()

    serve(LiveEngine(str(tmp_path), runner), work)


def test_ended_output_is_kept_within_its_bytes_oldest_first(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        for name in ("old", "new"):
            await run(client, make_request(name, prompt_of(1, 30), 8))
        gone = await asyncio.wait_for(Collected().read(client.attach("old")), 10)
        assert gone.finished is not None and gone.finished.error_code == "unknown_request"
        kept = await asyncio.wait_for(Collected().read(client.attach("new")), 10)
        assert len(kept.ids) > 0

    serve(LiveEngine(str(tmp_path), make_runner(), keep_outputs_bytes=200), work)


def test_a_full_queue_refuses_the_next_request_only(tmp_path: Path) -> None:
    runner = make_runner()
    runner.gate.clear()

    async def work(client: EngineClient) -> None:
        tasks = [
            asyncio.create_task(run(client, make_request(f"r{i}", prompt_of(i, 4), 4)))
            for i in range(3)
        ]
        await client.stats()
        refused = await run(client, make_request("one too many", prompt_of(9, 4), 4))
        assert refused.finished is not None and refused.finished.error_code == "queue_full"
        runner.gate.set()
        for task in tasks:
            result = await task
            assert result.finished is not None and result.finished.error_code is None

    serve(LiveEngine(str(tmp_path), runner, max_waiting=3), work)


def test_the_loop_answers_while_a_step_takes_long(tmp_path: Path) -> None:
    runner = make_runner()
    runner.gate.clear()

    async def work(client: EngineClient) -> None:
        task = asyncio.create_task(run(client, make_request("held", prompt_of(1, 4), 4)))
        while not runner.is_held:
            await asyncio.sleep(0.001)
        stats = await client.stats()
        assert stats["steps"] >= 1 and stats["output_tokens"] == 0
        runner.gate.set()
        await task

    serve(LiveEngine(str(tmp_path), runner), work)


def test_malformed_messages_cost_their_sender_an_answer_and_nobody_anything(
    tmp_path: Path,
) -> None:
    async def work(client: EngineClient) -> None:
        context = zmq.Context()
        rogue = context.socket(zmq.DEALER)
        rogue.setsockopt(zmq.LINGER, 0)
        rogue.connect(endpoint(client._socket_path))
        for parts in (
            [b""],
            [b"\xc1garbage"],
            [b"\x81" * 100_000],
            [b"\x91" * 100_000 + b"\xc0"],
            [b"two", b"parts"],
            [b"", b"", b""],
            [msgspec.msgpack.encode({"type": "no such thing"})],
            [msgspec.msgpack.encode({"type": "ping", "sent_ms": "soon"})],
            [msgspec.msgpack.encode(["generate"])],
            [msgspec.msgpack.encode({"type": "query_prefix", "query_id": "q", "token_ids": b"1"})],
            [
                msgspec.msgpack.encode(
                    {"type": "query_tree", "query_id": "q", "max_nodes": -(2**62)}
                )
            ],
            [msgspec.msgpack.encode({"type": "drop_prefix", "token_ids": b"12345"})],
            [
                msgspec.msgpack.encode(
                    {"type": "drop_prefix", "token_ids": pack_ids([-1, 2**31 - 1])}
                )
            ],
            [msgspec.msgpack.encode({"type": "attach", "request_id": "x" * 100_000})],
        ):
            rogue.send_multipart(parts)
        wrong = msgspec.to_builtins(make_request("typed", [5, 6, 7]), builtin_types=(bytes,))
        wrong["sampling"]["max_new_tokens"] = "many"
        rogue.send(msgspec.msgpack.encode(wrong))
        rogue.send(encode_input(api.Ping(sent_ms=1)))
        answers = []
        while not answers or not isinstance(answers[-1], api.Pong):
            assert rogue.poll(20_000), "the engine answers"
            answers += decode_outputs(rogue.recv())
        refusals = [a for a in answers if isinstance(a, api.Finished)]
        typed = next(a for a in refusals if a.request_id == "typed")
        assert typed.error_code == "invalid_request"
        assert "$.sampling.max_new_tokens" in str(typed.error_message)
        context.destroy(linger=0)
        result = await run(client, make_request("fine", prompt_of(1, 4), 4))
        assert result.finished is not None and result.finished.error_code is None

    serve(LiveEngine(str(tmp_path), make_runner()), work)


@pytest.mark.parametrize("seed", range(3))
def test_frames_with_random_damage_do_not_end_the_engine(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    grammar = api.GrammarSpec(kind=api.GrammarKind.REGEX, text="a+")
    sound: list[api.EngineInput] = [
        make_request("g", [5, 6, 7], 5, sampling={"logit_bias": {4: 1.0}, "stop_token_ids": (9,)}),
        make_request("h", [5, 6, 7], 5, grammar=grammar, resume_token_ids=pack_ids([40])),
        api.AbortRequest(request_id="g"),
        api.AttachRequest(request_id="g", from_output=1),
        api.CompileGrammar(compile_id="c", grammar=grammar),
        api.QueryTree(query_id="t"),
        api.QueryPrefix(query_id="p", token_ids=pack_ids([5, 6])),
        api.DropPrefix(token_ids=pack_ids([5, 6]), keep_tokens=1),
        api.SubscribeKvEvents(),
        api.Ping(sent_ms=5),
    ]

    def damaged() -> bytes:
        """A sound message with one field replaced by something else, or with broken bytes."""
        fields = msgspec.msgpack.decode(encode_input(rng.choice(sound)))
        inner = fields.get("sampling") if rng.random() < 0.5 else None
        target = inner if inner else fields
        name = rng.choice(sorted(target))
        odd = [-1, 0, 2**31, 2**40, -(2**63), 2**64 - 1, 0.5, float("nan"), "", "x", b"", b"123"]
        if name != "type" or rng.random() < 0.1:
            target[name] = rng.choice([*odd, None, [], {}, [1], {"a": 1}, {1: 2}, True])
        frame = bytearray(msgspec.msgpack.encode(fields))
        if rng.random() < 0.3:
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        return bytes(frame)

    async def work(client: EngineClient) -> None:
        context = zmq.Context()
        rogue = context.socket(zmq.DEALER)
        rogue.connect(endpoint(client._socket_path))
        for _ in range(1500):
            rogue.send(damaged())
        rogue.send(encode_input(api.Ping(sent_ms=4711)))
        answers: list[api.EngineOutput] = []
        while not any(isinstance(a, api.Pong) and a.sent_ms == 4711 for a in answers):
            assert rogue.poll(10_000), "the engine answers"
            answers += decode_outputs(rogue.recv())
        context.destroy(linger=0)
        result = await run(client, make_request("fine", prompt_of(1, 4), 4))
        assert result.finished is not None and result.finished.error_code is None

    serve(LiveEngine(str(tmp_path), make_runner()), work)


def test_draining_finishes_what_runs_and_leaves_what_comes_to_the_next_engine(
    tmp_path: Path,
) -> None:
    engine = LiveEngine(str(tmp_path), make_runner(step_s=0.002))
    late_request = make_request("late", prompt_of(2, 4), 4)

    async def refused() -> api.Finished:
        """How this engine answers whoever asks it for something new."""
        context = zmq.Context()
        asking = context.socket(zmq.DEALER)
        asking.connect(endpoint(engine.socket_path))
        asking.send(encode_input(msgspec.structs.replace(late_request, request_id="raw")))
        while True:
            assert await asyncio.to_thread(asking.poll, 10_000), "the engine answers"
            for message in decode_outputs(asking.recv()):
                if isinstance(message, api.Finished):
                    context.destroy(linger=0)
                    return message

    async def work(client: EngineClient) -> None:
        stream = client.generate(
            make_request("running", prompt_of(1, 4), 50, sampling={"ignore_eos": True})
        )
        assert isinstance(await anext(stream), api.Started)
        engine.server._desk.drain()  # as `stop` does first
        late = asyncio.create_task(run(client, late_request))
        await asyncio.sleep(0)  # it is sent, and read before what follows
        assert (await refused()).error_code == "engine_draining"
        await asyncio.to_thread(engine.stop, 20.0)
        result = await asyncio.wait_for(Collected().read(stream), 20)
        assert len(result.ids) == 50
        assert not late.done()
        with LiveEngine(str(tmp_path), make_runner()):
            answer = await asyncio.wait_for(late, 20)
            want = await run(client, msgspec.structs.replace(late_request, request_id="again"))
        assert answer.finished is not None and answer.finished.error_code is None
        assert answer.ids == want.ids

    serve(engine, work)


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_an_engine_on_its_way_out_did_not_take_ends_when_it_is_to(
    tmp_path: Path, is_refused: bool
) -> None:
    """At once, not when the drain is over: no engine has it, so there is nobody to be asked."""
    engine = LiveEngine(str(tmp_path), make_runner())

    async def work(client: EngineClient) -> None:
        await client.stats()
        engine.server._desk.drain()
        late = asyncio.create_task(run(client, make_request("late", prompt_of(2, 4), 4)))
        while "late" not in client._streams or is_refused > client._streams["late"].awaits_engine:
            await asyncio.sleep(0)
        await client.abort("late")
        answer = await asyncio.wait_for(late, 20)
        assert answer.finished is not None and answer.ids == []
        assert answer.finished.reason is api.FinishReason.ABORTED
        assert (await client.stats())["requests_live"] == 0, "the engine is still there"

    serve(engine, work)


def test_cache_questions_and_kv_events_tell_what_the_tree_holds(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> None:
        events: list[api.KvEvent] = []

        async def watch() -> None:
            async for batch in client.kv_events():
                events.extend(batch.events)

        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0)
        prompt = prompt_of(1, 16)
        result = await run(client, make_request("a", prompt, 5, sampling={"ignore_eos": True}))
        held = prompt + result.ids[:-1]
        hit = await client.query_prefix(held)
        assert (hit.l1, hit.to_compute) == (20, 0)
        assert (await client.query_prefix(held, salt="other")).l1 == 0
        tree = await client.tree()
        assert sum(node.num_tokens for node in tree.nodes) == 20
        assert not tree.truncated
        assert result.finished is not None
        hashes = result.finished.page_hashes
        stored = [event.page_hash for event in events if event.kind == "stored"]
        assert stored == [hashes[i : i + 16] for i in range(0, len(hashes), 16)]
        await client.drop_prefix(held, 8)
        assert (await client.query_prefix(held)).l1 == 8
        assert [e.kind for e in events[len(stored) :]] == ["removed"] * 3
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)

    serve(LiveEngine(str(tmp_path), make_runner(), tiers=TiersConfig(l2_bytes=0)), work)


def test_a_worker_that_outlives_the_engine_wakes_nobody() -> None:
    wake = WakeSignal()
    wake.set()
    wake.clear()
    wake.close()
    wake.set()
