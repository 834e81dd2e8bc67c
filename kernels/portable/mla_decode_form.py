# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a sequence make a row of `mla_decode`, by the query rows its tiles hold; rows
that read nothing together.

Does not know: attention.
"""

from __future__ import annotations

from kernels.mla_workspace import TILE_ROWS
from kernels.ops.mla_decode_form import FoldForm
from kernels.registry import Priority, register_kernel
from kernels.sizes import cdiv

QUERY_LENS = (2, 4, 8)
# Of a full tile against one that holds a single token, and of each tile where there are several:
# H200, 16 heads, 4 x 64K in bf16 take 83.5 us at q_len 1, 94 at 4 and 151.5 at 8.
FULL_TILE = 1.05
EACH_TILE = 0.9
# Over fp8 planes a tile is two tokens of 16 heads. Another kernel takes it than one token, whose
# scores come from bf16 tiles: 1 x 64K with 2, 4 and 8 tokens on an H200.
FP8_TILE_ROWS = 32
FULL_FP8_TILE = 1.55


@register_kernel("mla_decode_form", "rows", priority=Priority.PORTABLE)
def one_token_a_row(num_heads: int, kv: str) -> tuple[FoldForm, ...]:
    """No folding."""
    return ()


@register_kernel("mla_decode_form", "folded", priority=Priority.TRIAL)
def fill_tiles(num_heads: int, kv: str) -> tuple[FoldForm, ...]:
    """The largest q_len of each number of tiles: a shorter row would cost the same."""
    if kv == "fp8_planes":
        fitting = [q_len for q_len in QUERY_LENS if num_heads * q_len <= FP8_TILE_ROWS]
        return tuple(FoldForm(q_len, FULL_FP8_TILE) for q_len in fitting[-1:])
    largest = {cdiv(num_heads * q_len, TILE_ROWS): q_len for q_len in QUERY_LENS}
    one_token = max(1.0, EACH_TILE * cdiv(num_heads, TILE_ROWS))
    costs = ((q_len, max(FULL_TILE, EACH_TILE * num)) for num, q_len in largest.items())
    return tuple(FoldForm(q_len, cost / one_token) for q_len, cost in costs)


@register_kernel("mla_decode_group", "apart", priority=Priority.PORTABLE)
def rows_apart(num_heads: int) -> int:
    """Each row reads all it has."""
    return 1
