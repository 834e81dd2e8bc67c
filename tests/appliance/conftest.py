# SPDX-License-Identifier: Apache-2.0
"""One app with a fake engine per test module; each test sets the script it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.appliance import RunningApp, says


@pytest.fixture(scope="module")
def shared_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    root: Path = tmp_path_factory.mktemp("a")
    with RunningApp(root) as running:
        yield running


@pytest.fixture
def app(shared_app: RunningApp) -> RunningApp:
    """The module's app, back to its default script and to an engine that samples at once."""
    shared_app.engine.script = says("Hello there.")
    shared_app.engine.tokens_per_s = 0.0
    shared_app.engine.prefill_s = 0.0
    shared_app.engine.progress_steps = 0
    shared_app.engine.fail_at = None
    shared_app.engine.hold_at = None
    shared_app.engine.held.clear()
    shared_app.engine.grammar_check = lambda spec: None
    shared_app.engine.resume()
    return shared_app
