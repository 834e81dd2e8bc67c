# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs beside the model: the loop's own time, and the sampler's.

The runner is empty (it hands out prepared logits), so everything measured is overhead: planning,
building, sampling, committing, sending. Clients run in a process of their own. Prints one JSON
line; run it alone on the machine:

    python -m benchmarks.engine_loop --rows 4 --tokens 500
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import threading
import time

from engine import api
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.process import set_thread_environment
from engine.transport import EngineSocket, pack_ids

WARM_UP_TOKENS = 100
JSON_GRAMMAR = api.GrammarSpec(
    kind=api.GrammarKind.JSON_SCHEMA, text='{"type": "array", "items": {"type": "string"}}'
)
MODES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1},
    "grammar": {"temperature": 0.0},
}


async def _drive(socket_path: str, mode: str, rows: int, tokens: int) -> dict[str, float]:
    client = EngineClient(socket_path)
    await client.start()
    await client.wait_ready(60)
    if mode == "grammar":
        await client.compile(JSON_GRAMMAR)

    async def one(name: str, num: int) -> None:
        request = api.GenerateRequest(
            request_id=name,
            token_ids=pack_ids([100 + len(name), 101, 102]),
            sampling=api.SamplingParams(
                max_new_tokens=num,
                ignore_eos=mode != "grammar",
                min_new_tokens=num if mode == "grammar" else 0,
                **MODES[mode],  # type: ignore[arg-type]
            ),
            grammar=JSON_GRAMMAR if mode == "grammar" else None,
        )
        async for item in client.generate(request):
            if isinstance(item, api.Finished) and item.error_code is not None:
                raise RuntimeError(item.error_message)

    await asyncio.gather(*(one(f"warm{i}", WARM_UP_TOKENS) for i in range(rows)))
    before = await client.stats()
    start = time.perf_counter()
    await asyncio.gather(*(one(f"{mode}-{i}", tokens) for i in range(rows)))
    wall_s = time.perf_counter() - start
    after = await client.stats()
    await client.close()
    steps = after["steps"] - before["steps"]
    names = ("host_ms_total", "sample_ms_total", "mask_wait_ms_total", "forward_ms_total")
    result = {name.removesuffix("_total"): (after[name] - before[name]) / steps for name in names}
    return {"steps": steps, **result, "wall_ms": wall_s * 1e3 / steps}


def _client_process(socket_path: str, mode: str, rows: int, tokens: int, out: object) -> None:
    result = asyncio.run(_drive(socket_path, mode, rows, tokens))
    out.send(result)  # type: ignore[attr-defined]


def _measure(mode: str, rows: int, tokens: int, vocab_size: int) -> dict[str, float]:
    from benchmarks.empty_runner import EmptyRunner
    from engine.grammar.compiler import GrammarCompiler
    from engine.loop.server import EngineServer, Vocabulary, WakeSignal

    token_bytes = (b"", b"", b"") + tuple(
        bytes([32 + i % 90]) + (b"%d" % i if i > 93 else b"") for i in range(3, vocab_size)
    )
    vocabulary = Vocabulary(token_bytes=token_bytes, eos_ids=(2,), control_ids=(0, 1, 2))
    with tempfile.TemporaryDirectory() as run_dir:
        config = EngineConfig(run_dir=run_dir, max_slots=max(rows, 1))
        wake = WakeSignal()
        compiler = GrammarCompiler(token_bytes, (2,), vocab_size, config.grammar, wake.set)
        compiler.wait_warm()
        runner = EmptyRunner(vocab_size=vocab_size, max_slots=max(rows, 1))
        socket = EngineSocket(config.socket_path)
        server = EngineServer(config, runner, compiler, vocabulary, socket, wake)
        receive, send = multiprocessing.Pipe(duplex=False)
        client = multiprocessing.get_context("spawn").Process(
            target=_client_process, args=(config.socket_path, mode, rows, tokens, send)
        )
        client.start()
        result: dict[str, float] = {}

        def wait() -> None:
            result.update(receive.recv())
            server.stop(0.0)

        waiter = threading.Thread(target=wait)
        waiter.start()
        server.run()
        waiter.join()
        client.join()
    return result


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    arguments = parser.parse_args()
    set_thread_environment(EngineConfig())
    for mode in arguments.modes:
        result = _measure(mode, arguments.rows, arguments.tokens, arguments.vocab_size)
        line = {"bench": "engine_loop", "mode": mode, "rows": arguments.rows}
        rounded = {name: round(value, 3) for name, value in result.items()}
        print(json.dumps({**line, **rounded}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
