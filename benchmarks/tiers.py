# SPDX-License-Identifier: Apache-2.0
"""What the KV tiers are worth and what they cost, through a real appliance. Run it alone.

    resume        a session goes on after kill -9 of everything, from the file store, and the same
                  without a store: first-token times, and their quotient (bar: 5)
    oversubscribe sessions of four times L1's size take turns: turns that found every full page of
                  their history, with L2 and without (bar: 0.95)
    write_through decode and prefill rates with all tiers on and with none, in turn (bar: 0.97)

Prints a JSON line a figure. Words are seeded random ids, so nothing is shared by accident.

    python -m benchmarks.tiers [resume oversubscribe write_through] [--tokens 4000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import platform
import random
import shutil
import signal
import statistics
import tempfile
import time
from typing import Any

import httpx

from benchmarks.server import Server, complete

PAGE_SIZE = 64
PREFILL_TOKENS = 640
DECODE_TOKENS = 160
WORD_IDS = range(1000, 40000)
Figure = dict[str, Any]


def words(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(WORD_IDS) for _ in range(length)]


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Session:
    """One session over HTTP; `turn` says when its first token came and what it found."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.id = client.post("/v1/sessions", json={"model": "default"}).json()["id"]
        self.known = 0  # tokens of its history

    def turn(self, text: str, num_tokens: int) -> tuple[float, dict[str, int], int]:
        """(seconds to the first token, tokens found by tier, tokens of history before it)."""
        body = {"input": text, "temperature": 0.0, "max_output_tokens": num_tokens}
        before = self.known
        reply = self.client.post(f"/v1/sessions/{self.id}/turns", json=body)
        if reply.status_code != 200:
            raise SystemExit(reply.text)
        turn = reply.json()
        self.known = turn["usage"]["input_tokens"] + turn["usage"]["output_tokens"]
        return turn["timings"]["first_token_ms"] / 1000, turn["x_cache"], before


def text_of(seed: int, num_words: int) -> str:
    """Plain words, so that a tokenizer makes about that many tokens of them."""
    rng = random.Random(seed)
    common = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child"]
    return " ".join(rng.choice(common) for _ in range(num_words))


def kill_everything(server: Server) -> None:
    pids = json.loads(server.state.read_text())["pids"]
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    server.process.wait(30)
    deadline_s = time.monotonic() + 30
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids.values()):
        if time.monotonic() > deadline_s:
            raise SystemExit("a killed process lives on")
        time.sleep(0.05)


def measure_resume(num_tokens: int, kind: str) -> list[Figure]:
    """First-token time of the turn after kill -9 of everything: from the store, and without."""
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as name:
        folder = pathlib.Path(name)
        settings = ["server.log_level=WARNING", f"engine.tiers.l3={kind}"]
        settings.append("engine.tiers.l3_wait_ms=5000")
        if kind == "mooncake":
            settings.append(f"engine.tiers.mooncake_ssd_dir={folder}/ssd")
        server = Server(folder, settings)
        server.wait_ready()
        client = httpx.Client(base_url=server.url, timeout=300)
        session = Session(client)
        first_s, _, _ = session.turn(text_of(1, num_tokens), 16)
        drain(server, folder)
        if kind == "mooncake":
            time.sleep(5.0)  # its disk tier is written behind
        found: dict[str, int] = {}
        times: dict[str, float] = {}
        for case in ("restored", "recomputed"):
            kill_everything(server)
            if case == "recomputed":
                shutil.rmtree(folder / "s" / "kv", ignore_errors=True)
                shutil.rmtree(folder / "ssd", ignore_errors=True)
            server = Server(folder, settings)
            server.wait_ready()
            session.client = httpx.Client(base_url=server.url, timeout=300)
            warm = Session(session.client)
            warm.turn("Hello.", 2)  # the process has run a step; nothing of the session is read
            times[case], hit, before = session.turn(f"Go on, {case}.", 16)
            if case == "restored":
                found, history = hit, before
        server.stop()
        return [
            {
                "case": "resume_after_kill_9_of_everything",
                "store": kind,
                "history_tokens": history,
                "found": found,
                "first_turn_ttft_s": round(first_s, 3),
                "restored_ttft_s": round(times["restored"], 3),
                "recomputed_ttft_s": round(times["recomputed"], 3),
                "times_faster": round(times["recomputed"] / times["restored"], 1),
                "bar": 5,
            }
        ]


def drain(server: Server, folder: pathlib.Path) -> None:
    key = (folder / "run" / "admin.key").read_text()
    headers = {"authorization": f"Bearer {key}"}
    url = f"{server.url}/admin/tiers/drain?timeout_s=60"
    reply = httpx.post(url, headers=headers, timeout=90)
    if reply.status_code != 200 or reply.json()["num_pending"]:
        raise SystemExit(f"the tiers do not drain: {reply.text}")


