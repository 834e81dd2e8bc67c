# SPDX-License-Identifier: Apache-2.0
"""Which prefill rows attend in absorbed form, where no measured crossover says so.

Does not know: attention.
"""

from __future__ import annotations

from kernels.registry import Priority, register_kernel


@register_kernel("mla_prefill_form", "expanded", priority=Priority.PORTABLE)
def expand_all(new: list[int], cached: list[int]) -> list[bool]:
    """None: `mla_prefill` is given every row."""
    return [False] * len(new)


@register_kernel("mla_prefill_form", "absorbed", priority=Priority.TRIAL)
def absorb_all(new: list[int], cached: list[int]) -> list[bool]:
    """All, for tests and measurements."""
    return [True] * len(new)
