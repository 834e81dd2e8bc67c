# SPDX-License-Identifier: Apache-2.0
"""The supervisor with small child processes: restarts, giving up, draining, no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from appliance.metrics import Metrics
from appliance.process_spawn import MAX_GAP_S, Pulse, RestartPolicy, describe_exit
from appliance.supervisor import StartError, bind_listener, lock_run_dir, read_state
from tests.fakes.signals import kill_now, stop_now

ROOT = Path(__file__).parents[2]

# Stand-ins for the engine and the API process; the supervisor finds them by module name.
ENGINE_CHILD = """
import signal, sys, time
if {dies}: sys.exit({dies})
signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))
while True: time.sleep(0.05)
"""
STUBBORN_ENGINE = """
import pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *a: asked.append(1))
pathlib.Path(__file__).with_name("listens").touch()
while len(asked) < 2: time.sleep(0.02)
pathlib.Path(__file__).with_name("ended").write_text("by itself")
"""
SLOW_ENGINE = """
import pathlib, signal, time
here = pathlib.Path(__file__).parent
asked = []
signal.signal(signal.SIGTERM, lambda *a: asked.append(1))
with (here / "starts").open("a") as starts:
    starts.write("+")
while not (asked and (here / "may_end").exists()): time.sleep(0.02)
"""
API_CHILD = """
import http.server, socket, sys
import os, threading, time
fd = int(sys.argv[sys.argv.index("--fd") + 1])
pulse = int(sys.argv[sys.argv.index("--heartbeat-fd") + 1])
def beat():
    while True:
        os.eventfd_write(pulse, 1)
        time.sleep(0.02)
threading.Thread(target=beat, daemon=True).start()
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(__import__("os").getpid()).encode()
        self.send_response(READY)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *a): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Answer, bind_and_activate=False)
server.socket = socket.socket(fileno=fd)
server.serve_forever()
"""
RUN = """
import sys
from pathlib import Path
from appliance import supervisor, process_spawn, logs
from appliance.config import config_from_table
logs.configure("supervisor", "INFO")
server = {"state_dir": sys.argv[1], "port": 0, "max_restarts": 3, "hang_s": float(sys.argv[2])}
config = config_from_table({"server": server})
original = supervisor.spawn
def spawn(module, args, pass_fds=()):
    return original({"engine.process": "fake_engine", "appliance.api_main": "fake_api"}[module],
                    args, pass_fds=pass_fds)
