# SPDX-License-Identifier: Apache-2.0
"""A process that runs turns for ever and prints each one's id once the store acknowledged it.

    python -m tests.fakes.append_loop '{"store": "sqlite", "sqlite_path": "..."}'

Prints the session's id first. Made to be killed.
"""

from __future__ import annotations

import asyncio
import json
import sys

from sessions.config import SessionsConfig
from sessions.stores import make_store
from tests.fakes.session_turns import fresh_session, run_turn


async def run(config: SessionsConfig) -> None:
    store = make_store(config)
    await store.open()
    session, records = fresh_session()
    session = await store.create(session, records)
    print(session.id, flush=True)
    number = 0
    while True:
        session, record = await run_turn(store, session, token_ids=(number, number + 1))
        print(record.id, flush=True)
        number += 1


if __name__ == "__main__":
    asyncio.run(run(SessionsConfig(**json.loads(sys.argv[1]))))
