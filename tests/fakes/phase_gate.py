# SPDX-License-Identifier: Apache-2.0
"""Holds an engine's tiers in the middle of one kind of move, so that something may happen there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from engine.loop.server import EngineServer
from kvtiers.device_memory import Body, DeviceMemory, Incoming, Wait
from kvtiers.host_pool import HostPool
from kvtiers.layered_load import LayeredLoad
from tests.fakes.memory_store import MemoryStore

PHASES = ("write_back", "store", "probe", "fetch", "load_back")
STORE_PHASES = ("store", "probe", "fetch")
WAIT_S = 60.0


class PhaseGate:
    """The first call of `phase` says that it is in, and waits until it may go on."""

    def __init__(self, phase: str) -> None:
        assert phase in PHASES
        self.phase = phase
        self.is_in = threading.Event()
        self.may_go_on = threading.Event()
        self.then: Callable[[], None] = lambda: None
        """What the held call does when it goes on, before its work; it may raise."""

    def enter(self, phase: str) -> None:
        if phase != self.phase or self.is_in.is_set():
            return
        self.is_in.set()
        assert self.may_go_on.wait(WAIT_S), f"{phase} was held for good"
        self.then()


class GatedStore(MemoryStore):
    """A store whose calls pass a gate before they do anything; none: they just pass."""

    gate: PhaseGate | None = None

    def _enter(self, phase: str) -> None:
        if self.gate is not None:
            self.gate.enter(phase)

    def probe(self, keys: Sequence[str]) -> int:
        self._enter("probe")
        return super().probe(keys)

    def put(
        self, keys: Sequence[str], blobs: Sequence[memoryview], parents: Sequence[str] | None = None
    ) -> list[bool]:
        self._enter("store")
        return super().put(keys, blobs, parents)

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        self._enter("fetch")
        return super().get(keys, into)


class GatedMemory:
    """L1 whose copies pass a gate before the first byte moves."""

    def __init__(self, memory: DeviceMemory, gate: PhaseGate) -> None:
        self._memory = memory
        self._gate = gate
        self.kind = memory.kind

    def read(self, pages: Sequence[int], into: Sequence[Body]) -> None:
        self._gate.enter("write_back")
        self._memory.read(pages, into)

    def write(self, pages: Iterable[tuple[int, Body]]) -> Wait | None:
        self._gate.enter("load_back")
        return self._memory.write(pages)

    def write_layers(self, pages: Incoming, load: LayeredLoad) -> None:
        self._gate.enter("load_back")
        self._memory.write_layers(pages, load)


def put_gate(server: EngineServer, gate: PhaseGate) -> None:
    """For `LiveEngine(prepare=...)`: copies of L1 pass the gate."""
    plane = server._tiers._plane
    assert plane is not None
    plane.transfers._device = GatedMemory(plane.transfers._device, gate)


def pool_of(server: EngineServer) -> HostPool:
    plane = server._tiers._plane
    assert plane is not None
    return plane.transfers.pool