def measure_oversubscription(num_sessions: int = 16, rounds: int = 4) -> list[Figure]:
    """Sessions whose histories take four times L1, in turn."""
    figures = []
    for l2_bytes in (512 << 20, 0):
        with tempfile.TemporaryDirectory(prefix="moorage-bench-") as name:
            settings = [
                "server.log_level=WARNING",
                "engine.max_context_len=4096",
                "engine.kv_pool_tokens=4096",
                f"engine.tiers.l2_bytes={l2_bytes}",
                "engine.tiers.l3=none",
            ]
            server = Server(pathlib.Path(name), settings)
            server.wait_ready()
            client = httpx.Client(base_url=server.url, timeout=300)
            sessions = [Session(client) for _ in range(num_sessions)]
            for seed, session in enumerate(sessions):
                session.turn(text_of(seed, 850), 16)
            whole, ttfts, computed = 0, [], []
            for turn in range(rounds):
                for seed, session in enumerate(sessions):
                    text = text_of(1000 * turn + seed, 24)
                    ttft_s, hit, before = session.turn(text, 16)
                    full_pages = (before - 1) // PAGE_SIZE * PAGE_SIZE
                    whole += sum(hit.values()) >= full_pages
                    computed.append(before - sum(hit.values()))
                    ttfts.append(ttft_s)
            server.stop()
            num_turns = rounds * num_sessions
            held = sum(session.known for session in sessions)
            figures.append(
                {
                    "case": "oversubscribe_l1",
                    "l2": bool(l2_bytes),
                    "times_l1": round(held / 4096, 1),
                    "later_turns": num_turns,
                    "turns_that_found_every_full_page": round(whole / num_turns, 3),
                    "history_tokens_computed_p50": statistics.median(computed),
                    "ttft_p50_s": round(statistics.median(ttfts), 3),
                    "ttft_p99_s": round(quantile(ttfts, 0.99), 3),
                    "bar": 0.95 if l2_bytes else None,
                }
            )
    return figures


def measure_write_through(runs: int = 5) -> list[Figure]:
    """Rates and CPU time with all tiers on and with none, both servers up, measured in turn.

    CPU time of the engine process a token counts where others use the machine as well.
    """
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as name:
        servers = {}
        for case, settings in (("on", []), ("off", ["engine.tiers.l2_bytes=0"])):
            folder = pathlib.Path(name) / case
            folder.mkdir()
            servers[case] = Server(folder, ["server.log_level=WARNING", *settings])
            servers[case].wait_ready()
        rates: dict[str, list[float]] = {"on": [], "off": []}
        prefills: dict[str, list[float]] = {"on": [], "off": []}
        cpu_ms: dict[str, list[float]] = {"on": [], "off": []}
        for run in range(2 * runs + 2):
            case = ("on", "off")[run % 2]
            before_s = engine_cpu_s(servers[case])
            sample = asyncio.run(_completion(servers[case].url, words(run, PREFILL_TOKENS)))
            used_s = engine_cpu_s(servers[case]) - before_s
            if run >= 2:  # the first of each warms up
                rates[case].append(sample[0])
                prefills[case].append(PREFILL_TOKENS / sample[1])
                cpu_ms[case].append(1e3 * used_s / (PREFILL_TOKENS + DECODE_TOKENS))
        for server in servers.values():
            server.stop()
        decode = {case: statistics.median(values) for case, values in rates.items()}
        prefill = {case: statistics.median(values) for case, values in prefills.items()}
        cpu = {case: statistics.median(values) for case, values in cpu_ms.items()}
        return [
            {
                "case": "write_through_to_l2_and_file",
                "decode_tok_s": {case: round(rate, 1) for case, rate in decode.items()},
                "prefill_tok_s": {case: round(rate, 1) for case, rate in prefill.items()},
                "cpu_ms_per_token": {case: round(value, 3) for case, value in cpu.items()},
                "cpu_more": round(cpu["on"] / cpu["off"], 3),
                "decode_kept": round(decode["on"] / decode["off"], 3),
                "prefill_kept": round(prefill["on"] / prefill["off"], 3),
                "bar": 0.97,
            }
        ]


def engine_cpu_s(server: Server) -> float:
    """CPU time that the engine process has used."""
    pid = json.loads(server.state.read_text())["pids"]["engine"]
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _completion(url: str, prompt: list[int]) -> tuple[float, float]:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        sample = await complete(client, prompt, DECODE_TOKENS)
        return sample.decode_tok_s, sample.ttft_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cases = ("resume", "oversubscribe", "write_through")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=" | ".join(cases))
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--store", default="file", choices=("file", "mooncake"))
    arguments = parser.parse_args()
    chosen = arguments.cases or list(cases)
    if unknown := set(chosen) - set(cases):
        parser.error(f"no case {', '.join(sorted(unknown))}")
    machine = {"cpus": os.cpu_count(), "machine": platform.machine()}
    for case in chosen:
        if case == "resume":
            figures = measure_resume(arguments.tokens, arguments.store)
        elif case == "oversubscribe":
            figures = measure_oversubscription()
        else:
            figures = measure_write_through()
        for figure in figures:
            print(json.dumps({**figure, **machine}), flush=True)


if __name__ == "__main__":
    main()
