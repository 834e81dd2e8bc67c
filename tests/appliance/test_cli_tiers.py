# SPDX-License-Identifier: Apache-2.0
"""What `moorage tiers status` prints of what an engine says."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from appliance.cli import main

TIER = {"state": "up", "used_bytes": 3 << 20, "capacity_bytes": 4 << 20, "num_pages": 7}


@pytest.mark.parametrize(
    ("counters", "shown"),
    [
        ({}, "-"),
        ({"evicted_pages": 12.0}, "12"),
        ({"evicted": 195.0, "orphaned": 0.0}, "195"),
        ({"evicted": 195.0, "orphaned": 4.0}, "195, orphaned 4"),
    ],
)
def test_status_shows_what_made_room_and_what_was_left_without_its_head(
    monkeypatch: pytest.MonkeyPatch, counters: dict[str, float], shown: str
) -> None:
    def answer(*_: Any, **__: Any) -> dict[str, Any]:
        return {"data": [TIER | {"tier": "l3", "kind": "k", "counters": counters, "reason": ""}]}

    monkeypatch.setattr("appliance.cli_tiers.ask", answer)
    result = CliRunner().invoke(main, ["tiers", "status"])
    assert result.exit_code == 0, result.output
    head, row = (line for line in result.output.splitlines() if "made room" in line or "l3" in line)
    column = head.index("made room")
    assert row[column:].split("  ")[0].strip() == shown
