# SPDX-License-Identifier: Apache-2.0
"""One flipped bit at rest, wherever it is: an error or the same history, never another one."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio

from sessions import codec
from sessions.config import SessionsConfig
from sessions.errors import StoreCorrupt, StoreError
from sessions.redis_script import SCHEMA_VERSION as REDIS_SCHEMA
from sessions.redis_store import RedisSessionStore
from sessions.session import Session
from sessions.sqlite_schema import SCHEMA_VERSION as SQLITE_SCHEMA
from sessions.sqlite_store import SqliteSessionStore
from sessions.token_codec import pack
from sessions.turn_log import Record
from tests.contracts.session_store import StoreHarness
from tests.fakes.redis_server import RedisServer
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending, run_turn

TOKEN_IDS = tuple(random.Random(5).sample(range(40_000), 300))


def flipped(data: bytes, bit: int) -> bytes:
    place = bit // 8
    return data[:place] + bytes([data[place] ^ 1 << bit % 8]) + data[place + 1 :]


def one_turn() -> tuple[Session, Record]:
    session, _ = fresh_session(metadata={"repo": "moorage"})
    return session, outcome(pending(session), token_ids=(7, 8, 40_000))


def test_every_flipped_bit_of_a_record_is_seen() -> None:
    _, record = one_turn()
    stored = codec.encode_record(record)
    assert codec.decode_record(stored) == record
    for bit in range(8 * len(stored.tokens)):
        with pytest.raises(StoreCorrupt):
            codec.decode_record(replace(stored, tokens=flipped(stored.tokens, bit)))
    for bit in range(8 * len(stored.body)):
        with pytest.raises(StoreCorrupt):
            codec.decode_record(replace(stored, body=flipped(stored.body, bit)))
    for other in (0, stored.input_len + 1, -1):
        with pytest.raises(StoreCorrupt):
            codec.decode_record(replace(stored, input_len=other))


def test_every_flipped_bit_of_a_session_or_a_begun_turn_is_seen() -> None:
    session, _ = one_turn()
    body, settings = codec.encode_session(session), codec.encode_settings(session.settings)
    assert codec.decode_session(body, settings) == session
    for bit in range(8 * len(body)):
        with pytest.raises(StoreCorrupt):
            codec.decode_session(flipped(body, bit), settings)
    for bit in range(8 * len(settings)):
        with pytest.raises(StoreCorrupt):
            codec.decode_session(body, flipped(settings, bit))
    turn = codec.encode_pending(pending(session))
    for bit in range(8 * len(turn)):
        with pytest.raises(StoreCorrupt):
            codec.decode_pending(flipped(turn, bit))


def test_bytes_cut_short_anywhere_are_seen() -> None:
    _, record = one_turn()
    stored = codec.encode_record(record)
    for end in range(len(stored.body)):
        with pytest.raises(StoreCorrupt):
            codec.decode_record(replace(stored, body=stored.body[:end]))
    for end in range(len(stored.tokens)):
        with pytest.raises(StoreCorrupt):
            codec.decode_record(replace(stored, tokens=stored.tokens[:end]))


def test_records_that_changed_places_are_seen() -> None:
    """Parts of two whole records make no third."""
    _, one = one_turn()
    _, two = one_turn()
    first = codec.encode_record(one)
    second = codec.encode_record(replace(two, output_token_ids=two.output_token_ids[4:]))
    with pytest.raises(StoreCorrupt):
        codec.decode_record(replace(first, tokens=second.tokens))


class Disk:
    """A store, and the file in which it keeps what it was told."""

    def __init__(
        self, make: Callable[[], SqliteSessionStore | RedisSessionStore], server: RedisServer | None
    ) -> None:
        self.harness = StoreHarness(make)
        self.server = server

    def let_go(self) -> None:
        """Everything is in the file, and nobody has it open."""
        self.harness.run(self.harness.store.close())
        if self.server is not None:
            self.server.kill()

    def take_up(self) -> SqliteSessionStore | RedisSessionStore:
        if self.server is not None:
            self.server.start()
        return self.harness.another()  # type: ignore[return-value]


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "sqlite":
        path = str(tmp_path / "sessions.db")
        made = Disk(lambda: SqliteSessionStore(SessionsConfig(sqlite_path=path)), None)
    else:
        server = RedisServer(tmp_path)
        server.start()
        config = SessionsConfig(store="redis", redis_url=server.url)
        made = Disk(lambda: RedisSessionStore(config), server)
    yield made
    made.harness.close()
    if made.server is not None:
        made.server.kill()


def file_that_holds(folder: Path, wanted: bytes) -> Path:
    found = [
        path for path in folder.rglob("*") if path.is_file() and path.read_bytes().count(wanted)
    ]
    assert len(found) == 1, found
    return found[0]


def test_bits_that_a_disk_flipped_are_never_another_history(disk: Disk, tmp_path: Path) -> None:
    harness = disk.harness
    session, records = fresh_session()
    session = harness.run(harness.store.create(session, records))
    session, record = harness.run(run_turn(harness.store, session, token_ids=TOKEN_IDS))
    session, _ = harness.run(run_turn(harness.store, session))
    want = harness.run(harness.store.read_log(session))
    disk.let_go()
    tokens = pack(record.token_ids)
    file = file_that_holds(tmp_path, tokens)
    whole = file.read_bytes()
    start = 8 * whole.index(tokens)
    rng = random.Random(11)
    inside = [rng.randrange(start + 8, start + 8 * len(tokens)) for _ in range(4)]
    around = [rng.randrange(start - 4000, start + 8 * len(tokens) + 4000) for _ in range(12)]
    refused = 0
    for bit in [*inside, *around]:
        file.write_bytes(flipped(whole, bit))
        try:
            store = disk.take_up()
            found = harness.run(store.get(session.id))
            log = harness.run(store.read_log(found))
            assert log.records == want.records[: len(log.records)], "another history"
            assert bit not in inside, "a wrong token was believed"
            harness.run(store.close())
        except (StoreError, RuntimeError):  # the store says so, or the server does not start
            refused += 1
        if disk.server is not None:
            disk.server.kill()
    assert refused >= len(inside)


def test_a_damaged_turn_that_was_begun_hides_no_other(disk: Disk, tmp_path: Path) -> None:
    harness = disk.harness
    begun = []
    for number in range(2):
        session, records = fresh_session()
        session = harness.run(harness.store.create(session, records))
        turn = replace(pending(session), body_hash=f"body hash {number}")
        harness.run(harness.store.begin_turn(session.begin_turn(turn, NOW_MS), turn))
        begun.append(turn)
    disk.let_go()
    file = file_that_holds(tmp_path, b"body hash 1")
    file.write_bytes(file.read_bytes().replace(b"body hash 1", b"body hash 3"))
    assert harness.run(disk.take_up().pending_turns()) == (begun[0],)


def without_sum(stored: bytes) -> bytes:
    assert stored[:1] == b"\xc1"
    return stored[9:]


def test_a_sqlite_file_of_the_schema_before_sums_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    harness = StoreHarness(lambda: SqliteSessionStore(SessionsConfig(sqlite_path=str(path))))
    session, records = fresh_session()
    session = harness.run(harness.store.create(session, records))
    session, _ = harness.run(run_turn(harness.store, session))
    want = harness.run(harness.store.read_log(session))
    harness.run(harness.store.close())
    with closing(sqlite3.connect(path)) as connection:
        connection.create_function("without_sum", 1, without_sum)
        for table in ("sessions", "session_settings", "log_records"):
            connection.execute(f"UPDATE {table} SET body = without_sum(body)")
        connection.execute("DELETE FROM migrations WHERE version >= 5")
        connection.commit()
    store = harness.another()
    found = harness.run(store.get(session.id))
    assert found == session
    assert harness.run(store.read_log(found)).records == want.records
    found, _ = harness.run(run_turn(store, found))
    assert len(harness.run(harness.another().read_log(found)).records) == len(want.records) + 1
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT MAX(version) FROM migrations").fetchone()[0] == 5
    assert SQLITE_SCHEMA == 5
    harness.close()


@pytest.mark.redis
def test_a_redis_of_the_schema_before_sums_is_read_as_it_was(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    config = SessionsConfig(store="redis", redis_url=server.url)
    harness = StoreHarness(lambda: RedisSessionStore(config))
    session, records = fresh_session()
    session = harness.run(harness.store.create(session, records))
    session, _ = harness.run(run_turn(harness.store, session))
    want = harness.run(harness.store.read_log(session))

    async def take_sums_away() -> None:
        client: Any = redis.asyncio.Redis.from_url(server.url)
        for field in ("body", "settings"):
            stored = await client.hget(f"moorage:session:{session.id}", field)
            await client.hset(f"moorage:session:{session.id}", field, without_sum(stored))
        log = f"moorage:log:{session.log_id}"
        for place, packed in enumerate(await client.lrange(log, 0, -1)):
            input_len, tokens, body = msgspec.msgpack.decode(packed)
            row = msgspec.msgpack.encode((input_len, tokens, without_sum(body)))
            await client.lset(log, place, row)
        await client.set("moorage:schema", 1)
        await client.aclose()

    async def schema() -> int:
        client: Any = redis.asyncio.Redis.from_url(server.url)
        value = int(await client.get("moorage:schema"))
        await client.aclose()
        return value

    asyncio.run(take_sums_away())
    store = harness.another()
    found = harness.run(store.get(session.id))
    assert found == session
    assert harness.run(store.read_log(found)).records == want.records
    harness.run(run_turn(store, found))
    assert asyncio.run(schema()) == REDIS_SCHEMA == 2
    harness.close()
    server.kill()
