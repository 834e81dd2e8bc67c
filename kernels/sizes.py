# SPDX-License-Identifier: Apache-2.0
"""Whole numbers for launches. Does not know: kernels.

Triton has both as functions that also serve its compiler, which costs 5 us of Python a call.
"""

from __future__ import annotations


def cdiv(size: int, step: int) -> int:
    """How many steps cover a size."""
    return -(-size // step)


def next_power_of_2(size: int) -> int:
    """The least power of two that is not below a positive size."""
    return 1 << (size - 1).bit_length()
