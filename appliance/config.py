# SPDX-License-Identifier: Apache-2.0
"""The one configuration of an appliance: composed of the rooms' configs, loaded, validated once.

Does not know: what the rooms do with their settings. The only module that reads the environment.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from appliance.typed_toml import ConfigError, apply_overrides, build, read_toml, to_plain
from engine.config import EngineConfig, TiersConfig
from sessions.config import SessionsConfig

# A ZMQ ipc path is a Unix socket address: 107 bytes, of which the file name needs up to 30.
MAX_RUN_DIR_BYTES = 76


def _default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(Path.home(), ".local", "state")
    return Path(base) / "moorage"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side: where it listens, who may call, how long it keeps what it streamed."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """TCP port; 0 takes a free one (printed in the ready line and in state.json)."""
    api_keys: dict[str, str] = field(default_factory=dict)
    """API key -> tenant. Empty: no key is asked for and everyone is tenant `default`."""
    cors_origins: tuple[str, ...] = ()
    """Origins that browsers may call from (IDE web views); `*` for any, others change nothing."""
    state_dir: Path = field(default_factory=_default_state_dir)
    """Directory of what must survive a restart: the session store, the turn journals."""
    run_dir: Path = Path("")
    """Directory of sockets, pids and state.json; empty: `run` in state_dir."""
    heartbeat_s: float = 5.0
    """Seconds between comment lines on a silent stream."""
    replay_minutes: float = 10.0
    """Minutes a finished turn's events stay replayable."""
    max_body_mb: int = 64
    """Largest request body in MiB."""
    drain_s: float = 10.0
    """Seconds that running turns get to finish when the appliance is asked to stop."""
    max_restarts: int = 8
    """Restarts of one process within a minute before the appliance gives up."""
    hang_s: float = 120.0
    """Seconds without a sign of life after which a process is killed and restarted; 0: never."""
    model_name: str = ""
    """Name the model is served under; empty: the engine's own name for it."""
    model_aliases: dict[str, str] = field(default_factory=dict)
    """Other names that clients send -> model name."""
    alias_all: bool = False
    """Serve every model name a client sends with the loaded model."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level that is logged, in every process."""

    def problems(self) -> Iterator[ConfigError]:
        """Every value out of range."""
        if not _is_address(self.host):
            yield ConfigError(
                "server.host", f"must be an IP address or localhost; got {self.host!r}"
            )
        if not 0 <= self.port <= 65535:
            yield ConfigError("server.port", f"must be in [0, 65535]; got {self.port}")
        for name, least in (
            ("heartbeat_s", 0.05),
            ("replay_minutes", 0.0),
            ("max_body_mb", 1),
            ("drain_s", 0.0),
            ("max_restarts", 0),
            ("hang_s", 0.0),
        ):
            value = getattr(self, name)
            if value < least:
                yield ConfigError(f"server.{name}", f"must be >= {least}; got {value}")
        if "" in self.api_keys or "" in self.api_keys.values():
            yield ConfigError("server.api_keys", "keys and tenants must not be empty")
        if len(os.fsencode(self.run_dir)) > MAX_RUN_DIR_BYTES:
            yield ConfigError(
                "server.run_dir",
                f"must be at most {MAX_RUN_DIR_BYTES} bytes long, as socket names go below it; "
                f"got {str(self.run_dir)!r}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplianceConfig:
    """Everything that is configured, in one tree."""

    server: ServerConfig = field(default_factory=ServerConfig)
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def problems(self) -> Iterator[ValueError]:
        """Every setting that is out of range, of every room."""
        yield from self.server.problems()
        try:
            self.sessions.validate()
        except ValueError as error:
            yield error
        yield from self.engine.problems()

    def validate(self) -> None:
        """Raise a ValueError that names the first setting out of range."""
        for problem in self.problems():
            raise problem


def load_config(
    path: Path | None, overrides: Sequence[str] = (), *, validate: bool = True
) -> ApplianceConfig:
    """Read the TOML file (none: all defaults), apply overrides, fill derived values, validate.

    Raises: ConfigError, or the ValueError of the room whose setting is wrong.
    """
    table = read_toml(path) if path is not None else {}
    return config_from_table(apply_overrides(table, overrides), validate=validate)


def config_from_table(table: dict[str, Any], *, validate: bool = True) -> ApplianceConfig:
    """Build, resolve and validate a config from plain tables."""
    config = resolve(build(ApplianceConfig, table))
    if validate:
        config.validate()
    return config


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def resolve(config: ApplianceConfig) -> ApplianceConfig:
    """Fill the paths that derive from state_dir and run_dir; make every path absolute."""
    server = config.server
    state_dir = server.state_dir.absolute()
    run_dir = server.run_dir.absolute() if server.run_dir != Path("") else state_dir / "run"
    server = dataclasses.replace(server, state_dir=state_dir, run_dir=run_dir)
    sqlite_path = str(state_dir / Path(config.sessions.sqlite_path).expanduser())
    sessions = dataclasses.replace(config.sessions, sqlite_path=sqlite_path)
    engine = config.engine
    if engine.run_dir == EngineConfig().run_dir:
        engine = dataclasses.replace(engine, run_dir=str(run_dir))
    engine = dataclasses.replace(engine, tiers=_resolve_tiers(engine.tiers, state_dir))
    return ApplianceConfig(server=server, sessions=sessions, engine=engine)


def _resolve_tiers(tiers: TiersConfig, state_dir: Path) -> TiersConfig:
    """An appliance keeps pages on disk unless it is told not to."""
    kind = tiers.l3
    if kind == "auto":
        kind = "file" if tiers.l2_bytes else "none"
    directory = tiers.l3_dir
    if kind == "file":
        directory = str(state_dir / (Path(directory).expanduser() if directory else "kv"))
    return dataclasses.replace(tiers, l3=kind, l3_dir=directory)


def write_resolved(config: ApplianceConfig, path: Path) -> None:
    """Write the whole config for child processes; only its owner may read it (it holds keys)."""
    path.touch(mode=0o600)
    path.write_text(json.dumps(to_plain(config), indent=1) + "\n")


def read_resolved(path: Path) -> ApplianceConfig:
    """Read what `write_resolved` wrote."""
    return config_from_table(json.loads(path.read_text()))
