# SPDX-License-Identifier: Apache-2.0
"""The SQLite store keeps the store contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sessions.config import SessionsConfig
from sessions.sqlite_store import SqliteSessionStore
from tests.contracts.session_store import SessionStoreContract, StoreHarness


class TestSqliteSessionStore(SessionStoreContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[StoreHarness]:
        config = SessionsConfig(sqlite_path=str(tmp_path / "sessions.db"))
        harness = StoreHarness(lambda: SqliteSessionStore(config))
        yield harness
        harness.close()
