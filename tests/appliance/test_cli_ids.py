# SPDX-License-Identifier: Apache-2.0
"""What the CLI makes of ids that are none."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from appliance.cli import main
from appliance.supervisor import ADMIN_KEY_FILE, STATE_FILE
from tests.fakes.appliance import RunningApp

ODD_IDS = ["", "nope", "../x", "..", "a?b#c", "a/b", "%", " ", "s" * 300]


@pytest.mark.parametrize("odd_id", ODD_IDS)
@pytest.mark.parametrize("command", ["show", "explain", "cancel", "fork", "suspend", "tail"])
def test_an_odd_session_id_ends_a_command_with_one_line(
    app: RunningApp, command: str, odd_id: str
) -> None:
    server = app.config.server
    state = {"url": str(app.http.base_url), "pids": {"supervisor": os.getpid()}}
    (server.run_dir / STATE_FILE).write_text(json.dumps(state))
    (server.run_dir / ADMIN_KEY_FILE).write_text("key")
    args = ["sessions", command, odd_id, "--set", f"server.run_dir={server.run_dir}"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("moorage: ") and result.stderr.count("\n") == 1
