# SPDX-License-Identifier: Apache-2.0
"""docs/first-session.md as a newcomer runs it: every command, top to bottom, in one shell."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fakes.appliance import RunningApp, says

PAGE = Path(__file__).parents[2] / "docs" / "first-session.md"
CALL = '<tool_call>[{"name": "read_file", "arguments": {"path": "README.md"}}]</tool_call>'
COMMANDS = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)


def _curl_can_post_json() -> bool:
    """Whether curl is there and knows `--json`, new in 7.82; and whether jq is."""
    if not (shutil.which("curl") and shutil.which("jq")):
        return False
    said = subprocess.run(["curl", "--help", "all"], capture_output=True, text=True, check=False)
    return "--json" in said.stdout


@pytest.mark.skipif(not _curl_can_post_json(), reason="curl with --json, or jq, is not installed")
def test_every_command_of_the_page_does_what_the_page_says(app: RunningApp, tmp_path: Path) -> None:
    app.engine.script = says(CALL, "It is a server for coding agents.", "Server.")
    script = "set -euo pipefail\n" + "\n".join(COMMANDS) + '\necho; echo "$SESSION $CHILD $TURN"\n'
    assert script.count("http://127.0.0.1:8000") == 1
    script = script.replace("http://127.0.0.1:8000", app.url)
    ran = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert '"error"' not in ran.stdout
    session_id, child_id, turn_id = ran.stdout.split("\n")[-2].split()

    call = json.loads((tmp_path / "turn.json").read_text())
    assert (call["status"], call["stop_reason"]) == ("completed", "tool_use")
    shown = json.loads(re.findall(r"^```json\n(.*?)^```", PAGE.read_text(), re.S | re.M)[0])
    (item,) = call["output"]
    assert item == {**shown, "id": item["id"], "call_id": item["call_id"]}

    lines = (tmp_path / "stream.txt").read_text().split("\n")
    events = [line for line in lines if line.startswith("event: ")]
    assert events[0] == "event: turn.created" and events[-1] == "event: turn.completed"
    for number in range(1, len(events) + 1):  # the first 4 once, the others replayed as well
        assert ran.stdout.count(f"\nid: {number}\n") == (1 if number <= 4 else 2)

    items = app.get(f"/v1/sessions/{session_id}/items").json()["data"]
    kinds = ["message", "function_call", "function_call_output", "message"]
    assert [one["type"] for one in items] == kinds
    session = app.get(f"/v1/sessions/{session_id}").json()
    assert (session["status"], session["last_turn"]) == ("idle", turn_id)
    assert app.get(f"/v1/sessions/{child_id}").status_code == 404
