# SPDX-License-Identifier: Apache-2.0
"""What all tests of the engine share."""

from __future__ import annotations

import pytest

from engine.loop import server, tier_desk


@pytest.fixture(autouse=True)
def patient_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may move no page for seconds; the tests look when all have been moved."""
    monkeypatch.setattr(tier_desk, "MOVE_STUCK_MS", 20_000)
    monkeypatch.setattr(server, "TIER_FLUSH_S", 10.0)
