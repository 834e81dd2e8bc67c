# SPDX-License-Identifier: Apache-2.0
"""A whole appliance in a folder, and who ends its processes at random.

Does not know: clients, what is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from appliance.children import free_port
from benchmarks.soak.ide_client import until

ROOT = Path(__file__).parents[2]
CONTEXT_LEN = 2048
KINDS = {  # what is killed, how often
    "engine": 6,
    "api": 6,
    "engine api": 4,
    "engine stops": 3,
    "engine asked": 2,
    "tree": 2,
    "supervisor": 3,
    "restart": 2,
}


class Appliance:
    """`moorage serve` in a folder, started again and again on the same port."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.log = (folder / "log").open("ab")
        self.port = free_port("127.0.0.1")
        self.settings = [
            f"server.port={self.port}",
            f"server.state_dir={folder}/s",
            f"server.run_dir={folder}/r",
            "server.drain_s=4",
            "server.heartbeat_s=1",
            "server.max_restarts=1000",
            f"engine.model={model}",
            "engine.dtype=float32",
            "engine.num_threads=1",
            "engine.page_size=16",
            f"engine.max_context_len={CONTEXT_LEN}",
            f"engine.kv_pool_tokens={CONTEXT_LEN}",
            "engine.drain_s=3",
            "engine.tiers.l2_bytes=1500000",
            f"engine.tiers.l3_quota_bytes={64 << 20}",
            "engine.tiers.l3_wait_ms=2000",
        ]
        self.num_refused_starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def flags(self) -> list[str]:
        return [part for setting in self.settings for part in ("--set", setting)]

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "appliance", "serve", *self.flags()],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )

    async def wait_ready(self) -> None:
        """Until it serves; one that refuses to start is started again, as an init system does."""

        async def is_ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                self.num_refused_starts += 1
                self.start()
                await asyncio.sleep(0.5)
            try:
                async with httpx.AsyncClient() as http:
                    return (await http.get(f"{self.url}/ready", timeout=2)).status_code == 200
            except httpx.TransportError:
                return False

        await until(is_ready, "the appliance is ready")

    @property
    def pids(self) -> dict[str, int]:
        try:
            state = json.loads((self.folder / "r" / "state.json").read_text())
        except (OSError, ValueError):
            return {}
        return {name: pid for name, pid in state["pids"].items() if pid is not None}

    def admin_key(self) -> str:
        return (self.folder / "r" / "admin.key").read_text()

    def processes(self) -> list[int]:
        """Everything alive that was started for this folder."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                is_ours = (
                    entry.name.isdigit()
                    and str(self.folder).encode() in (entry / "cmdline").read_bytes()
                )
                if is_ours and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    async def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, 60)

    def end(self) -> None:
        """Leave nothing behind, whatever went wrong."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        self.log.close()


class Killer:
    """Ends processes of one appliance; `kill` returns once what it killed has come again."""

    def __init__(self, appliance: Appliance, seed: int) -> None:
        self.appliance = appliance
        self.rng = random.Random(f"{seed}/kills")

    async def kill(self) -> str:
        kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
        before = self.appliance.pids
        if kind == "engine stops":
            await self._pause_engine(before)
        elif kind in ("tree", "supervisor"):
            await self._kill_supervisor(kind, before)
        elif kind == "engine asked":
            await self._kill_children(["engine"], before, signal.SIGTERM)
        elif kind == "restart":
            await self.appliance.stop()
            self.appliance.start()
            await self.appliance.wait_ready()
        else:
            await self._kill_children(kind.split(), before)
        if self.rng.random() < 0.7:
            await self.appliance.wait_ready()
        return kind

    async def _pause_engine(self, pids: dict[str, int]) -> None:
        pid = pids["engine"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(self.rng.uniform(0.5, 4.0))
            os.kill(pid, signal.SIGCONT)

    async def _kill_children(
        self, names: list[str], before: dict[str, int], how: signal.Signals = signal.SIGKILL
    ) -> None:
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                os.kill(before[name], how)

        async def are_back() -> bool:
            now = self.appliance.pids
            return all(now.get(name, before[name]) != before[name] for name in names)

        await until(are_back, f"{names} run again")

    async def _kill_supervisor(self, kind: str, pids: dict[str, int]) -> None:
        """Its children end with it, killed in the same moment or by themselves."""
        process = self.appliance.process
        assert process is not None
        names = ("supervisor",) if kind == "supervisor" else ("supervisor", "engine", "api")
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[name], signal.SIGKILL)
        process.wait()
        if self.rng.random() < 0.5:  # else the next is started beside those that still end

            async def are_gone() -> bool:
                return not self.appliance.processes()

            await until(are_gone, "the children of a supervisor that was killed have ended", 30)
        self.appliance.start()
        await self.appliance.wait_ready()
