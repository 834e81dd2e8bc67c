# SPDX-License-Identifier: Apache-2.0
"""Kills a writing process (and Redis itself) again and again, and counts lost acknowledged turns.

    python -m benchmarks.soak.session_kills [--store sqlite|redis] [--kills 100] [--turns 200]
                                            [--seed 0]

Each round: a process runs turns in four sessions at once until it is killed with SIGKILL at a
random turn; then every turn it printed as acknowledged must be in the store, in order. With Redis
every fifth round kills the server too, and it starts again from its append-only file. Prints one
JSON line; exits 1 if any acknowledged turn is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

from sessions.config import SessionsConfig
from sessions.stores import make_store
from tests.fakes.killed_writer import acknowledged_until_killed
from tests.fakes.redis_server import RedisServer


async def stored_turns(config: SessionsConfig, session_ids: Iterable[str]) -> dict[str, list[str]]:
    store = make_store(config)
    await store.open()
    stored = {}
    for session_id in session_ids:
        log = await store.read_log(await store.get(session_id))
        stored[session_id] = [record.id for record in log.records[1:]]
    await store.close()
    return stored


def soak(
    config: SessionsConfig,
    server: RedisServer | None,
    num_kills: int,
    max_turns: int,
    first_seed: int,
) -> dict[str, int | str]:
    num_acknowledged = lost = unacknowledged = server_kills = 0
    for seed in range(first_seed, first_seed + num_kills):
        acknowledged = acknowledged_until_killed(config, seed, max_turns=max_turns)
        if server is not None and seed % 5 == 4:
            server.kill()
            server.start()
            server_kills += 1
        stored = asyncio.run(stored_turns(config, acknowledged))
        for session_id, turn_ids in acknowledged.items():
            kept = stored[session_id]
            num_acknowledged += len(turn_ids)
            lost += sum(a != b for a, b in zip_longest(kept[: len(turn_ids)], turn_ids))
            unacknowledged += max(0, len(kept) - len(turn_ids))
    return {
        "bench": "session_kills",
        "store": config.store,
        "seed": first_seed,
        "kills": num_kills,
        "server_kills": server_kills,
        "acknowledged_turns": num_acknowledged,
        "lost": lost,
        "stored_but_not_acknowledged": unacknowledged,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--store", choices=["sqlite", "redis"], default="sqlite")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--turns", type=int, default=200, help="most turns before a kill")
    parser.add_argument("--seed", type=int, default=0, help="of the first kill, each has its own")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        server = None
        config = SessionsConfig(sqlite_path=str(Path(temporary, "sessions.db")))
        if arguments.store == "redis":
            server = RedisServer(Path(temporary))
            server.start()
            config = SessionsConfig(store="redis", redis_url=server.url)
        try:
            figures = soak(config, server, arguments.kills, arguments.turns, arguments.seed)
        finally:
            if server is not None:
                server.kill()
    print(json.dumps(figures))
    if figures["lost"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
