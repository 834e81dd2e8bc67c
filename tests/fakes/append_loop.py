# SPDX-License-Identifier: Apache-2.0
"""A process that runs turns in several sessions at once, and says which the store acknowledged.

    python -m tests.fakes.append_loop '{"store": "sqlite", "sqlite_path": "..."}' 4

Prints `<session id> <turn id>` for each acknowledged turn, for ever. Made to be killed.
"""

from __future__ import annotations

import asyncio
import json
import sys

from sessions.config import SessionsConfig
from sessions.store import SessionStore
from sessions.stores import make_store
from tests.fakes.session_turns import fresh_session, run_turn


async def write(store: SessionStore) -> None:
    session, records = fresh_session()
    session = await store.create(session, records)
    number = 0
    while True:
        session, record = await run_turn(store, session, token_ids=(number, number + 1))
        print(session.id, record.id, flush=True)
        number += 1


async def run(config: SessionsConfig, num_sessions: int) -> None:
    store = make_store(config)
    await store.open()
    await asyncio.gather(*(write(store) for _ in range(num_sessions)))


if __name__ == "__main__":
    asyncio.run(run(SessionsConfig(**json.loads(sys.argv[1])), int(sys.argv[2])))
