# SPDX-License-Identifier: Apache-2.0
"""A session moves between two appliances that share a session store and an L3 store."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtiers.mooncake_endpoints import ENDPOINTS_FILE
from tests.e2e.conftest import Appliance, Json
from tests.fakes.mooncake_processes import require_mooncake
from tests.fakes.redis_server import RedisServer

TEXTS = [
    f"Round {place}. " + " ".join(f"{word} {place * 31 + i}" for i in range(40))
    for place, word in enumerate(("apple", "brook", "candle"))
]


class SharingAppliance(Appliance):
    """One of two on this machine; the second is given the first one's Mooncake master."""

    def __init__(self, folder: Path, redis_url: str, master: str = "") -> None:
        self.settings_of_its_own = [  # type: ignore[misc]
            "--set", "engine.dtype=float32",
            "--set", "engine.max_context_len=2048",
            "--set", "engine.kv_pool_tokens=2048",
            "--set", f"engine.tiers.l2_bytes={128 << 20}",
            "--set", "engine.tiers.l3=mooncake",
            "--set", f"engine.tiers.mooncake_segment_bytes={128 << 20}",
            "--set", "engine.tiers.l3_wait_ms=5000",
            "--set", f"engine.tiers.mooncake_master={master}",
            "--set", "sessions.store=redis",
            "--set", f"sessions.redis_url={redis_url}",
        ]  # fmt: skip
        super().__init__(folder)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[SharingAppliance, SharingAppliance]]:
    require_mooncake()
    with tempfile.TemporaryDirectory(prefix="moorage-e2e-") as folder:
        root = Path(folder)
        for name in ("redis", "a", "b"):
            (root / name).mkdir()
        redis = RedisServer(root / "redis")
        redis.start()
        running: list[SharingAppliance] = []
        try:
            running.append(SharingAppliance(root / "a", redis.url))
            endpoints = json.loads((root / "a" / "r" / ENDPOINTS_FILE).read_text())
            running.append(SharingAppliance(root / "b", redis.url, endpoints["master"]))
            yield running[0], running[1]
        finally:
            for appliance in reversed(running):
                appliance.stop()
            redis.kill()


def say(appliance: Appliance, session_id: str, place: int) -> Json:
    return appliance.turn(session_id, TEXTS[place], max_output_tokens=24)


def text_of(turn: Json) -> str:
    return "".join(part["text"] for item in turn["output"] for part in item.get("content", ()))


def test_a_session_suspended_on_one_appliance_goes_on_on_another(
    pair: tuple[SharingAppliance, SharingAppliance],
) -> None:
    home, abroad = pair
    calm = home.session()
    want = [text_of(say(home, calm, place)) for place in range(3)]
    session_id = home.session(metadata={"from": "home"})
    said = [text_of(say(home, session_id, place)) for place in range(2)]
    parked = home.post(f"/v1/sessions/{session_id}/suspend")
    assert (parked["status"], parked["tier"]) == ("suspended", "l3")
    num_tokens = parked["num_tokens"]
    assert parked["kept_tokens"] >= num_tokens - 64
    found = abroad.get(f"/v1/sessions/{session_id}")
    assert (found["status"], found["metadata"]) == ("suspended", {"from": "home"})
    back = abroad.post(f"/v1/sessions/{session_id}/resume")
    assert num_tokens - 65 < back["restored_tokens"] == num_tokens - back["recompute_tokens"]
    turn = say(abroad, session_id, 2)
    assert sum(turn["x_cache"].values()) >= num_tokens // 64 * 64
    assert [*said, text_of(turn)] == want
    # And back again, without a word: what the turn added is computed where it is not found.
    assert home.get(f"/v1/sessions/{session_id}")["revision"] == 3
    assert home.get(f"/v1/sessions/{session_id}")["status"] == "idle"
    assert say(home, session_id, 0)["committed"]


def test_a_reader_is_told_to_come_back_when_its_appliance_stops(
    pair: tuple[SharingAppliance, SharingAppliance],
) -> None:
    """SIGTERM in the middle of a turn that is longer than the drain."""
    home, abroad = pair
    session_id = abroad.session()
    ask = {"max_output_tokens": 1500, "ignore_eos": True}
    seen: list[Json] = []
    is_stopping = False
    for event in abroad.events(session_id, "Count up from one.", **ask):
        if event["type"] == "response.output_text.delta" and not is_stopping:
            is_stopping = True
            abroad.process.send_signal(signal.SIGTERM)
        seen.append(event)
    last = seen.pop()
    assert last["type"] == "stream.reconnect"
    assert last["starting_after"] == seen[-1]["sequence_number"] == len(seen)
    assert abroad.process.wait(60) == 0
    left = home.get(f"/v1/sessions/{session_id}/turns/{last['turn_id']}")
    assert left["status"] == "running"  # for the next process, or for this one after a while
