# SPDX-License-Identifier: Apache-2.0
"""Measures the session stores: acknowledged writes, history reads, forks. Prints JSON lines.

    python -m benchmarks.session_store [--store sqlite] [--store redis] [--turns 300]

SQLite runs in a temporary directory (`--directory` picks the disk), Redis on a server of its own
(`appendonly yes`, `appendfsync always`). Times are milliseconds, medians unless named otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sessions import history
from sessions.config import SessionsConfig
from sessions.ids import new_id
from sessions.items import parse_items
from sessions.session import Session, new_session
from sessions.store import SessionStore
from sessions.stores import make_store
from sessions.token_codec import encode_ids
from sessions.turn_log import PRELUDE, PendingTurn, Record

NOW_MS = 1_800_000_000_000
NEW_TOKENS = 500
SAMPLED_TOKENS = 300


def prelude(num_tokens: int) -> Record:
    ids = encode_ids(7 * number % 49_152 for number in range(num_tokens))
    return Record(id=new_id("batch"), kind=PRELUDE, input_token_ids=ids)


async def begun(store: SessionStore, num_tokens: int = 1_000) -> Session:
    records = (prelude(num_tokens),)
    return await store.create(new_session(model="m", now_ms=NOW_MS, records=records), records)


async def one_turn(store: SessionStore, session: Session) -> tuple[Session, float, float]:
    """A turn of a tool result in and a tool call out; returns begin and commit times too."""
    items = parse_items("x" * 4 * NEW_TOKENS)
    turn = PendingTurn(
        id=new_id("turn"),
        session_id=session.id,
        base_revision=session.revision,
        input_items=items,
        input_token_ids=encode_ids(range(20_000, 20_000 + NEW_TOKENS)),
        idempotency_key=new_id("batch"),
        body_hash="0" * 64,
        created_at_ms=NOW_MS,
    )
    start = time.perf_counter()
    claim = await store.begin_turn(session.begin_turn(turn, NOW_MS), turn)
    begin_s = time.perf_counter() - start
    record = Record(
        id=turn.id,
        revision=session.revision + 1,
        input_items=items,
        input_token_ids=turn.input_token_ids,
        output_items=parse_items([{"role": "assistant", "content": "y" * 4 * SAMPLED_TOKENS}]),
        output_token_ids=encode_ids(range(30_000, 30_000 + SAMPLED_TOKENS)),
    )
    start = time.perf_counter()
    session = await store.commit_turn(claim.session.commit_turn(record, NOW_MS), record)
    return session, begin_s, time.perf_counter() - start


async def measure_appends(store: SessionStore, num_turns: int) -> dict[str, Any]:
    session = await begun(store)
    begins, commits = [], []
    for _ in range(num_turns):
        session, begin_s, commit_s = await one_turn(store, session)
        begins.append(1e3 * begin_s)
        commits.append(1e3 * commit_s)
    return {
        "begin_p50_ms": round(statistics.median(begins), 3),
        "begin_p99_ms": round(percentile(begins, 99), 3),
        "commit_p50_ms": round(statistics.median(commits), 3),
        "commit_p99_ms": round(percentile(commits, 99), 3),
    }


async def measure_writers(store: SessionStore, num_writers: int, turns_each: int) -> dict[str, Any]:
    commits: list[float] = []

    async def drive(session: Session) -> None:
        for _ in range(turns_each):
            session, _, commit_s = await one_turn(store, session)
            commits.append(1e3 * commit_s)

    made = [await begun(store) for _ in range(num_writers)]
    start = time.perf_counter()
    await asyncio.gather(*map(drive, made))
    elapsed_s = time.perf_counter() - start
    return {
        "writers": num_writers,
        "turns_per_s": round(len(commits) / elapsed_s, 1),
        "commit_p50_ms": round(statistics.median(commits), 3),
        "commit_p99_ms": round(percentile(commits, 99), 3),
    }


async def measure_history(config: SessionsConfig, num_tokens: int) -> dict[str, Any]:
    """Reads the history of a session of `num_tokens` in turns of 800, cold and warm; forks it."""
    store = make_store(config)
    await store.open()
    session = await begun(store)
    while session.num_tokens < num_tokens:
        session, _, _ = await one_turn(store, session)
    cold: list[float] = []
    warm: list[float] = []
    gets: list[float] = []
    for _ in range(7):
        reader = make_store(config)
        await reader.open()
        await reader.health()
        start = time.perf_counter()
        found = await reader.get(session.id)
        gets.append(1e3 * (time.perf_counter() - start))
        for times in (cold, warm):
            start = time.perf_counter()
            await reader.read_tokens(found)
            times.append(1e3 * (time.perf_counter() - start))
        await reader.close()
    log = await store.read_log(session)
    start = time.perf_counter()
    await store.create_many(history.fork(session, log, "head", NOW_MS, n=8))
    fork_ms = 1e3 * (time.perf_counter() - start)
    await store.close()
    return {
        "history_tokens": session.num_tokens,
        "records": session.num_records,
        "get_ms": round(statistics.median(gets), 3),
        "read_cold_ms": round(statistics.median(cold), 3),
        "read_warm_ms": round(statistics.median(warm), 4),
        "fork_8_ms": round(fork_ms, 3),
    }


def percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """A durable server on a unix socket; yields its URL."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise SystemExit("no redis-server (hint: apt-get install redis-server)")
    socket_path = directory / "r.sock"
    command = [
        *(binary, "--port", "0", "--unixsocket", str(socket_path), "--dir", str(directory)),
        *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
        *("--maxmemory-policy", "noeviction"),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not socket_path.exists():
            if server.poll() is not None:
                raise SystemExit(f"redis-server ended with {server.returncode}")
            time.sleep(0.02)
        yield f"unix://{socket_path}"
    finally:
        server.terminate()
        server.wait()


async def measure(config: SessionsConfig, num_turns: int) -> None:
    store = make_store(config)
    await store.open()
    await measure_appends(store, 20)  # first writes create files and pages
    report("turn", config, await measure_appends(store, num_turns))
    for num_writers in (8, 20):
        report("writers", config, await measure_writers(store, num_writers, 20))
    await store.close()
    for num_tokens in (30_000, 100_000):
        report("history", config, await measure_history(config, num_tokens))


def report(name: str, config: SessionsConfig, figures: dict[str, Any]) -> None:
    print(json.dumps({"bench": name, "store": config.store, **figures}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--store", action="append", choices=["sqlite", "redis"])
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    machine = {
        "bench": "machine",
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "platform": platform.platform(),
    }
    print(json.dumps(machine), flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        for name in arguments.store or ["sqlite", "redis"]:
            directory = Path(temporary, name)
            directory.mkdir()
            if name == "sqlite":
                config = SessionsConfig(sqlite_path=str(directory / "sessions.db"))
                asyncio.run(measure(config, arguments.turns))
            else:
                with redis_server(directory) as url:
                    config = SessionsConfig(store="redis", redis_url=url)
                    asyncio.run(measure(config, arguments.turns))


if __name__ == "__main__":
    main()
