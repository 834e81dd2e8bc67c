# SPDX-License-Identifier: Apache-2.0
"""Random walks over scheduler and tiers, a few of those that the soak takes by the thousand.

At the end of each everything is let go of, and prefixes are moved about: a move for which there is
room ends, and loses nothing.
"""

from __future__ import annotations

import pytest

from benchmarks.soak.scheduler_soak import STEPS_A_RUN, Walk

# Walks that found something: a tail in L2 kept its head out of the store for ever; what L1 had in a
# full L2 kept a prefetch out; a move to L2 made room of the prefix's own end.
FOUND = (117, 230, 738, 900_169)


@pytest.mark.parametrize("seed", [*range(12), *FOUND])
def test_a_walk_ends_as_it_should(seed: int) -> None:
    Walk(seed).run(STEPS_A_RUN)