supervisor.spawn = spawn
sys.exit(supervisor.Supervisor(config).run())
"""


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> object:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
    return found


class Running:
    def __init__(
        self, folder: Path, dies: int = 0, engine: str = "", hang_s: float = 120.0
    ) -> None:
        self.folder = folder
        (folder / "fake_engine.py").write_text(engine or ENGINE_CHILD.format(dies=dies))
        ready = 503 if dies else 200  # as the real one, which is ready when the engine is
        (folder / "fake_api.py").write_text(API_CHILD.replace("READY", str(ready)))
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(folder), str(hang_s)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def state(self) -> dict[str, object]:
        return json.loads((self.folder / "run" / "state.json").read_text())  # type: ignore[no-any-return]

    def wait_ready(self) -> dict[str, object]:
        wait_for(lambda: (self.folder / "run" / "state.json").exists() and self.state()["ready"])
        return self.state()

    def stop(self) -> tuple[int, str, str]:
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moorage-") as name:
        yield Path(name)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):  # it may go between the two
        return False
    # A process that nobody has waited for yet is dead all the same.
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def test_it_says_ready_once_writes_its_state_and_stops_clean(folder: Path) -> None:
    running = Running(folder)
    state = running.wait_ready()
    pids = state["pids"]
    assert isinstance(pids, dict) and set(pids) == {"supervisor", "engine", "api"}
    assert read_state(folder / "run") == state
    assert httpx.get(str(state["url"]), timeout=60).text == str(pids["api"])
    status, out, _ = running.stop()
    assert status == 0
    assert out.count("moorage ready in") == 1 and str(state["url"]) in out
    assert not any(is_alive(pid) for pid in pids.values())
    assert read_state(folder / "run") is None


def test_an_engine_that_still_drains_for_nobody_is_asked_again_and_not_killed(folder: Path) -> None:
    running = Running(folder, engine=STUBBORN_ENGINE)
    running.wait_ready()
    wait_for((folder / "listens").exists)  # the API process may be ready before it
    status, _, err = running.stop()
    assert status == 0 and "killed" not in err
    assert (folder / "ended").read_text() == "by itself"


def test_a_killed_child_is_started_again_and_no_connection_is_refused(folder: Path) -> None:
    running = Running(folder)
    state = running.wait_ready()
    pids = dict(state["pids"])  # type: ignore[call-overload]
    for name in ("engine", "api"):
        kill_now(pids[name])
        # The very next connection attempt waits in the backlog instead of failing.
        assert httpx.get(str(state["url"]), timeout=60).status_code == 200
        wait_for(lambda name=name: running.state()["restarts"][name] == 1)  # type: ignore[index,misc]
    now = running.state()["pids"]
    assert isinstance(now, dict)
    assert now["engine"] != pids["engine"] and now["api"] != pids["api"]
    assert running.state()["url"] == state["url"]
    assert running.stop()[0] == 0


def test_a_child_that_hangs_is_killed_and_started_again_and_that_is_counted(folder: Path) -> None:
    running = Running(folder, hang_s=10.0)  # a busy machine may hold up a child that lives
    state = running.wait_ready()
    pids = dict(state["pids"])  # type: ignore[call-overload]
    stop_now(pids["api"])
    wait_for(lambda: running.state()["restarts"]["api"] == 1)  # type: ignore[index]
    after = running.state()
    # An engine that has never given a sign of life is still loading, however long that takes.
    assert after["hangs"] == {"engine": 0, "api": 1} and after["pids"]["engine"] == pids["engine"]  # type: ignore[index]
    assert after["pids"]["api"] != pids["api"]  # type: ignore[index]
    assert httpx.get(str(state["url"]), timeout=60).status_code == 200
    shown = Metrics(lambda: read_state(folder / "run")).render().decode()
    assert 'moorage_process_hangs_total{process="api"} 1.0' in shown
    assert 'moorage_process_restarts_total{process="engine"} 0.0' in shown
    status, _, err = running.stop()
    assert status == 0 and "api process hangs: no sign of life for" in err


def test_a_machine_that_stood_still_makes_nobody_look_hung() -> None:
    """Silence counts while somebody listens for it; a child that is silent on is found out."""
    pulse = Pulse()
    try:
        assert pulse.silent_s(1000.0) == 0.0  # not before the first sign
        os.eventfd_write(pulse.fd, 1)
        assert [pulse.silent_s(now_s) for now_s in (1000.5, 1001.0)] == [0.0, 0.5]
        assert pulse.silent_s(5001.0) == pytest.approx(0.5 + MAX_GAP_S)
        assert pulse.silent_s(5002.0) == pytest.approx(1.5 + MAX_GAP_S)
        os.eventfd_write(pulse.fd, 1)
        assert pulse.silent_s(9000.0) == 0.0
        silent_s = [pulse.silent_s(9000.0 + second) for second in range(1, 121)]
        assert silent_s == pytest.approx(list(range(1, 121)))
        pulse.reset()
        assert pulse.silent_s(9500.0) == 0.0
    finally:
        os.close(pulse.fd)


def test_children_do_not_outlive_a_killed_supervisor(folder: Path) -> None:
    running = Running(folder)
    pids = dict(running.wait_ready()["pids"])  # type: ignore[call-overload]
    running.process.kill()
    running.process.communicate(timeout=60)
    wait_for(lambda: not is_alive(pids["engine"]) and not is_alive(pids["api"]))


def test_an_appliance_starts_once_what_a_killed_supervisor_left_has_ended(folder: Path) -> None:
    """Else two API processes would go on with the same turns, and an engine find no place."""
    first = Running(folder, engine=SLOW_ENGINE)
    pids = dict(first.wait_ready()["pids"])  # type: ignore[call-overload]
    wait_for((folder / "starts").exists)
    first.process.kill()
    first.process.wait(60)
    second = Running(folder, engine=SLOW_ENGINE)
    assert second.process.stderr is not None
    assert any("still ends; waiting for it" in line for line in second.process.stderr)
    assert is_alive(pids["engine"]) and (folder / "starts").read_text() == "+"
    (folder / "may_end").touch()
    wait_for(lambda: dict(second.state()["pids"])["supervisor"] == second.process.pid)  # type: ignore[call-overload]
    assert not is_alive(pids["engine"]) and not is_alive(pids["api"])
    first.process.communicate(timeout=60)
    second.wait_ready()
    wait_for(lambda: (folder / "starts").read_text() == "++")
    assert second.stop()[0] == 0


@pytest.mark.parametrize("status", [1, 3])
def test_an_engine_that_cannot_start_ends_the_appliance_with_status_1(
    folder: Path, status: int
) -> None:
    running = Running(folder, dies=status)
    _, err = running.process.communicate(timeout=60)
    assert running.process.returncode == 1
    assert ("refused to start" if status == 1 else "too often; giving up") in err


def test_one_run_directory_holds_one_appliance(folder: Path) -> None:
    with lock_run_dir(folder / "run"):
        state = {"pids": {"supervisor": os.getpid()}}
        (folder / "run" / "state.json").write_text(json.dumps(state))
        with pytest.raises(StartError, match="another appliance runs in"):
            lock_run_dir(folder / "run", wait_s=3600.0)


def test_what_a_dead_appliance_left_and_does_not_end_is_named(folder: Path) -> None:
    with (
        lock_run_dir(folder / "run"),
        pytest.raises(StartError, match="another appliance in .* has not ended yet"),
    ):
        lock_run_dir(folder / "run", wait_s=0.0)


def test_a_port_in_use_is_named() -> None:
    with bind_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind_listener("127.0.0.1", port)


def test_restarts_wait_longer_each_time_and_are_bounded_within_a_minute() -> None:
    policy = RestartPolicy(3)
    delays = [policy.next_delay_s(now_s) for now_s in (0.0, 1.0, 2.0)]
    assert all(delay is not None for delay in delays) and delays == sorted(delays)  # type: ignore[type-var]
    assert policy.next_delay_s(3.0) is None
    assert policy.next_delay_s(61.5) == delays[1] or policy.next_delay_s(62.5) is not None


def test_an_exit_is_described_in_words() -> None:
    assert describe_exit(3) == "exit 3"
    assert describe_exit(-9) == "signal SIGKILL"
