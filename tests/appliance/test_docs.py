# SPDX-License-Identifier: Apache-2.0
"""Generated pages are what the code says now."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.cli import main as cli
from appliance.cli_options import VERSION
from appliance.config import ApplianceConfig
from appliance.docs import PAGES
from appliance.errors import SAME_CODE, STATUS_BY_CODE
from appliance.remedies import REMEDY_BY_CODE

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_generated_page_is_fresh(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name]()


def test_every_setting_route_and_metric_has_a_meaning() -> None:
    for name in ("configuration.md", "metrics.md"):
        for line in PAGES[name]().splitlines():
            if line.startswith("| ") and not line.startswith("|---"):
                assert line.rstrip("|").rsplit("|", 1)[1].strip(), line


def test_every_error_code_says_what_to_do() -> None:
    assert REMEDY_BY_CODE.keys() == STATUS_BY_CODE.keys()
    page = PAGES["errors.md"]()
    for code, remedy in REMEDY_BY_CODE.items():
        assert remedy.endswith(".") and "\n" not in remedy and "|" not in remedy, code
        assert re.search(rf"^\| {code} \| .* \| {re.escape(remedy)} \|$", page, re.M), code


def test_every_error_code_is_one_that_something_raises() -> None:
    """Nobody should have to be ready for an error that never comes."""
    rooms = [DOCS.parent / room for room in ("appliance", "sessions", "tools_schema", "engine")]
    tables = {"errors.py", "remedies.py"}
    texts = [
        path.read_text()
        for room in rooms
        for path in room.rglob("*.py")
        if room.name != "appliance" or path.name not in tables
    ]
    source = "\n".join(texts)
    for code in STATUS_BY_CODE:
        names = {code, *(other for other, same in SAME_CODE.items() if same == code)}
        assert any(f'"{name}"' in source for name in names), code


NAMED = [
    (code, name) for code, text in REMEDY_BY_CODE.items() for name in re.findall("`(.*?)`", text)
]


@pytest.mark.parametrize(("code", "name"), NAMED)
def test_what_a_remedy_names_is_there(code: str, name: str) -> None:
    """Settings, routes, commands, fields and headers."""
    pages = "".join(path.read_text() for path in DOCS.glob("*.md") if path.name != "errors.md")
    if name.startswith("moorage "):
        assert CliRunner().invoke(cli, [*name.split()[1:], "--help"]).exit_code == 0
    elif re.match(r"(engine|server|sessions)\.", name):
        value: object = ApplianceConfig()
        for part in name.split("."):
            value = getattr(value, part)
    elif name not in ("Allow", "x-api-key", "Authorization: Bearer"):  # HTTP's own
        assert name.split(":")[0] in pages
    for page in re.findall(r"docs/\S+\.md", REMEDY_BY_CODE[code]):
        assert (DOCS.parent / page).exists()


def test_the_version_is_the_distribution_s() -> None:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
