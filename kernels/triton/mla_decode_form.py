# SPDX-License-Identifier: Apache-2.0
"""Whether Hopper's decode kernels are given several tokens of a sequence as one row.

Does not know: attention.
"""

from __future__ import annotations

from kernels.ops.mla_decode_form import FoldForm
from kernels.portable.mla_decode_form import fill_tiles
from kernels.registry import Priority, register_kernel


@register_kernel(
    "mla_decode_form",
    "folded_on_hopper",
    priority=Priority.TRIAL,
    device="cuda",
    min_sm=(9, 0),
    formats={"q": {"bf16"}, "kv": {"bf16", "fp8_planes"}},
)
def fill_tiles_of_hopper(num_heads: int, kv: str) -> tuple[FoldForm, ...]:
    """As `folded`; a CPU and fp32 keep rows of one token, whose bits do not hang on drafts."""
    return fill_tiles(num_heads, kv)
