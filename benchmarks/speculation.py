# SPDX-License-Identifier: Apache-2.0
"""What drafts from a request's own tokens are worth: the real model with and without them.

Each workload is run with `engine.speculation` none and ngram, in turns, greedy or with a seed; the
tokens must be the same. Clients run in a process of their own. One JSON line a workload and
streams; run it alone on the machine:

    python -m benchmarks.speculation --tokens 200 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from engine import api
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.process import set_thread_environment
from engine.transport import EngineSocket, pack_ids, unpack_ids

SOURCE = Path(__file__).parents[1] / "engine" / "sampling" / "penalties.py"
MODES = ("none", "ngram")


def _texts() -> dict[str, tuple[str, float]]:
    """By workload: the prompt and the temperature."""
    code = SOURCE.read_text()[1100:3400]
    again = code[: len(code) // 6]
    return {
        # An agent writes a file it has read, one name changed.
        "edit": (
            f"<|im_start|>user\nRewrite this file:\n{code}<|im_end|>\n"
            f"<|im_start|>assistant\n{code}\nOnce more:\n{again}",
            0.0,
        ),
        "prose": (
            "<|im_start|>user\nTell a story of a lighthouse and the sea.<|im_end|>\n"
            "<|im_start|>assistant\n",
            0.0,
        ),
        # Much is like what was said, little is the same: the worst for drafts.
        "hot code": (f"<|im_start|>assistant\n{code}\n", 1.0),
    }


async def _drive(
    socket_path: str, prompt: list[int], streams: int, tokens: int, temperature: float
) -> dict[str, Any]:
    client = EngineClient(socket_path)
    await client.start()
    await client.wait_ready(120)

    async def one(name: str, num: int) -> tuple[list[int], float, float]:
        request = api.GenerateRequest(
            request_id=name,
            token_ids=pack_ids(prompt),
            sampling=api.SamplingParams(
                max_new_tokens=num, temperature=temperature, seed=7, ignore_eos=True
            ),
        )
        ids: list[int] = []
        first_s = last_s = 0.0
        async for item in client.generate(request):
            if isinstance(item, api.Tokens):
                last_s = time.perf_counter()
                first_s = first_s or last_s
                ids += unpack_ids(item.token_ids).tolist()
        return ids, first_s, last_s

    await one("warm", 8)
    before = await client.stats()
    answers = await asyncio.gather(*(one(f"r{i}", tokens) for i in range(streams)))
    after = await client.stats()
    await client.close()
    rates = [(len(ids) - 1) / (last - first) for ids, first, last in answers]
    names = ("draft_tokens", "draft_tokens_accepted", "steps")
    return {
        "ids": answers[0][0],
        "tokens_per_s": sum(rates),
        **{name: after[name] - before[name] for name in names},
    }


def _client(out: Any, *arguments: Any) -> None:
    out.send(asyncio.run(_drive(*arguments)))


def _measure(
    parts: Any, mode: str, prompt: list[int], streams: int, tokens: int, temperature: float
) -> dict[str, Any]:
    from engine.grammar.compiler import GrammarCompiler
    from engine.loop.server import EngineServer, WakeSignal

    runner, vocabulary, config = parts
    with tempfile.TemporaryDirectory() as run_dir:
        config = EngineConfig(
            run_dir=run_dir, speculation=mode, max_slots=config.max_slots, model=config.model
        )
        wake = WakeSignal()
        compiler = GrammarCompiler(
            vocabulary.token_bytes, vocabulary.eos_ids, runner.vocab_size, config.grammar, wake.set
        )
        socket = EngineSocket(config.socket_path)
        server = EngineServer(config, runner, compiler, vocabulary, socket, wake)
        receive, send = multiprocessing.Pipe(duplex=False)
        arguments = (send, config.socket_path, prompt, streams, tokens, temperature)
        client = multiprocessing.get_context("spawn").Process(target=_client, args=arguments)
        client.start()
        result: dict[str, Any] = {}

        def wait() -> None:
            result.update(receive.recv())
            server.stop(0.0)

        waiter = threading.Thread(target=wait)
        waiter.start()
        server.run()
        waiter.join()
        client.join()
    return result


def _load(config: EngineConfig) -> tuple[Any, Any, Any]:
    from engine.execution.model_runner import build_model_runner
    from engine.loop.server import Vocabulary
    from engine.text.assets import load_text_assets

    assets = load_text_assets(config.model)
    spelled = tuple(assets.tokenizer.all_token_bytes())
    vocabulary = Vocabulary(token_bytes=spelled, eos_ids=(2,), control_ids=(0, 1, 2))
    return build_model_runner(config), vocabulary, assets.tokenizer


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--workloads", nargs="+", default=list(_texts()), choices=list(_texts()))
    arguments = parser.parse_args()
    config = EngineConfig(speculation="ngram", kv_pool_tokens=32768, max_slots=8)
    set_thread_environment(config)
    runner, vocabulary, tokenizer = _load(config)
    for workload in arguments.workloads:
        text, temperature = _texts()[workload]
        prompt = tokenizer.encode_with_control(text)
        for streams in arguments.streams:
            found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
            for _ in range(arguments.rounds):
                for mode in MODES:
                    parts = (runner, vocabulary, config)
                    one = _measure(parts, mode, prompt, streams, arguments.tokens, temperature)
                    found[mode].append(one)
            first = found["none"][0]["ids"]
            rates = {
                mode: statistics.median(r["tokens_per_s"] for r in found[mode]) for mode in MODES
            }
            drafted = found["ngram"][-1]
            line = {
                "bench": "speculation",
                "workload": workload,
                "prompt_tokens": len(prompt),
                "streams": streams,
                "same_tokens": all(r["ids"] == first for mode in MODES for r in found[mode]),
                **{f"{mode}_tokens_per_s": round(rate, 1) for mode, rate in rates.items()},
                "speedup": round(rates["ngram"] / rates["none"], 2),
                "draft_tokens": drafted["draft_tokens"],
                "draft_tokens_accepted": drafted["draft_tokens_accepted"],
                "steps": drafted["steps"],
            }
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
