# SPDX-License-Identifier: Apache-2.0
"""Mooncake's processes under small stand-ins: what restarts what, when, and what is told."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.children import CLIENT_TTL_S, MooncakeChildren, MooncakeSettings
from tests.fakes.clock import FakeClock

# Listens where it was told to, and writes down with which arguments and environment it was started.
PROGRAM = f"""#!{sys.executable}
import json, os, pathlib, socket, sys, time
flags = dict(arg.lstrip("-").split("=", 1) for arg in sys.argv[1:] if "=" in arg)
port = int(flags.get("rpc_port") or flags["port"])
listener = socket.create_server((flags.get("rpc_address") or flags["host"], port))
log = pathlib.Path(__file__).with_suffix(".log")
line = json.dumps({{"flags": flags, "env": dict(os.environ)}})
with log.open("a") as file: file.write(line + "\\n")
while True: listener.accept()
"""
ENDS_AT_ONCE = f"#!{sys.executable}\nraise SystemExit(3)\n"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("mooncake_master", "mooncake_client"):
        _write(directory / name, PROGRAM)
    return directory


Start = Callable[..., MooncakeChildren]


@pytest.fixture
def start(tmp_path: Path, programs: Path, clock: FakeClock) -> Iterator[Start]:
    started: list[MooncakeChildren] = []

    def start_(**settings: object) -> MooncakeChildren:
        children = MooncakeChildren(
            MooncakeSettings(**settings),  # type: ignore[arg-type]  # a test's own keywords
            tmp_path / "run",
            programs,
            lambda: clock() / 1000,
        )
        started.append(children)
        children.start()
        return children

    yield start_
    for children in started:
        children.stop()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _wait(children: MooncakeChildren, clock: FakeClock, names: set[str]) -> dict[str, int]:
    """Watch until these run and have written that they do, each time they were started."""
    return _watch_until(children, clock, names, lambda: _is_started(children, names))


def _watch_until(
    children: MooncakeChildren,
    clock: FakeClock,
    names: set[str],
    is_enough: Callable[[], bool] = lambda: True,
) -> dict[str, int]:
    """Watch until these run. A step of the clock is as long as a step of the real one."""
    for _ in range(3000):
        children.watch()
        if set(children.pids) == names and is_enough():
            return children.pids
        signal.sigtimedwait([], 0.02)
        clock.advance(20)
    pytest.fail(f"{names} do not run: {children.pids}")


def _is_started(children: MooncakeChildren, names: set[str]) -> bool:
    return all(len(_starts(children, name)) > children.restarts.get(name, 0) for name in names)


def _starts(children: MooncakeChildren, name: str) -> list[dict[str, dict[str, str]]]:
    log = (children.programs / name).with_suffix(".log")
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _end(children: MooncakeChildren, name: str) -> None:
    pid = children.pids[name]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


BOTH = {"mooncake_master", "mooncake_client"}


def test_master_and_owner_start_on_the_loopback_and_say_where(
    start: Start, clock: FakeClock, tmp_path: Path
) -> None:
    children = start(segment_bytes=1 << 26, protocol="rdma", device="mlx5_0")
    _wait(children, clock, BOTH)
    (master,), (owner,) = (_starts(children, name) for name in sorted(BOTH, reverse=True))
    told = json.loads((tmp_path / "run" / "mooncake.json").read_text())
    assert told["master"] == f"127.0.0.1:{master['flags']['rpc_port']}"
    assert told["metrics"] == f"127.0.0.1:{master['flags']['metrics_port']}"
    assert told["owner"] == f"127.0.0.1:{owner['flags']['port']}"
    assert (told["capacity_bytes"], told["has_disk"], told["starts"]) == (1 << 26, False, 1)
    assert master["flags"]["rpc_address"] == master["flags"]["metrics_host"] == "127.0.0.1"
    assert owner["flags"]["master_server_address"] == told["master"]
    assert (owner["flags"]["protocol"], owner["flags"]["device_names"]) == ("rdma", "mlx5_0")
    assert owner["flags"]["global_segment_size"] == str(1 << 26)
    assert "enable_offload" not in owner["flags"]
    assert told["disk_bytes"] == 0
    # Above where the engine lets pages go by itself.
    assert float(master["flags"]["eviction_high_watermark_ratio"]) == 0.95


def test_a_disk_tier_is_asked_for_with_its_quota(
    start: Start, clock: FakeClock, tmp_path: Path
) -> None:
    children = start(segment_bytes=1, ssd_dir=str(tmp_path / "ssd"), ssd_quota_bytes=1000)
    _wait(children, clock, BOTH)
    (owner,) = _starts(children, "mooncake_client")
    assert (tmp_path / "ssd").is_dir()
    assert owner["flags"]["enable_offload"] == "true"
    assert _starts(children, "mooncake_master")[0]["flags"]["enable_offload"] == "true"
    assert owner["env"]["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] == str(tmp_path / "ssd")
    assert owner["env"]["MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE"] == "1000"
    # The owner deletes files, oldest first, above where the engine lets pages go by itself.
    assert owner["env"]["MOONCAKE_OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO"] == "0.95"
    told = json.loads((tmp_path / "run" / "mooncake.json").read_text())
    assert (told["capacity_bytes"], told["disk_bytes"], told["has_disk"]) == (1001, 1000, True)


def test_a_master_that_ends_is_started_alone_on_its_port(start: Start, clock: FakeClock) -> None:
    children = start()
    before, address = _wait(children, clock, BOTH), children.master_address
    _end(children, "mooncake_master")
    assert children.watch()
    assert set(children.pids) == {"mooncake_client"}
    after = _wait(children, clock, BOTH)
    assert after["mooncake_client"] == before["mooncake_client"]
    assert children.master_address == address
    assert children.restarts == {"mooncake_master": 1, "mooncake_client": 0}


def test_an_owner_that_ends_takes_the_master_with_it(
    start: Start, clock: FakeClock, tmp_path: Path
) -> None:
    children = start()
    before = _wait(children, clock, BOTH)
    _end(children, "mooncake_client")
    children.watch()
    assert children.pids == {}
    after = _wait(children, clock, BOTH)
    assert not set(before.values()) & set(after.values())
    assert children.restarts == {"mooncake_master": 1, "mooncake_client": 1}
    assert json.loads((tmp_path / "run" / "mooncake.json").read_text())["starts"] == 2


def test_an_owner_with_a_disk_waits_for_a_master_that_others_run(
    start: Start, clock: FakeClock, tmp_path: Path
) -> None:
    theirs = start()
    _wait(theirs, clock, BOTH)
    master = theirs.master_address
    children = start(master=master, ssd_dir=str(tmp_path / "ssd"), ssd_quota_bytes=1)
    _wait(children, clock, {"mooncake_client"})
    _end(children, "mooncake_client")
    children.watch()
    clock.advance(1000 * CLIENT_TTL_S)
    children.watch()
    assert children.pids == {}
    clock.advance(1500)
    children.watch()
    assert set(children.pids) == {"mooncake_client"}
    assert set(theirs.pids) == BOTH
    assert json.loads((tmp_path / "run" / "mooncake.json").read_text())["metrics"] == ""


def test_the_metrics_of_a_master_that_others_run_are_told(start: Start, tmp_path: Path) -> None:
    start(master="127.0.0.1:1", metrics="10.0.0.5:9003")
    told = json.loads((tmp_path / "run" / "mooncake.json").read_text())
    assert (told["master"], told["metrics"]) == ("127.0.0.1:1", "10.0.0.5:9003")


@pytest.mark.parametrize("fault", ["missing", "ends at once"])
def test_programs_that_cannot_run_are_tried_ever_more_rarely_and_raise_nothing(
    start: Start, programs: Path, clock: FakeClock, fault: str
) -> None:
    for path in programs.iterdir():
        path.unlink() if fault == "missing" else _write(path, ENDS_AT_ONCE)
    children = start()
    for _ in range(1000):  # 200 seconds
        children.watch()
        clock.advance(200)
        if fault != "missing" and "mooncake_master" in children.pids:
            pid = children.pids["mooncake_master"]
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert children.restarts["mooncake_master"] <= 20
    for path in programs.glob("mooncake_*"):
        path.unlink()
    for name in BOTH:
        _write(programs / name, PROGRAM)
    clock.advance(20_000)
    _watch_until(children, clock, BOTH)  # those that ended at once wrote nothing


def test_stopping_ends_both_and_takes_back_where_they_were(
    start: Start, clock: FakeClock, tmp_path: Path
) -> None:
    children = start()
    pids = _wait(children, clock, BOTH)
    children.stop()
    assert children.pids == {}
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not (tmp_path / "run" / "mooncake.json").exists()
    children.watch()
    assert children.pids == {}
