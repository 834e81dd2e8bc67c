# SPDX-License-Identifier: Apache-2.0
"""The Redis store when the server dies, hangs, is full, wants a password or forgets."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from sessions.config import SessionsConfig
from sessions.errors import SessionsConfigError, StoreFull, StoreSchemaTooNew, StoreUnavailable
from sessions.redis_store import RedisSessionStore
from sessions.session import Session
from sessions.turn_log import Record
from tests.contracts.session_store import StoreHarness
from tests.fakes.killed_writer import acknowledged_until_killed
from tests.fakes.preload_shim import build_shim
from tests.fakes.redis_server import RedisServer
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending, run_turn

pytestmark = pytest.mark.redis

StartServer = Callable[..., RedisServer]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    servers: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        server = RedisServer(tmp_path, *options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()


# What a disk under load does to a server that syncs each write: as long as the file says.
SLOW_FSYNC = """
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static int sync_slowly(long number, int fd) {
    char text[16] = {0};
    int delay = open(DELAY_FILE, O_RDONLY);
    if (delay >= 0) {
        if (read(delay, text, sizeof text - 1) > 0) usleep(1000 * atoi(text));
        close(delay);
    }
    return (int)syscall(number, fd);
}
int fdatasync(int fd) { return sync_slowly(SYS_fdatasync, fd); }
int fsync(int fd) { return sync_slowly(SYS_fsync, fd); }
"""


def config_for(server: RedisServer, url: str = "") -> SessionsConfig:
    return SessionsConfig(store="redis", redis_url=url or server.url, store_timeout_ms=4_000)


@pytest.fixture
def server(start_server: StartServer) -> RedisServer:
    return start_server()


@pytest.fixture
def harness(server: RedisServer) -> Iterator[StoreHarness]:
    harness = StoreHarness(lambda: RedisSessionStore(config_for(server)))
    yield harness
    harness.close()


def make(harness: StoreHarness) -> Session:
    session, records = fresh_session()
    return harness.run(harness.store.create(session, records))


def test_every_turn_acknowledged_to_a_killed_writer_is_there(
    server: RedisServer, harness: StoreHarness
) -> None:
    for seed in range(3):
        for session_id, turn_ids in acknowledged_until_killed(config_for(server), seed).items():
            session = harness.run(harness.store.get(session_id))
            log = harness.run(harness.store.read_log(session))
            stored = [record.id for record in log.records[1:]]
            assert stored[: len(turn_ids)] == turn_ids
            assert session.revision == len(stored)
            assert session.num_tokens == log.num_tokens


def test_a_killed_server_is_said_and_loses_no_acknowledged_turn(
    server: RedisServer, harness: StoreHarness
) -> None:
    made = [make(harness) for _ in range(4)]
    acknowledged: dict[str, list[str]] = {session.id: [] for session in made}

    async def write(session: Session) -> None:
        while True:
            session, record = await run_turn(harness.store, session)
            acknowledged[session.id].append(record.id)

    async def write_until_killed() -> list[BaseException | None]:
        async def kill() -> None:
            while sum(map(len, acknowledged.values())) < 40:
                await asyncio.sleep(0.005)
            server.kill()

        work = [write(session) for session in made]
        return await asyncio.gather(*work, kill(), return_exceptions=True)

    *failures, killer = harness.run(write_until_killed())
    assert killer is None
    assert all(isinstance(failure, StoreUnavailable) for failure in failures), failures
    health = harness.run(harness.store.health())
    assert not health.ok and "Redis" in health.detail
    server.start()
    for session_id, turn_ids in acknowledged.items():
        session = harness.run(harness.store.get(session_id))
        log = harness.run(harness.another().read_log(session))
        assert [record.id for record in log.records[1 : len(turn_ids) + 1]] == turn_ids
        assert session.revision == len(log.records) - 1
    assert harness.run(harness.store.health()).ok


def test_an_append_only_file_cut_anywhere_keeps_whole_turns_only(
    server: RedisServer, harness: StoreHarness
) -> None:
    session = make(harness)
    for number in range(6):
        session, _ = harness.run(run_turn(harness.store, session, token_ids=(number,) * 500))
    server.kill()
    (aof,) = server.directory.glob("appendonlydir/*.incr.aof")
    whole = aof.read_bytes()
    revisions = set()
    for step in range(12):
        aof.write_bytes(whole[: len(whole) * (step + 5) // 16])
        server.start()
        cut = harness.another()
        found = harness.run(cut.get(session.id))
        log = harness.run(cut.read_log(found))
        assert (found.revision, found.num_tokens) == (len(log.records) - 1, log.num_tokens)
        begun = [turn.id for turn in harness.run(cut.pending_turns())]
        assert begun == ([found.current_turn] if found.current_turn else [])
        revisions.add(found.revision)
        server.kill()
    assert max(revisions) == 6 and len(revisions) > 3


@pytest.mark.parametrize("part_of_last", [0, 40])
def test_an_append_only_file_that_ends_in_zeros_is_refused_and_its_remedy_loses_no_turn(
    server: RedisServer, harness: StoreHarness, part_of_last: int
) -> None:
    """As ext4 leaves it after a power cut: the file has its length, its last blocks nothing."""
    session = make(harness)
    for number in range(6):
        session, _ = harness.run(run_turn(harness.store, session, token_ids=(number,) * 500))
    (aof,) = server.directory.glob("appendonlydir/*.incr.aof")
    acknowledged = aof.stat().st_size
    turn = pending(session)
    harness.run(harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn))
    server.kill()
    whole = aof.read_bytes()
    assert len(whole) > acknowledged + part_of_last
    aof.write_bytes(whole[: acknowledged + part_of_last].ljust(len(whole) + 4096, b"\0"))
    with pytest.raises(RuntimeError, match="did not start"):
        server.start()
    assert "redis-check-aof --fix" in server.log_path.read_text()
    with pytest.raises(StoreUnavailable, match="redis-check-aof"):
        harness.run(harness.store.get(session.id))
    check = shutil.which("redis-check-aof") or shutil.which("valkey-check-aof")
    assert check is not None
    subprocess.run([check, "--fix", aof], input=b"y\n", capture_output=True, check=True)
    server.start()
    found = harness.run(harness.store.get(session.id))
    assert found.revision == 6
    log = harness.run(harness.another().read_log(found))
    assert log.num_tokens == session.num_tokens
    harness.run(run_turn(harness.store, found))


def test_a_server_with_slow_fsync_acknowledges_only_what_a_kill_cannot_take(tmp_path: Path) -> None:
    delay = tmp_path / "delay_ms"
    shim = build_shim(tmp_path / "slow_fsync.so", SLOW_FSYNC, DELAY_FILE=delay)
    server = RedisServer(tmp_path, preload=shim)
    server.start()
    harness = StoreHarness(lambda: RedisSessionStore(config_for(server)))
    try:
        session = make(harness)
        delay.write_text("40")
        turn_ids = []
        for _ in range(4):
            session, record = harness.run(run_turn(harness.store, session))
            turn_ids.append(record.id)
        # Slower than the store waits: not acknowledged, and there once when it is said again.
        turn = pending(session)
        claim = harness.run(harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn))
        record = outcome(turn)
        committed = claim.session.commit_turn(record, NOW_MS)
        delay.write_text("6000")
        with pytest.raises(StoreUnavailable):
            harness.run(harness.store.commit_turn(committed, record))
        delay.write_text("40")
        server.kill()
        server.start()
        harness.run(harness.store.commit_turn(committed, record))
        turn_ids.append(turn.id)
        server.kill()
        server.start()
        anew = harness.another()
        found = harness.run(anew.get(session.id))
        log = harness.run(anew.read_log(found))
        assert [entry.id for entry in log.records[1:]] == turn_ids
        assert found.revision == 5
    finally:
        harness.close()
        server.kill()


def test_a_commit_with_unknown_outcome_can_be_repeated(
    server: RedisServer, harness: StoreHarness
) -> None:
    session = make(harness)
    turn = pending(session)
    claim = harness.run(harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn))
    record: Record = outcome(turn)
    committed = claim.session.commit_turn(record, NOW_MS)
    server.pause()
    with pytest.raises(StoreUnavailable):
        harness.run(harness.store.commit_turn(committed, record))
    server.resume()
    stored = harness.run(harness.store.commit_turn(committed, record))
    assert stored.revision == 1
    log = harness.run(harness.another().read_log(stored))
    assert [entry.id for entry in log.records[1:]] == [turn.id]


def test_no_server_at_start_is_one_clear_error(server: RedisServer) -> None:
    server.kill()
    store = RedisSessionStore(config_for(server))
    with pytest.raises(StoreUnavailable, match="Redis: "):
        asyncio.run(store.open())


def test_a_bad_url_is_refused_with_its_path() -> None:
    store = RedisSessionStore(SessionsConfig(store="redis", redis_url="redis://host:notaport"))
    with pytest.raises(SessionsConfigError) as caught:
        asyncio.run(store.open())
    assert caught.value.param == "sessions.redis_url"


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (("--appendonly", "no"), "appendonly is 'no'"),
        (("--appendonly", "yes", "--appendfsync", "everysec"), "appendfsync is 'everysec'"),
        (("--maxmemory-policy", "allkeys-lru"), "maxmemory-policy is 'allkeys-lru'"),
    ],
)
def test_a_server_less_durable_than_promised_is_warned_about(
    start_server: StartServer,
    caplog: pytest.LogCaptureFixture,
    options: tuple[str, ...],
    warning: str,
) -> None:
    server = start_server(*options)
    harness = StoreHarness(lambda: RedisSessionStore(config_for(server)))
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any(warning in message for message in warned)
    assert any(warning in text for text in harness.run(harness.store.health()).warnings)
    harness.close()


def test_a_durable_server_is_not_warned_about(
    harness: StoreHarness, caplog: pytest.LogCaptureFixture
) -> None:
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert harness.run(harness.store.health()).warnings == ()


def test_the_url_carries_the_password_and_no_error_shows_it(start_server: StartServer) -> None:
    server = start_server("--appendonly", "yes", "--requirepass", "s3cret")
    good = StoreHarness(
        lambda: RedisSessionStore(config_for(server, f"unix://:s3cret@{server.socket_path}"))
    )
    assert good.run(good.store.health()).ok
    good.close()
    for url in (server.url, f"unix://:wr0ng@{server.socket_path}"):
        with pytest.raises(StoreUnavailable) as caught:
            asyncio.run(RedisSessionStore(config_for(server, url)).open())
        assert "wr0ng" not in str(caught.value)


def test_a_full_server_says_so_and_goes_on_reading(start_server: StartServer) -> None:
    server = start_server("--appendonly", "yes", "--maxmemory", "4mb")
    harness = StoreHarness(lambda: RedisSessionStore(config_for(server)))
    session = make(harness)
    with pytest.raises(StoreFull, match="memory or disk is full"):
        for _ in range(500):
            session, _ = harness.run(
                run_turn(harness.store, session, token_ids=tuple(range(20_000)))
            )
    stored = harness.run(harness.store.get(session.id))
    assert harness.run(harness.store.read_log(stored)).num_tokens == stored.num_tokens
    assert harness.run(harness.store.delete(stored.id)) is True
    harness.run(run_turn(harness.store, make(harness)))
    harness.close()


def test_data_of_a_later_moorage_is_left_alone(server: RedisServer, harness: StoreHarness) -> None:
    async def write_schema() -> None:
        client = redis.asyncio.Redis.from_url(server.url)
        await client.set("moorage:schema", 99)
        await client.aclose()

    harness.run(write_schema())
    with pytest.raises(StoreSchemaTooNew, match="schema 99"):
        harness.another()
