# SPDX-License-Identifier: Apache-2.0
"""Processes die between turns; the next turn goes on from pages that outlived them."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Appliance, Json
from tests.fakes.mooncake_processes import require_mooncake
from tests.fakes.signals import is_stopped, stop_now

PAGE_SIZE = 64
# What it is asked of each turn; long enough that a turn fills pages.
TEXTS = [
    f"Round {place}. " + " ".join(f"{word} {place * 31 + i}" for i in range(40))
    for place, word in enumerate(("apple", "brook", "candle", "drum"))
]
KEYS = {"undisturbed": "k1", "killed": "k2"}


class TieredAppliance(Appliance):
    """Small pools, exact arithmetic, and a tenant for each conversation that must share nothing."""

    settings_of_its_own = [
        "--set", "engine.dtype=float32",
        "--set", "engine.max_context_len=2048",
        "--set", "engine.kv_pool_tokens=2048",
        "--set", f"engine.tiers.l2_bytes={256 << 20}",
        "--set", f"engine.tiers.l3_quota_bytes={512 << 20}",
        "--set", "engine.tiers.l3_wait_ms=5000",
        "--set", "server.hang_s=10",  # a busy machine may hold up an engine that lives
        "--set", 'server.api_keys={ k1 = "one", k2 = "two" }',
    ]  # fmt: skip

    def use(self, conversation: str) -> None:
        """Act for the tenant of one conversation."""
        self.http.headers["authorization"] = f"Bearer {KEYS[conversation]}"

    def pids(self, *names: str) -> list[int]:
        return [self.state["pids"][name] for name in names]

    def kill_all(self, *names: str) -> None:
        """kill -9 of several processes in one moment, and wait for those that come after.

        An engine that hangs is left to whoever watches it.
        """
        before = self.pids("engine", "api")
        if "engine hangs" in names:
            stop_now(self.state["pids"]["engine"])
            names = tuple(name.removesuffix(" hangs") for name in names)
        for name in names:
            if name != "engine" or not is_stopped(self.state["pids"][name]):
                os.kill(self.state["pids"][name], signal.SIGKILL)
        if "supervisor" in names:
            self.process.wait(60)
            for pid in before:
                wait_gone(pid)
            self.http.close()
            self.start()
            return
        deadline = time.monotonic() + 60
        while any(pid in before for pid in self.pids(*names)):
            assert time.monotonic() < deadline, "nothing was restarted"
            time.sleep(0.05)
        self.wait_ready()

    def admin(self, method: str, path: str) -> Json:
        """Act for the operator of this machine."""
        key = (self.folder / "r" / "admin.key").read_text()
        headers = {"authorization": f"Bearer {key}"}
        reply = self.http.request(method, path, headers=headers)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def check_pages(self) -> dict[str, float]:
        """Every page is in one place, and none is on its way, once nothing moves."""
        deadline = time.monotonic() + 60
        while True:
            stats = self.admin("GET", "/admin/engine/stats")["stats"]
            if not stats["transfers_in_flight"] and not stats["in_flight_pages"]:
                break
            assert time.monotonic() < deadline, stats
            time.sleep(0.1)
        places = ("free", "owned", "cached", "in_flight")
        assert sum(stats[f"{place}_pages"] for place in places) == stats["num_pages"]
        assert (
            sum(stats[f"{place}_l2_pages"] for place in ("free", "cached")) == stats["num_l2_pages"]
        )
        return dict(stats)


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"{pid} lives on"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def tiered() -> Iterator[TieredAppliance]:
    with tempfile.TemporaryDirectory(prefix="moorage-e2e-") as folder:
        running = TieredAppliance(Path(folder))
        try:
            yield running
        finally:
            running.stop()


def say(appliance: TieredAppliance, session_id: str, place: int) -> Json:
    return appliance.turn(session_id, TEXTS[place], max_output_tokens=40)


def text_of(turn: Json) -> str:
    return "".join(part["text"] for item in turn["output"] for part in item.get("content", ()))


def test_after_any_death_the_next_turn_finds_its_pages_and_says_the_same(
    tiered: TieredAppliance,
) -> None:
    """kill -9 of the API process, of it beside an engine that hangs, and of everything."""
    tiered.use("undisturbed")
    calm = tiered.session()
    want = [text_of(say(tiered, calm, place)) for place in range(4)]
    tiered.use("killed")
    session_id = tiered.session()
    first = say(tiered, session_id, 0)
    assert first["x_cache"]["l2"] == first["x_cache"]["l3"] == 0
    said = [text_of(first)]
    tiers_used = []
    for place, victims in enumerate(
        (["api"], ["engine hangs", "api"], ["supervisor", "engine", "api"]), start=1
    ):
        known = int(tiered.get(f"/v1/sessions/{session_id}")["num_tokens"])
        tiered.admin("POST", "/admin/tiers/drain")
        tiered.kill_all(*victims)
        tiered.use("killed")
        assert tiered.get(f"/v1/sessions/{session_id}")["num_tokens"] == known
        turn = say(tiered, session_id, place)
        said.append(text_of(turn))
        found = turn["x_cache"]
        full_pages = (known - 1) // PAGE_SIZE * PAGE_SIZE
        assert sum(found.values()) >= full_pages > 0, (victims, found, known)
        tiers_used.append({tier for tier, tokens in found.items() if tokens})
        tiered.check_pages()
    assert said == want
    assert [min(tiers) for tiers in tiers_used] == ["l1", "l2", "l3"]


def test_the_commands_show_drain_and_check_the_tiers(tiered: TieredAppliance) -> None:
    assert "came down" in tiered.cli("tiers", "drain")
    status = tiered.cli("tiers", "status")
    for word in ("l1", "cpu", "l2", "shared_memory", "l3", "file", "up"):
        assert word in status
    checked = tiered.cli("cache", "verify")
    assert "l2: " in checked and " 0 bad" in checked
    metrics = tiered.http.get("/metrics").text
    assert 'moorage_tier_up{kind="file",tier="l3"} 1.0' in metrics


class MooncakeAppliance(TieredAppliance):
    """L3 is Mooncake, with its disk tier."""

    def __init__(self, folder: Path) -> None:
        self.settings_of_its_own = [  # type: ignore[misc]
            *TieredAppliance.settings_of_its_own,
            "--set", "engine.tiers.l3=mooncake",
            "--set", f"engine.tiers.mooncake_segment_bytes={128 << 20}",
            "--set", f"engine.tiers.mooncake_ssd_dir={folder}/ssd",
            "--set", f"engine.tiers.mooncake_ssd_quota_bytes={512 << 20}",
        ]  # fmt: skip
        super().__init__(folder)


def test_after_the_death_of_everything_mooncake_s_disk_has_the_pages() -> None:
    """kill -9 of the supervisor (its Mooncake processes die with it), the engine and the API."""
    require_mooncake()
    with tempfile.TemporaryDirectory(prefix="moorage-e2e-") as folder:
        appliance = MooncakeAppliance(Path(folder))
        try:
            appliance.use("undisturbed")
            calm = appliance.session()
            want = [text_of(say(appliance, calm, place)) for place in range(2)]
            appliance.use("killed")
            session_id = appliance.session()
            said = [text_of(say(appliance, session_id, 0))]
            known = int(appliance.get(f"/v1/sessions/{session_id}")["num_tokens"])
            drained = appliance.admin("POST", "/admin/tiers/drain?timeout_s=60")
            assert drained["is_flushed"] and drained["num_pending"] == 0
            appliance.kill_all("supervisor", "engine", "api")
            appliance.use("killed")
            assert appliance.get(f"/v1/sessions/{session_id}")["num_tokens"] == known
            turn = say(appliance, session_id, 1)
            found = turn["x_cache"]
            assert found["l3"] >= (known - 1) // PAGE_SIZE * PAGE_SIZE > 0, (found, known)
            assert [*said, text_of(turn)] == want
            appliance.check_pages()
        finally:
            appliance.stop()
