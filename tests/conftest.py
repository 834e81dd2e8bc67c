# SPDX-License-Identifier: Apache-2.0
"""For all tests: no property fails because the machine is slow."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# On top of what Hypothesis has chosen for where it runs.
settings.register_profile(
    "at any speed",
    settings(),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("at any speed")
