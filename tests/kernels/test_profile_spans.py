# SPDX-License-Identifier: Apache-2.0
"""What a profile says of kernels that overlap."""

from __future__ import annotations

from benchmarks.gpu.spans import added_us, idle_share


def test_a_kernel_that_waits_is_charged_with_what_comes_behind_the_one_in_front() -> None:
    # b is launched early, c lies within b, d comes after a gap.
    spans = [(0.0, 10.0, "a"), (1.0, 14.0, "b"), (2.0, 12.0, "c"), (16.0, 20.0, "d")]
    assert added_us(spans) == [10.0, 4.0, 0.0, 4.0]
    assert idle_share(spans) == 0.1  # 2 of 20
