# SPDX-License-Identifier: Apache-2.0
"""One real appliance for all end-to-end tests: `moorage serve`, the default model, real kills."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from tests.fakes.appliance import sse_events
from tests.fakes.signals import kill_now

ROOT = Path(__file__).parents[2]
READY_WAIT_S = 180.0
Json = dict[str, Any]


class Appliance:
    """A running appliance and the calls tests make to it."""

    settings_of_its_own: ClassVar[list[str]] = []

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.settings = [
            "--set", "server.port=0",
            "--set", f"server.state_dir={folder}/s",
            "--set", f"server.run_dir={folder}/r",
            "--set", "server.drain_s=2",
            "--set", "engine.drain_s=1",
            *self.settings_of_its_own,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        """Start it, again where it has ended, and wait until it serves."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "appliance", "serve", *self.settings],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        self.wait_ready()
        self.http = httpx.Client(base_url=self.url, timeout=120.0)

    @property
    def state(self) -> Json:
        return dict(json.loads((self.folder / "r" / "state.json").read_text()))

    @property
    def url(self) -> str:
        return str(self.state["url"])

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_WAIT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/ready", timeout=2.0).status_code == 200:
                    return
            except (OSError, ValueError, httpx.TransportError):
                pass
            time.sleep(0.1)
        raise RuntimeError(f"the appliance is not ready:\n{self.log.read_text()[-3000:]}")

    def kill(self, name: str) -> None:
        """kill -9 one of its processes, as state.json names it; it is dead by then."""
        kill_now(self.state["pids"][name])

    def stop(self) -> int:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def cli(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "appliance", *arguments, *self.settings]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def post(self, path: str, body: Json | None = None) -> Json:
        reply = self.http.post(path, json=body or {})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def get(self, path: str) -> Json:
        reply = self.http.get(path)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def session(self, **fields: Any) -> str:
        return str(self.post("/v1/sessions", {"model": "default", **fields})["id"])

    def turn(self, session_id: str, items: Any, **fields: Any) -> Json:
        body = {"input": items, "temperature": 0.0, **fields}
        return self.post(f"/v1/sessions/{session_id}/turns", body)

    def events(self, session_id: str, items: Any, **fields: Any) -> Iterator[Json]:
        body = {"input": items, "stream": True, "temperature": 0.0, **fields}
        path = f"/v1/sessions/{session_id}/turns"
        with self.http.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            yield from sse_events(reply)

    def replay(self, session_id: str, turn_id: str, after: int) -> list[Json]:
        """Follow a turn from a number on, as a client does that lost its connection."""
        path = f"/v1/sessions/{session_id}/turns/{turn_id}/events"
        deadline = time.monotonic() + READY_WAIT_S
        events: list[Json] = []
        while True:
            try:
                with self.http.stream("GET", path, params={"starting_after": after}) as reply:
                    assert reply.status_code == 200, reply.read()
                    for event in sse_events(reply):
                        events.append(event)
                        after = event["sequence_number"]
                return events
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.1)


@pytest.fixture(scope="session")
def appliance() -> Iterator[Appliance]:
    # Not pytest's tmp_path: the names of sockets below must stay short.
    with tempfile.TemporaryDirectory(prefix="moorage-e2e-") as folder:
        running = Appliance(Path(folder))
        try:
            yield running
        finally:
            running.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the appliance's log beside a failure."""
    report = yield
    running = item.funcargs.get("appliance")
    if report.failed and isinstance(running, Appliance):
        report.sections.append(("the appliance's log", running.log.read_text()[-4000:]))
    return report
