# SPDX-License-Identifier: Apache-2.0
"""What every command of the CLI shares: --config and --set, and how a failure ends.

Does not know: any command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from appliance.config import ApplianceConfig, load_config

VERSION = "2026.12.0"


def fail(message: str) -> NoReturn:
    """Print one line to stderr and exit with status 1."""
    click.echo(f"moorage: {message}", err=True)
    raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class Settings:
    """What --config and --set said; read when a command needs it."""

    path: Path | None
    overrides: tuple[str, ...]

    def load(self, *, validate: bool = True) -> ApplianceConfig:
        """Return the validated configuration; exits where it is wrong."""
        try:
            return load_config(self.path, self.overrides, validate=validate)
        except ValueError as error:
            fail(str(error))


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options --config and --set, and hand it `settings`."""

    @click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path, dir_okay=False),
        help="TOML file; without it every setting has its default.",
    )
    @click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="A.B=VALUE",
        help="Set one setting, as in --set server.port=0; may be repeated.",
    )
    @functools.wraps(command)
    def wrapped(
        config_path: Path | None, overrides: tuple[str, ...], *args: Any, **kwargs: Any
    ) -> Any:
        return command(Settings(config_path, overrides), *args, **kwargs)

    return wrapped
