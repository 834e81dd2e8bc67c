# SPDX-License-Identifier: Apache-2.0
"""`moorage check` looks at the model too, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from appliance.cli import main
from tests.fakes.tiny_deepseek import write_tiny_deepseek


def test_check_says_what_is_wrong_with_the_model(tmp_path: Path) -> None:
    model = write_tiny_deepseek(tmp_path / "model", topk_method="x")
    flags = ["--json"]
    for setting in (
        f"server.state_dir={tmp_path}/state",
        "server.port=0",
        f"engine.model={model}",
        "engine.load_format=dummy",
        "engine.device=cpu",
    ):
        flags += ["--set", setting]
    result = CliRunner().invoke(main, ["check", *flags])
    assert result.exit_code == 1
    (problem,) = json.loads(result.output)["problems"]
    assert problem.startswith("engine.model: ") and "topk_method is 'x'" in problem
    write_tiny_deepseek(tmp_path / "model")
    result = CliRunner().invoke(main, ["check", *flags])
    assert result.exit_code == 0 and json.loads(result.output)["ok"]
    result = CliRunner().invoke(main, ["check", *flags, "--set", "engine.kv_dtype=fp8"])
    (problem,) = json.loads(result.output)["problems"]
    assert problem.startswith("engine.kv_dtype = 'fp8'")
