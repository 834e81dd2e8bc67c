# SPDX-License-Identifier: Apache-2.0
"""One TOML, typed overrides, errors that name the setting; and the check before a start."""

from __future__ import annotations

import importlib.metadata
import json
import re
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.check import find_problems
from appliance.cli import main
from appliance.config import (
    ApplianceConfig,
    config_from_table,
    load_config,
    read_resolved,
    write_resolved,
)
from appliance.typed_toml import ConfigError, flatten

MAX_SETTINGS = 80


def test_the_number_of_settings_stays_within_its_budget() -> None:
    assert len(flatten(ApplianceConfig())) <= MAX_SETTINGS


def test_the_file_that_the_operations_page_shows_is_one(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "operations.md"
    (shown,) = re.findall(r"^```toml\n(.*?)^```", page.read_text(), flags=re.S | re.M)
    (tmp_path / "moorage.toml").write_text(shown)
    config = load_config(tmp_path / "moorage.toml", [])
    assert list(config.problems()) == []
    assert config.server.api_keys == {"a-long-random-key": "team-a"}
    assert config.engine.tiers.l3_quota_bytes == 16 << 30


def test_a_file_and_overrides_are_read_with_their_types(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        '[server]\nport = 1\ncors_origins = ["http://a"]\napi_keys = { k = "t" }\n'
        "[engine]\nmax_slots = 2\ndrain_s = 3\n[engine.grammar]\nbudget_ms = 7\n"
    )
    config = load_config(path, ["server.port=2", "server.log_level=DEBUG", "engine.eager=true"])
    assert (config.server.port, config.server.log_level) == (2, "DEBUG")
    assert config.server.cors_origins == ("http://a",) and config.server.api_keys == {"k": "t"}
    assert (config.engine.max_slots, config.engine.grammar.budget_ms) == (2, 7)
    assert config.engine.drain_s == 3.0 and config.engine.eager is True


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("server.prot=1", "server.prot: is no setting (hint: did you mean server.port?)"),
        ("sever.port=1", "did you mean server?"),
        ("engine.grammar.budget=1", "did you mean engine.grammar.budget_ms?"),
        ("server.port=abc", "server.port: must be an integer; got 'abc'"),
        ("server.port=true", "server.port: must be an integer; got True"),
        ("server.port=70000", "server.port: must be in [0, 65535]; got 70000"),
        ("server.log_level=LOUD", "server.log_level: must be one of DEBUG"),
        ("server.host=example.org", "server.host: must be an IP address"),
        ("server.heartbeat_s=0", "server.heartbeat_s: must be >= 0.05"),
        ("server.cors_origins=x", "server.cors_origins: must be a list"),
        ("server=1", "server: must be a table"),
        ("server.port.x=1", "server.port: must be an integer"),
        ("server.port", "--set: wants a.b=value"),
        ("sessions.store=paper", "sessions.store"),
        ("engine.max_slots=0", "engine.max_slots"),
        ("engine.model=/nowhere", "engine.model"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(override: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_config(None, [override])
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(tmp_path / "bad.toml")


def test_paths_derive_from_state_dir_and_a_resolved_config_reads_back(tmp_path: Path) -> None:
    config = load_config(None, [f"server.state_dir={tmp_path}/s", "server.port=0"])
    assert config.server.run_dir == tmp_path / "s" / "run"
    assert config.engine.run_dir == str(tmp_path / "s" / "run")
    assert config.sessions.sqlite_path.startswith(str(tmp_path / "s"))
    write_resolved(config, tmp_path / "c.json")
    assert read_resolved(tmp_path / "c.json") == config
    assert (tmp_path / "c.json").stat().st_mode & 0o077 == 0


def test_check_finds_nothing_on_a_machine_where_it_can_start(tmp_path: Path) -> None:
    config = config_from_table({"server": {"state_dir": str(tmp_path), "port": 0}})
    assert find_problems(config) == []
    assert not list(tmp_path.glob(".probe*"))


def test_check_says_all_that_is_wrong_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = config_from_table(
            {"server": {"state_dir": str(tmp_path / "file" / "x"), "port": port}}
        )
        told = "\n".join(find_problems(config))
    assert f"server.port: cannot listen on 127.0.0.1:{port}: Address already in use" in told
    assert f"server.state_dir: cannot write to {tmp_path}/file/x" in told
    config = config_from_table(
        {"server": {"port": -1, "heartbeat_s": 0}, "engine": {"max_slots": 0}}, validate=False
    )
    told = "\n".join(find_problems(config))
    assert "server.port" in told and "server.heartbeat_s" in told and "engine.max_slots" in told


def test_check_opens_the_store(tmp_path: Path) -> None:
    (tmp_path / "moorage-sessions.db").write_bytes(b"no database" * 100)
    config = config_from_table({"server": {"state_dir": str(tmp_path), "port": 0}})
    (line,) = find_problems(config)
    assert line.startswith("sessions.store: sqlite: ") and "\n" not in line
    url = "redis://127.0.0.1:1/0"
    config = config_from_table(
        {
            "server": {"state_dir": str(tmp_path), "port": 0},
            "sessions": {"store": "redis", "redis_url": url, "store_timeout_ms": 500},
        }
    )
    (line,) = find_problems(config)
    assert line.startswith("sessions.store: redis: ")


def test_check_names_a_foreign_kernels_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    info = site / "kernels-0.18.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    monkeypatch.syspath_prepend(str(site))
    assert importlib.metadata.version("kernels") == "0.18.2"
    config = config_from_table({"server": {"state_dir": str(tmp_path), "port": 0}})
    (line,) = find_problems(config)
    assert "kernels" in line and "0.18.2" in line and "uninstall" in line


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["check", "--set", "engine.model=/nowhere/model.gguf"], "engine.model"),
        (["serve", "--set", "engine.model=/nowhere/model.gguf"], "engine.model"),
        (["check", "--set", "server.prot=1"], "did you mean server.port?"),
        (["serve", "--config", "/nowhere.toml"], "cannot be read"),
    ],
)
def test_a_wrong_start_is_one_line_and_exit_1(command: list[str], told: str) -> None:
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert told in result.output and len(result.output.strip().splitlines()) == 1


def test_serve_names_a_port_in_use_and_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--set", f"server.state_dir={tmp_path}", "--set", f"server.port={port}"]
        result = CliRunner().invoke(main, ["serve", *flags])
    assert result.exit_code == 1 and "Address already in use" in result.output
    assert len(result.output.strip().splitlines()) == 1
    # /dev/full's directory takes no file, as a full or read-only disk takes none.
    flags = ["--set", "server.state_dir=/proc/moorage", "--set", "server.port=0"]
    result = CliRunner().invoke(main, ["serve", *flags])
    assert result.exit_code == 1 and "server.state_dir: cannot write" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_config_show_masks_keys_and_prints_every_setting(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[server]\napi_keys = { secret-key = "me" }\n')
    result = CliRunner().invoke(main, ["config", "show", "--config", str(path)])
    shown = json.loads(result.output)
    assert shown["server"]["api_keys"] == {"sec...": "me"} and "secret" not in result.output
    assert set(shown) == {"server", "sessions", "engine"}


def test_usage_errors_exit_2_and_commands_without_a_server_say_so(tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["sessions", "show"]).exit_code == 2
    assert CliRunner().invoke(main, ["nonsense"]).exit_code == 2
    flags = ["--set", f"server.state_dir={tmp_path}"]
    result = CliRunner().invoke(main, ["sessions", "ls", *flags])
    assert result.exit_code == 1 and "no appliance runs" in result.output
