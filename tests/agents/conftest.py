# SPDX-License-Identifier: Apache-2.0
"""One scripted appliance for all agents. `make test-agents` installs them and runs these tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents.running_agents import ROOT, Agent
from tests.fakes.scripted_answers import Turn, write_scenario
from tests.fakes.scripted_model_serve import DEFAULT_FAMILY, write_scripted_model

PROGRAMS = "MOORAGE_AGENTS_DIR"
READY_WAIT_S = 120.0
KV_POOL_TOKENS = 768 * 1024

Json = dict[str, Any]

# Without the agents nothing here can run: `make test` leaves it to `make test-agents`.
collect_ignore_glob = [] if os.environ.get(PROGRAMS) else ["test_*.py"]

_table: list[str] = []


class ScriptedAppliance:
    """`moorage serve` with a scripted model, and what its model was asked."""

    def __init__(self, folder: Path, family: str, more: Sequence[str]) -> None:
        self.model = write_scripted_model(folder / "model", family)
        self.log = folder / "log"
        settings = [
            "server.port=0",
            f"server.state_dir={folder}/s",
            f"server.run_dir={folder}/r",
            "server.drain_s=1",
            f"engine.model={self.model}",
            "engine.load_format=dummy",
            "engine.dtype=float32",
            "engine.token_budget=8192",
            f"engine.kv_pool_tokens={KV_POOL_TOKENS}",
            *(setting.format(folder=folder) for setting in more),
        ]
        command = [sys.executable, "-m", "tests.fakes.scripted_model_serve", *settings]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        self.state = folder / "r" / "state.json"
        self.url = self._wait_ready()
        self.http = httpx.Client(base_url=self.url, timeout=60.0)

    def scenario(self, name: str, turns: Sequence[Turn]) -> str:
        return write_scenario(self.model, name, turns)

    def asked(self, scenario: str) -> list[Json]:
        """The prompts of a scenario's turns, in order."""
        return [r for r in self.transcript() if r.get("scenario") == scenario]

    def side_requests(self, scenario: str) -> list[Json]:
        """The prompts that came with a scenario's text and are none of its turns."""
        return [r for r in self.transcript() if r.get("side_of") == scenario]

    def transcript(self) -> list[Json]:
        path = self.model / "transcript.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert not [r for r in records if "left_script" in r], "a grammar forbade the script"
        return records

    def last_session(self) -> Json:
        """The implicit session that was used last, as the server shows it."""
        found = self.http.get("/v1/implicit_sessions").json()["data"][0]
        return dict(self.http.get(f"/v1/implicit_sessions/{found['name']}").json())

    def stop(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()[-3000:]

    def _wait_ready(self) -> str:
        deadline = time.monotonic() + READY_WAIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                url = str(json.loads(self.state.read_text())["url"])
                if httpx.get(f"{url}/ready", timeout=2.0).status_code == 200:
                    return url
            except (OSError, ValueError, httpx.TransportError):
                pass
            time.sleep(0.1)
        raise RuntimeError(f"the appliance is not ready:\n{self.log.read_text()[-3000:]}")


@contextlib.contextmanager
def serving(family: str, *more: str) -> Iterator[ScriptedAppliance]:
    """An appliance with `more` settings, in which `{folder}` is a folder of its own."""
    # Not pytest's tmp_path: the names of sockets below must stay short.
    with tempfile.TemporaryDirectory(prefix="moorage-agents-") as folder:
        running = ScriptedAppliance(Path(folder), family, more)
        try:
            yield running
        finally:
            running.stop()


@pytest.fixture(scope="session")
def served() -> Iterator[ScriptedAppliance]:
    with serving(DEFAULT_FAMILY) as running:
        yield running


@pytest.fixture(scope="module")
def served_small() -> Iterator[ScriptedAppliance]:
    """A device pool that one long conversation fills, with a host tier and a store below it."""
    settings = (
        "engine.max_context_len=32768",
        "engine.kv_pool_tokens=32768",
        "engine.tiers.l2_bytes=16777216",
        "engine.tiers.l3=file",
        "engine.tiers.l3_dir={folder}/l3",
    )
    with serving(DEFAULT_FAMILY, *settings) as running:
        yield running


@pytest.fixture(scope="module", params=["qwen_xml", "deepseek_v3_2"])
def served_family(request: pytest.FixtureRequest) -> Iterator[ScriptedAppliance]:
    """Models of other families: calls as tagged parameters, typed by the agents' own schemas."""
    with serving(request.param) as running:
        yield running


@pytest.fixture
def agent_at(tmp_path: Path) -> Callable[[str, str, str], Agent]:
    """Makes an agent for a URL, in a folder; missing: skipped, but a failure under CI."""

    def make(name: str, url: str, folder: str) -> Agent:
        agent = Agent(
            name=name,
            programs=Path(os.environ[PROGRAMS]).absolute(),
            url=url,
            home=tmp_path / folder / "home",
            work=tmp_path / folder / "work",
        )
        if not agent.program.exists():
            reason = f"{name} is not installed in {agent.programs} (scripts/agents)"
            if os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)
        agent.prepare()
        return agent

    return make


@pytest.fixture
def agent_of(
    served: ScriptedAppliance, agent_at: Callable[[str, str, str], Agent]
) -> Callable[[str], Agent]:
    """Makes an agent by its name, ready to run."""
    return lambda name: agent_at(name, served.url, "agent")


@pytest.fixture
def report() -> Callable[[str], None]:
    """Adds a line to what is printed at the end."""
    return _table.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _table:
        terminalreporter.section("agents")
        terminalreporter.write_line(f"{'agent':<22}{'turns':>6}{'cached share':>24}{'seconds':>10}")
        for line in _table:
            terminalreporter.write_line(line)
