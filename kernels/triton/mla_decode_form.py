# SPDX-License-Identifier: Apache-2.0
"""Whether Hopper's decode kernels are given several tokens of a sequence as one row, or read what
rows share once.

Does not know: attention.
"""

from __future__ import annotations

from dataclasses import replace

from kernels.mla_workspace import GROUPS, TILE_ROWS
from kernels.ops.mla_decode_form import FoldForm
from kernels.portable.mla_decode_form import fill_tiles
from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.triton.mla import refuse_hopper
from kernels.triton.mla_fp8 import refuse_fp8

# What folding itself takes, in tokens of a pass: 0.24 ms a step (H200, V2-Lite shape: 1 x 8K with 4
# drafts), of which 1,000 tokens take 4.7 us in bf16 and 8.8 over fp8 planes.
FIXED = 50_000
FIXED_FP8 = 27_000


def _refuse(call: CallSignature) -> str | None:
    """What the kernels refuse whose costs these are; of others nothing is known."""
    if call.format("kv") != "fp8_planes":
        return refuse_hopper(call)
    traits = (*call.traits, ("query_rows", call.trait("num_heads")))
    return refuse_fp8(replace(call, traits=traits))


@register_kernel(
    "mla_decode_form",
    "folded_on_hopper",
    priority=Priority.PERFORMANT,
    device="cuda",
    min_sm=(9, 0),
    formats={"q": {"bf16"}, "kv": {"bf16", "fp8_planes"}},
    refuses=_refuse,
)
def fill_tiles_of_hopper(num_heads: int, kv: str) -> tuple[FoldForm, ...]:
    """As `folded`; a CPU and fp32 keep rows of one token, whose bits do not hang on drafts."""
    fixed = FIXED_FP8 if kv == "fp8_planes" else FIXED
    return tuple(replace(form, fixed=fixed) for form in fill_tiles(num_heads, kv))


@register_kernel(
    "mla_decode_group",
    "tile_of_hopper",
    priority=Priority.PERFORMANT,
    device="cuda",
    min_sm=(9, 0),
    formats={"q": {"bf16"}, "kv": {"bf16"}},
    refuses=refuse_hopper,
)
def fill_a_tile_of_hopper(num_heads: int) -> int:
    """As many rows as a tile has queries for: the tile is multiplied as a whole anyway."""
    return max(group for group in GROUPS if group == 1 or group * num_heads <= TILE_ROWS)
