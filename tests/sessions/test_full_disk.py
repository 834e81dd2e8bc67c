# SPDX-License-Identifier: Apache-2.0
"""The disk below a session store is full (ENOSPC from the kernel's calls): a clear error, nothing
acknowledged is lost, and all goes on once there is room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sessions.config import SessionsConfig
from sessions.errors import StoreError, StoreFull, StoreUnavailable
from sessions.redis_store import RedisSessionStore
from tests.contracts.session_store import StoreHarness
from tests.fakes.full_disk import FullDisk
from tests.fakes.redis_server import RedisServer
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending, run_turn

ROOT = Path(__file__).resolve().parents[2]


def test_sqlite_refuses_what_does_not_fit_and_takes_it_when_it_is_said_again(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    disk = FullDisk(tmp_path, folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.fills_disk", folder / "sessions.db", disk.flag],
        cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": str(disk.shim)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["raised"].startswith("StoreFull: ") and "disk is full" in said["raised"]
    assert said["readable"] == said["want"][:1]
    assert said["ids"] == said["want"]


@pytest.mark.redis
def test_redis_loses_no_acknowledged_turn_to_a_full_disk(tmp_path: Path) -> None:
    """With `appendfsync always` it ends rather than acknowledge what it cannot write."""
    folder = tmp_path / "data"
    folder.mkdir()
    disk = FullDisk(tmp_path, folder)
    server = RedisServer(folder, preload=disk.shim)
    server.start()
    config = SessionsConfig(store="redis", redis_url=server.url, store_timeout_ms=4_000)
    harness = StoreHarness(lambda: RedisSessionStore(config))
    try:
        session, records = fresh_session()
        session = harness.run(harness.store.create(session, records))
        turn_ids = []
        for _ in range(3):
            session, record = harness.run(run_turn(harness.store, session))
            turn_ids.append(record.id)
        turn = pending(session)
        claim = harness.run(harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn))
        record = outcome(turn)
        committed = claim.session.commit_turn(record, NOW_MS)
        disk.fill()
        with pytest.raises(StoreError) as caught:
            harness.run(harness.store.commit_turn(committed, record))
        assert isinstance(caught.value, StoreFull | StoreUnavailable)
        disk.make_room()
        server.kill()
        server.start()
        harness.run(harness.store.commit_turn(committed, record))
        turn_ids.append(turn.id)
        anew = harness.another()
        log = harness.run(anew.read_log(harness.run(anew.get(session.id))))
        assert [entry.id for entry in log.records[1:]] == turn_ids
    finally:
        harness.close()
        server.kill()
