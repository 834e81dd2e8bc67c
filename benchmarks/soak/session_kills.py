# SPDX-License-Identifier: Apache-2.0
"""Kills a writing process (and Redis itself) again and again, and counts lost acknowledged turns.

    python -m benchmarks.soak.session_kills [--store sqlite|redis] [--kills 100] [--turns 120]

Each round: a process runs turns until it is killed with SIGKILL at a random turn; then every turn
it printed as acknowledged must be in the store, in order. With Redis every fifth round kills the
server too, and it starts again from its append-only file. Prints one JSON line; exits 1 if any
acknowledged turn is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from sessions.config import SessionsConfig
from sessions.stores import make_store
from tests.fakes.killed_writer import acknowledged_until_killed
from tests.fakes.redis_server import RedisServer


async def stored_turns(config: SessionsConfig, session_id: str) -> list[str]:
    store = make_store(config)
    await store.open()
    session = await store.get(session_id)
    log = await store.read_log(session)
    await store.close()
    return [record.id for record in log.records[1:]]


def soak(
    config: SessionsConfig, server: RedisServer | None, num_kills: int, max_turns: int
) -> dict[str, int | str]:
    acknowledged = lost = unacknowledged = server_kills = 0
    for seed in range(num_kills):
        session_id, turn_ids = acknowledged_until_killed(config, seed, max_turns=max_turns)
        if server is not None and seed % 5 == 4:
            server.kill()
            server.start()
            server_kills += 1
        stored = asyncio.run(stored_turns(config, session_id))
        acknowledged += len(turn_ids)
        lost += sum(kept != wanted for kept, wanted in zip(stored, turn_ids, strict=False))
        lost += max(0, len(turn_ids) - len(stored))
        unacknowledged += max(0, len(stored) - len(turn_ids))
    return {
        "bench": "session_kills",
        "store": config.store,
        "kills": num_kills,
        "server_kills": server_kills,
        "acknowledged_turns": acknowledged,
        "lost": lost,
        "stored_but_not_acknowledged": unacknowledged,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--store", choices=["sqlite", "redis"], default="sqlite")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--turns", type=int, default=200, help="most turns before a kill")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        server = None
        config = SessionsConfig(sqlite_path=str(Path(temporary, "sessions.db")))
        if arguments.store == "redis":
            server = RedisServer(Path(temporary))
            server.start()
            config = SessionsConfig(store="redis", redis_url=server.url)
        try:
            figures = soak(config, server, arguments.kills, arguments.turns)
        finally:
            if server is not None:
                server.kill()
    print(json.dumps(figures))
    if figures["lost"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
