# SPDX-License-Identifier: Apache-2.0
"""The contract of a store, held by Mooncake: real processes, shared memory, its own defaults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.children import MooncakeSettings
from tests.contracts.kv_store import ALL_KEYS, KvStoreContract, MakeStore
from tests.fakes.mooncake_processes import MooncakeMachine, require_mooncake


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMachine]:
    require_mooncake()
    machine = MooncakeMachine(tmp_path_factory.mktemp("mooncake"))
    yield machine
    machine.close()


class TestMooncakeStore(KvStoreContract):
    @pytest.fixture
    def make_store(self, machine: MooncakeMachine) -> Iterator[MakeStore]:
        # A connection takes a second to close: it is shared until a test closes it.
        yield machine.shared
        machine.shared().remove(ALL_KEYS)

    small_page_bytes = 160_000

    @pytest.fixture
    def make_small_store(self, tmp_path: Path) -> Iterator[MakeStore]:
        require_mooncake()
        small = MooncakeMachine(tmp_path, MooncakeSettings(segment_bytes=16 << 20))
        yield lambda: small.open(self.small_page_bytes)
        small.close()
