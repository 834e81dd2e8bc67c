# SPDX-License-Identifier: Apache-2.0
"""Docs are checked like code: generated pages are fresh, links resolve, commands are documented."""

from __future__ import annotations

import pathlib
import re

import click
import pytest
from click.testing import CliRunner

from appliance.cli import main as cli

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, command in group.commands.items():
        found.append((*prefix, name))
        if isinstance(command, click.Group):
            found += commands(command, (*prefix, name))
    return found


COMMANDS = commands(cli) if isinstance(cli, click.Group) else []


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*command, "--help"])
    assert result.exit_code == 0
    body = result.output.split("\n\n", 1)[1]
    assert body.strip() and not body.lstrip().startswith("Options:"), "help has no sentence"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_between_pages_resolve(page: pathlib.Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [t for t in targets if not t.startswith(("http://", "https://"))]
    assert [t for t in local if not (page.parent / t).exists()] == []


def test_configuration_page_is_fresh() -> None:
    result = CliRunner().invoke(cli, ["config", "docs"])
    assert result.exit_code == 0
    assert (ROOT / "docs" / "configuration.md").read_text() == result.output


def test_readme_shows_both_setup_commands_and_stays_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text
    assert len(text.splitlines()) <= 180


def test_readme_tree_names_every_room() -> None:
    text = (ROOT / "README.md").read_text()
    rooms = ("appliance/", "sessions/", "tools_schema/", "engine/", "csrc/", "kernels/", "kvtiers/")
    assert [room for room in rooms if room not in text] == []


def test_decision_records_are_short_and_complete() -> None:
    for page in sorted((ROOT / "docs" / "adr").glob("*.md")):
        text = page.read_text()
        assert len(text.splitlines()) <= 60, page.name
        for part in ("**Context.**", "**Decision.**", "**Consequences.**", "change our mind"):
            assert part in text, f"{page.name}: {part}"
