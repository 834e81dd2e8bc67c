# SPDX-License-Identifier: Apache-2.0
"""Real Mooncake processes of a test's own, looked after as the supervisor does."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.children import MooncakeChildren, MooncakeSettings
from kvtiers.mooncake_endpoints import ENDPOINTS_FILE
from kvtiers.mooncake_store import MooncakeLimits, MooncakeStore
from kvtiers.objects import object_bytes
from tests.fakes.stored_pages import LAYOUT, PAGE_BYTES

SMALL = MooncakeSettings(segment_bytes=32 << 20)
# A busy machine's processes may take seconds for what is to be answered.
LIMITS = MooncakeLimits(ring_bytes=8 << 20, call_s=20.0)
# A test waits for a call that hangs: not as long as an engine would.
HASTY = replace(LIMITS, call_s=1.5)


def require_mooncake() -> None:
    """Without the library the test is skipped, or fails where CI=true."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        reason = f"mooncake cannot be loaded: {error} (hint: scripts/services)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


class MooncakeMachine:
    """One master and one owner, and stores that use them; `close` ends all."""

    def __init__(self, run_dir: Path, settings: MooncakeSettings = SMALL) -> None:
        self.children = MooncakeChildren(settings, run_dir)
        self.endpoints = run_dir / ENDPOINTS_FILE
        self._opened: list[MooncakeStore] = []
        self.children.start()
        num_processes = 1 if settings.master else 2
        self.wait(lambda: len(self.children.pids) == num_processes)
        self._shared: MooncakeStore | None = None

    def open(self, page_bytes: int = PAGE_BYTES, limits: MooncakeLimits = LIMITS) -> MooncakeStore:
        """A store that is connected."""
        store = MooncakeStore(self.endpoints, LAYOUT, object_bytes(page_bytes), limits)
        self._opened.append(store)
        self.wait(lambda: store.probe(["ns/none"]) == 0 and store.status().reason == "")
        return store

    def shared(self) -> MooncakeStore:
        """One store for many tests, opened again once one of them has closed it."""
        if self._shared is None or self._shared.status().reason == "closed":
            self._shared = self.open()
        return self._shared

    def wait(self, until: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Look after the processes until something is so."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.children.watch()
            if until():
                return
            if time.monotonic() > deadline_s:
                reasons = [store.status().reason for store in self._opened]
                pytest.fail(f"not so in {timeout_s} s; stores: {reasons}")
            time.sleep(0.05)

    def close(self) -> None:
        for store in self._opened:
            store.close()
        self.children.stop()
