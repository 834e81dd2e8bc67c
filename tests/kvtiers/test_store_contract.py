# SPDX-License-Identifier: Apache-2.0
"""The contract of a store, held by the embedded store, by its wrappers, and by the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtiers.breaker import BreakerStore
from kvtiers.deadline_store import Deadlines, DeadlineStore
from kvtiers.file_store import FileStore
from kvtiers.objects import object_bytes
from kvtiers.store import Store
from tests.contracts.kv_store import KvStoreContract, MakeStore
from tests.fakes.memory_store import MemoryStore
from tests.fakes.stored_pages import LAYOUT, PAGE_BYTES


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


class TestMemoryStore(KvStoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: MemoryStore(LAYOUT)

    @pytest.fixture
    def make_small_store(self) -> MakeStore:
        return lambda: MemoryStore(LAYOUT, 100 * object_bytes(PAGE_BYTES))


class TestFileStore(KvStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path, stack: ExitStack) -> MakeStore:
        def make() -> Store:
            store = FileStore(tmp_path / "l3", 8 << 20, LAYOUT)
            stack.callback(store.close)
            return store

        return make

    @pytest.fixture
    def make_small_store(self, tmp_path: Path, stack: ExitStack) -> MakeStore:
        def make() -> Store:
            store = FileStore(tmp_path / "small", 3 << 20, LAYOUT)
            stack.callback(store.close)
            return store

        return make


class TestGuardedFileStore(KvStoreContract):
    """As an engine has it: with deadlines and a breaker around."""

    @pytest.fixture
    def make_store(self, tmp_path: Path, stack: ExitStack) -> MakeStore:
        def make() -> Store:
            return _guarded(FileStore(tmp_path / "l3", 8 << 20, LAYOUT), stack)

        return make

    @pytest.fixture
    def make_small_store(self, tmp_path: Path, stack: ExitStack) -> MakeStore:
        return lambda: _guarded(FileStore(tmp_path / "small", 3 << 20, LAYOUT), stack)


def _guarded(inner: FileStore, stack: ExitStack) -> Store:
    store = BreakerStore(DeadlineStore(inner, Deadlines(call_s=20)), LAYOUT)
    stack.callback(store.close)
    return store
