# SPDX-License-Identifier: Apache-2.0
"""The Redis store keeps the store contract, on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sessions.config import SessionsConfig
from sessions.ids import new_id
from sessions.redis_store import RedisSessionStore
from tests.contracts.session_store import SessionStoreContract, StoreHarness
from tests.fakes.redis_server import RedisServer

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


class TestRedisSessionStore(SessionStoreContract):
    @pytest.fixture
    def harness(self, server: RedisServer) -> Iterator[StoreHarness]:
        # A key prefix of its own keeps each test apart from the others on the shared server.
        config = SessionsConfig(
            store="redis", redis_url=server.url, redis_key_prefix=f"{new_id('log')}:"
        )
        harness = StoreHarness(lambda: RedisSessionStore(config))
        yield harness
        harness.close()
