# SPDX-License-Identifier: Apache-2.0
"""Sessions that need four times L1, in simulated time: later turns lose nothing, and do not wait in
the queue of cold prompts."""

from __future__ import annotations

import pytest

from benchmarks.oversubscription_waits import Load, measure

QUARTER = Load(num_sessions=16, num_pages=8_781 // 4, num_l2_pages=36_578 // 4, gap_ms=5_000)


def p99(figures: dict[str, object], which: str) -> float:
    value = figures[f"{which}_p99_ms"]
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize("overlap_loads", [False, True])
def test_later_turns_compute_their_new_tokens_alone_and_pass_cold_prompts(
    overlap_loads: bool,
) -> None:
    figures = measure(QUARTER, overlap_loads=overlap_loads)
    assert figures["later_new_only"] == 1.0
    assert p99(figures, "later") < p99(figures, "cold")
    by_arrival = measure(QUARTER, overlap_loads=overlap_loads, suffix_us_per_token=0)
    assert p99(figures, "later") < p99(by_arrival, "later") / 2


def test_streams_that_come_first_while_memory_is_short_cost_cold_prompts_little() -> None:
    crowded = Load(arrival_ms=200, jitter=0.3, seed=1)
    kept, without = (
        measure(crowded, 1.15, overlap_loads=True, spare_percent=percent) for percent in (25, 0)
    )
    assert p99(kept, "later") < p99(without, "later") / 4
    assert p99(kept, "cold") < 1.1 * p99(without, "cold")
    assert kept["later_new_only"] == without["later_new_only"] == 1.0


def test_what_no_tier_has_room_for_is_seen_as_recomputed() -> None:
    without_l2 = Load(num_sessions=8, num_pages=8_781 // 8, num_l2_pages=0, gap_ms=2_500)
    assert measure(without_l2)["later_new_only"] == 0.0
