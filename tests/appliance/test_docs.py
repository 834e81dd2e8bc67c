# SPDX-License-Identifier: Apache-2.0
"""Generated pages are what the code says now."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from appliance.cli_options import VERSION
from appliance.docs import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_generated_page_is_fresh(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name]()


def test_every_setting_route_and_metric_has_a_meaning() -> None:
    for name in ("configuration.md", "metrics.md"):
        for line in PAGES[name]().splitlines():
            if line.startswith("| ") and not line.startswith("|---"):
                assert line.rstrip("|").rsplit("|", 1)[1].strip(), line


def test_the_version_is_the_distribution_s() -> None:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
