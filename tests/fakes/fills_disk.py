# SPDX-License-Identifier: Apache-2.0
"""A SQLite store whose disk fills up between a turn's begin and its commit: for a process of its
own, with the shim of `tests.fakes.full_disk` before libc.

    python -m tests.fakes.fills_disk DATABASE FLAG

Prints a line of JSON: what the commit raised, what could be read then, and the ids at the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from sessions.config import SessionsConfig
from sessions.errors import StoreError
from sessions.sqlite_store import SqliteSessionStore
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending, run_turn


async def main(database: str, flag: Path) -> None:
    store = SqliteSessionStore(SessionsConfig(sqlite_path=database))
    await store.open()
    session = await store.create(*fresh_session())
    session, first = await run_turn(store, session)
    turn = pending(session)
    claim = await store.begin_turn(session.begin_turn(turn, NOW_MS), turn)
    record = outcome(turn)
    committed = claim.session.commit_turn(record, NOW_MS)
    flag.touch()
    raised = ""
    try:
        await store.commit_turn(committed, record)
    except StoreError as error:
        raised = f"{type(error).__name__}: {error.message}"
    readable = [entry.id for entry in (await store.read_log(session)).records[1:]]
    flag.unlink()
    stored = await store.commit_turn(committed, record)
    stored, last = await run_turn(store, stored)
    ids = [entry.id for entry in (await store.read_log(stored)).records[1:]]
    await store.close()
    want = [first.id, turn.id, last.id]
    print(json.dumps({"raised": raised, "readable": readable, "ids": ids, "want": want}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
