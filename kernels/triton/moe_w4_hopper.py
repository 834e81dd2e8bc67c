# SPDX-License-Identifier: Apache-2.0
"""Hopper grouped W4 GEMM for many tokens: out^T = W_expert x^T, persistent, wgmma from registers.

Owns: work items of tokens of one expert, by weight rows. Does not know: routing (moe_route.py),
packing (kernels/w4_layout.py). A producer warp brings token tiles by TMA; each of two consumer
warpgroups holds TILES times 64 weight rows, expands their codes in registers (once for all tokens
of the item) while the product before is under way, and feeds them to wgmma as its A operand.
TILES 1: items of up to 256 tokens, bound by the tensor cores, and by the second-level cache, from
which tokens come once for each 128 rows. TILES 2: up to 128 tokens, come once for each 256 rows;
bound by the expansion, and better where most experts get fewer than 100.
wgmma wants K in the order in which a lane holds its codes: four neighbouring columns 4c .. 4c + 3
sit at positions 2c, 2c + 1, 2c + 8, 2c + 9 of their 16, so the token rows come with their columns
moved there (moe_gather.py, and the epilogue of the first GEMM).
Gluon has no interpreter: checked against the reference on the GPU, compiled for sm_90 without one.
"""

from __future__ import annotations

from kernels._triton import gl, gluon, hopper
from kernels.triton.moe_w4 import _FP4_ASM, _INT4_ASM
from kernels.triton.quick_launch import quick_launch

mbarrier = hopper.mbarrier
tma = hopper.tma

BLOCKS = gl.constexpr(4)  # an item's tokens, in blocks of 64 / TILES


@gluon.jit
def _pair(word):
    """The two bf16 numbers of a word, low half first."""
    low = word.to(gl.uint16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, (word >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True))


@gluon.jit
def _load_codes(codes, scales, tile, kb, LAYOUT: gl.constexpr, SCALE_LAYOUT: gl.constexpr):
    """A thread's four words of codes and two of scales of (64 rows, 64 columns)."""
    thread = gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))
    c = gl.load(codes + (tile + kb) * 512 + thread[:, None] * 4 + word[None, :])
    thread = gl.arange(0, 128, layout=gl.SliceLayout(1, SCALE_LAYOUT))
    word = gl.arange(0, 2, layout=gl.SliceLayout(0, SCALE_LAYOUT))
    s = gl.load(scales + (tile + kb) * 64 + (thread // 4)[:, None] * 2 + word[None, :])
    return c, s


@gluon.jit
def _expand(
    c,
    s,
    LAYOUT: gl.constexpr,
    OPERAND: gl.constexpr,
    INT4: gl.constexpr,
    SCALE_MUL: gl.constexpr,
    SCALE_ADD: gl.constexpr,
):
    """Codes and scales of a (64, 64) tile -> the A operand, bf16."""
    both = gl.reshape(gl.join(s, s >> 8), (128, 4))
    factor = gl.convert_layout(both, LAYOUT, assert_trivial=True)
    factor = (factor & 0x00FF00FF) * SCALE_MUL + SCALE_ADD
    a0, a1, a2, a3 = gl.inline_asm_elementwise(
        _INT4_ASM if INT4 else _FP4_ASM,
        "=r,=r,=r,=r,r,r",
        [c, factor],
        dtype=(gl.uint32, gl.uint32, gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    low = gl.join(_pair(a0), _pair(a1))
    high = gl.join(_pair(a2), _pair(a3))
    w = gl.join(low, high)  # thread, k16, pair, row8, k2
    w = gl.reshape(w, (4, 8, 4, 4, 2, 2, 2))  # warp, g, c, k16, pair, row8, k2
    w = gl.permute(w, (0, 5, 1, 3, 6, 2, 4))
    w = gl.reshape(w, (64, 64))
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def _work(item_expert, item_begin, item_count, work, NUM_TILES: gl.constexpr):
    """Work -> (tile of weight rows, expert, first sorted pair, pairs); tiles of an item run side by
    side, so that they share its tokens."""
    item = work // NUM_TILES
    count = gl.load(item_count + item)
    expert = gl.load(item_expert + item)
    return work % NUM_TILES, expert, gl.load(item_begin + item), count


@gluon.jit
def _produce(
    x_desc,
    x_tiles,
    x_full,
    x_empty,
    item_expert,
    item_begin,
    item_count,
    first_work,
    num_works,
    KB: gl.constexpr,
    NUM_TILES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The item's tokens, 64 columns a step, in blocks of BLOCK tokens."""
    step = 0
    for work in range(first_work, num_works, gl.num_programs(0)):
        _tile, _expert, begin, count = _work(item_expert, item_begin, item_count, work, NUM_TILES)
        if count > 0:
            num_blocks = (count + BLOCK - 1) // BLOCK
            for kb in range(KB):
                stage = step % STAGES
                full = x_full.index(stage)
                mbarrier.wait(x_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                for b in gl.static_range(BLOCKS):
                    mbarrier.expect(full, (b + 1) * (BLOCK * 128), pred=num_blocks == b + 1)
                for b in gl.static_range(BLOCKS):
                    tma.async_copy_global_to_shared(
                        x_desc,
                        [begin + b * BLOCK, kb * 64],
                        full,
                        x_tiles.index(stage).slice(b * BLOCK, BLOCK),
                        pred=b < num_blocks,
                    )
                step += 1


@gluon.jit
def _issue(w, x_tile, acc, acc_rest, MAIN: gl.constexpr, REST: gl.constexpr):
    """Start acc += w x^T for the first MAIN tokens, and the REST behind them."""
    acc = hopper.warpgroup_mma(w, x_tile.slice(0, MAIN).permute([1, 0]), acc, is_async=True)
    if REST > 0:
        tokens = x_tile.slice(MAIN, REST).permute([1, 0])
        acc_rest = hopper.warpgroup_mma(w, tokens, acc_rest, is_async=True)
    return acc, acc_rest


@gluon.jit
def _finish(acc_a, rest_a, acc_b, rest_b, w_a, w_b, REST: gl.constexpr, TILES: gl.constexpr):
    """Wait for the products under way; `w_a` and `w_b`, the next operands, are ready before."""
    if TILES == 2 and REST > 0:
        acc_a, rest_a, acc_b, rest_b, w_a, w_b = hopper.warpgroup_mma_wait(
            0, deps=[acc_a, rest_a, acc_b, rest_b, w_a, w_b]
        )
    elif TILES == 2:
        acc_a, acc_b, w_a, w_b = hopper.warpgroup_mma_wait(0, deps=[acc_a, acc_b, w_a, w_b])
    elif REST > 0:
        acc_a, rest_a, w_a = hopper.warpgroup_mma_wait(0, deps=[acc_a, rest_a, w_a])
    else:
        acc_a, w_a = hopper.warpgroup_mma_wait(0, deps=[acc_a, w_a])
    return acc_a, rest_a, acc_b, rest_b, w_a, w_b


@gluon.jit
def _load_tiles(codes, scales, tile, kb, KB: gl.constexpr, TILES: gl.constexpr):
    """Words of both tiles, which lie one below the other; of one: twice the same."""
    codes_layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    scales_layout: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])
    c_a, s_a = _load_codes(codes, scales, tile, kb, codes_layout, scales_layout)
    if TILES == 2:
        c_b, s_b = _load_codes(codes, scales, tile + KB, kb, codes_layout, scales_layout)
    else:
        c_b, s_b = c_a, s_a
    return c_a, s_a, c_b, s_b


@gluon.jit
def _expand_tiles(
    c_a,
    s_a,
    c_b,
    s_b,
    OPERAND: gl.constexpr,
    INT4: gl.constexpr,
    SCALE_MUL: gl.constexpr,
    SCALE_ADD: gl.constexpr,
    TILES: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    w_a = _expand(c_a, s_a, layout, OPERAND, INT4, SCALE_MUL, SCALE_ADD)
    w_b = _expand(c_b, s_b, layout, OPERAND, INT4, SCALE_MUL, SCALE_ADD) if TILES == 2 else w_a
    return w_a, w_b


@gluon.jit
def _multiply(
    x_tiles,
    x_full,
    x_empty,
    codes,
    scales,
    tile,
    step,
    KB: gl.constexpr,
    MAIN: gl.constexpr,
    REST: gl.constexpr,
    INT4: gl.constexpr,
    SCALE_MUL: gl.constexpr,
    SCALE_ADD: gl.constexpr,
    STAGES: gl.constexpr,
    TILES: gl.constexpr,
):
    """TILES times 64 weight rows times MAIN + REST tokens over all columns; two steps a round,
    since the operands being expanded must not be the ones being read. The branch of each wait for
    tokens (a real one only where it has a condition) keeps the assembler from moving an expansion
    behind the products under way."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, MAIN, 16]
    )
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, REST if REST > 0 else 64, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    acc_a = gl.zeros([64, MAIN], gl.float32, layout=layout)
    rest_a = gl.zeros([64, REST], gl.float32, layout=rest_layout) if REST > 0 else 0
    acc_b = gl.zeros([64, MAIN], gl.float32, layout=layout) if TILES == 2 else 0
    rest_b = gl.zeros([64, REST], gl.float32, layout=rest_layout) if REST > 0 and TILES == 2 else 0
    ca0, sa0, cb0, sb0 = _load_tiles(codes, scales, tile, 0, KB, TILES)
    ca1, sa1, cb1, sb1 = _load_tiles(codes, scales, tile, 1, KB, TILES)
    wa0, wb0 = _expand_tiles(ca0, sa0, cb0, sb0, operand, INT4, SCALE_MUL, SCALE_ADD, TILES)
    ca0, sa0, cb0, sb0 = _load_tiles(codes, scales, tile, 2 % KB, KB, TILES)
    mbarrier.wait(x_full.index(step % STAGES), (step // STAGES) & 1)
    for kb in range(0, KB, 2):
        stage = step % STAGES
        x_tile = x_tiles.index(stage)
        acc_a, rest_a = _issue(wa0, x_tile, acc_a, rest_a, MAIN, REST)
        if TILES == 2:
            acc_b, rest_b = _issue(wb0, x_tile, acc_b, rest_b, MAIN, REST)
        wa1, wb1 = _expand_tiles(ca1, sa1, cb1, sb1, operand, INT4, SCALE_MUL, SCALE_ADD, TILES)
        ahead = gl.minimum(kb + 3, KB - 1)
        ca1, sa1, cb1, sb1 = _load_tiles(codes, scales, tile, ahead, KB, TILES)
        step += 1
        following = step % STAGES
        mbarrier.wait(x_full.index(following), (step // STAGES) & 1, pred=tile >= 0)
        acc_a, rest_a, acc_b, rest_b, wa1, wb1 = _finish(
            acc_a, rest_a, acc_b, rest_b, wa1, wb1, REST, TILES
        )
        mbarrier.arrive(x_empty.index(stage), count=1)
        x_tile = x_tiles.index(following)
        acc_a, rest_a = _issue(wa1, x_tile, acc_a, rest_a, MAIN, REST)
        if TILES == 2:
            acc_b, rest_b = _issue(wb1, x_tile, acc_b, rest_b, MAIN, REST)
        wa0, wb0 = _expand_tiles(ca0, sa0, cb0, sb0, operand, INT4, SCALE_MUL, SCALE_ADD, TILES)
        ahead = gl.minimum(kb + 4, KB - 1)
        ca0, sa0, cb0, sb0 = _load_tiles(codes, scales, tile, ahead, KB, TILES)
        step += 1
        mbarrier.wait(x_full.index(step % STAGES), (step // STAGES) & 1, pred=kb + 2 < KB)
        acc_a, rest_a, acc_b, rest_b, wa0, wb0 = _finish(
            acc_a, rest_a, acc_b, rest_b, wa0, wb0, REST, TILES
        )
        mbarrier.arrive(x_empty.index(following), count=1)
    return acc_a, rest_a, acc_b, rest_b, step


@gluon.jit
def _store_activated(
    acc, gate_factor, up_factor, out, first_row, begin, count, column, N: gl.constexpr
):
    """Rows come as 8 gate, 8 up, ...: y = silu(gate) * up, 32 columns of `out` for each token, in
    the order in which the second GEMM takes them."""
    TOKENS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    halves = gl.permute(gl.reshape(acc, (4, 2, 8, TOKENS)), (0, 2, 3, 1))
    gate, up = gl.split(halves)
    gate = gate * gate_factor
    # 1 / (1 + e^-gate) by the two fast instructions: a division costs more than the rest.
    sigmoid = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=r,r",
        [1.0 + gl.exp2(gate * -1.4426950408889634)],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    y = (gate * sigmoid * (up * up_factor)).to(gl.bfloat16)
    # Columns of 16 are (c, k2, pair); wgmma wants (k2, c, pair).
    y = gl.permute(gl.reshape(y, (2, 4, 2, 2, TOKENS)), (0, 2, 1, 3, 4))
    y = gl.convert_layout(gl.reshape(y, (32, TOKENS)), layout)
    n = column + gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
    t = first_row + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    at = (begin + t).to(gl.int64) * (N // 2)
    gl.store(out + at[None, :] + n[:, None], y, mask=(t < count)[None, :])


@gluon.jit
def _store_weighted(
    acc, factor, pairs, pair_weights, out, first_row, begin, count, column, N: gl.constexpr
):
    """Times the router weight, to the row of the pair."""
    TOKENS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    # Each token's pair and weight once in the warpgroup, not once in each thread that needs it.
    t = first_row + gl.arange(0, TOKENS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    pair = gl.load(pairs + begin + t, mask=t < count, other=0)
    weight = gl.load(pair_weights + pair, mask=t < count, other=0.0) * factor
    weight = gl.convert_layout(weight, gl.SliceLayout(0, acc.type.layout))
    y = gl.convert_layout((acc * weight[None, :]).to(out.dtype.element_ty), layout)
    n = column + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    t = first_row + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    at = gl.convert_layout(pair, gl.SliceLayout(0, layout)).to(gl.int64) * N
    gl.store(out + at[None, :] + n[:, None], y, mask=(t < count)[None, :])


@gluon.jit
def _store(acc, first_row, row_tile, args, N: gl.constexpr, FIRST: gl.constexpr):
    factors, pairs, pair_weights, out, expert, begin, count = args
    factor = gl.load(factors + expert * 2)
    if FIRST:
        up_factor = gl.load(factors + expert * 2 + 1)
        _store_activated(acc, factor, up_factor, out, first_row, begin, count, row_tile * 32, N)
    else:
        _store_weighted(
            acc, factor, pairs, pair_weights, out, first_row, begin, count, row_tile * 64, N
        )


@gluon.jit
def _multiply_and_store(
    x_tiles,
    x_full,
    x_empty,
    codes,
    scales,
    factors,
    pairs,
    pair_weights,
    out,
    tile,
    expert,
    begin,
    count,
    row_tile,
    step,
    N: gl.constexpr,
    KB: gl.constexpr,
    MAIN: gl.constexpr,
    REST: gl.constexpr,
    FIRST: gl.constexpr,
    INT4: gl.constexpr,
    SCALE_MUL: gl.constexpr,
    SCALE_ADD: gl.constexpr,
    STAGES: gl.constexpr,
    TILES: gl.constexpr,
):
    acc_a, rest_a, acc_b, rest_b, step = _multiply(
        x_tiles,
        x_full,
        x_empty,
        codes,
        scales,
        tile,
        step,
        KB,
        MAIN,
        REST,
        INT4,
        SCALE_MUL,
        SCALE_ADD,
        STAGES,
        TILES,
    )
    args = (factors, pairs, pair_weights, out, expert, begin, count)
    _store(acc_a, 0, row_tile, args, N, FIRST)
    if REST > 0:
        _store(rest_a, MAIN, row_tile, args, N, FIRST)
    if TILES == 2:
        _store(acc_b, 0, row_tile + 1, args, N, FIRST)
        if REST > 0:
            _store(rest_b, MAIN, row_tile + 1, args, N, FIRST)
    return step


@gluon.jit
def _consume(
    x_tiles,
    x_full,
    x_empty,
    codes,
    scales,
    factors,
    pairs,
    item_expert,
    item_begin,
    item_count,
    pair_weights,
    out,
    first_work,
    num_works,
    N: gl.constexpr,
    KB: gl.constexpr,
    NUM_TILES: gl.constexpr,
    FIRST: gl.constexpr,
    INT4: gl.constexpr,
    SCALE_MUL: gl.constexpr,
    SCALE_ADD: gl.constexpr,
    STAGES: gl.constexpr,
    TILES: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Its half of the work's weight rows, for as many blocks of tokens as the item has."""
    BLOCK: gl.constexpr = 64 // TILES
    step = 0
    for work in range(first_work, num_works, gl.num_programs(0)):
        n_tile, expert, begin, count = _work(item_expert, item_begin, item_count, work, NUM_TILES)
        row_tile = (n_tile * 2 + SIDE) * TILES
        tile = (expert.to(gl.int64) * (N // 64) + row_tile) * KB
        if count > 3 * BLOCK:
            step = _multiply_and_store(
                x_tiles,
                x_full,
                x_empty,
                codes,
                scales,
                factors,
                pairs,
                pair_weights,
                out,
                tile,
                expert,
                begin,
                count,
                row_tile,
                step,
                N,
                KB,
                4 * BLOCK,
                0,
                FIRST,
                INT4,
                SCALE_MUL,
                SCALE_ADD,
                STAGES,
                TILES,
            )
        elif count > 2 * BLOCK:
            step = _multiply_and_store(
                x_tiles,
                x_full,
                x_empty,
                codes,
                scales,
                factors,
                pairs,
                pair_weights,
                out,
                tile,
                expert,
                begin,
                count,
                row_tile,
                step,
                N,
                KB,
                2 * BLOCK,
                BLOCK,
                FIRST,
                INT4,
                SCALE_MUL,
                SCALE_ADD,
                STAGES,
                TILES,
            )
        elif count > BLOCK:
            step = _multiply_and_store(
                x_tiles,
                x_full,
                x_empty,
                codes,
                scales,
                factors,
                pairs,
                pair_weights,
                out,
                tile,
                expert,
                begin,
                count,
                row_tile,
                step,
                N,
                KB,
                2 * BLOCK,
                0,
                FIRST,
                INT4,
                SCALE_MUL,
                SCALE_ADD,
                STAGES,
                TILES,
            )
        elif count > 0:
            step = _multiply_and_store(
                x_tiles,
                x_full,
                x_empty,
                codes,
                scales,
                factors,
                pairs,
                pair_weights,
                out,
                tile,
                expert,
                begin,
                count,
                row_tile,
                step,
                N,
                KB,
                BLOCK,
                0,
                FIRST,
                INT4,
                SCALE_MUL,
                SCALE_ADD,
                STAGES,
                TILES,
            )


@quick_launch
@gluon.jit(do_not_specialize=["num_works"])
def moe_w4_hopper_kernel(
    x_desc,
    codes,
    scales,
    factors,
    pairs,
    item_expert,
    item_begin,
    item_count,
    pair_weights,
    out,
    num_works,
    N: gl.constexpr,
    K: gl.constexpr,
    FIRST: gl.constexpr,
    INT4: gl.constexpr,
    SCALE_MUL: gl.constexpr,
    SCALE_ADD: gl.constexpr,
    STAGES: gl.constexpr,
    TILES: gl.constexpr,
):
    """Programs share works (item, 128 * TILES weight rows). x [pairs, K] sorted by expert, in boxes
    of 64 / TILES rows and 64 columns. FIRST: out [pairs, N / 2] = SwiGLU, sorted. Else: out
    [pairs, N] by pair."""
    KB: gl.constexpr = K // 64
    NUM_TILES: gl.constexpr = N // (128 * TILES)
    BLOCK: gl.constexpr = 64 // TILES
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK * BLOCKS, 64], x_desc.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=2)
    hopper.fence_async_shared()
    first_work = gl.program_id(0)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    x_tiles,
                    x_full,
                    x_empty,
                    codes,
                    scales,
                    factors,
                    pairs,
                    item_expert,
                    item_begin,
                    item_count,
                    pair_weights,
                    out,
                    first_work,
                    num_works,
                    N,
                    KB,
                    NUM_TILES,
                    FIRST,
                    INT4,
                    SCALE_MUL,
                    SCALE_ADD,
                    STAGES,
                    TILES,
                    0,
                ),
            ),
            (
                _consume,
                (
                    x_tiles,
                    x_full,
                    x_empty,
                    codes,
                    scales,
                    factors,
                    pairs,
                    item_expert,
                    item_begin,
                    item_count,
                    pair_weights,
                    out,
                    first_work,
                    num_works,
                    N,
                    KB,
                    NUM_TILES,
                    FIRST,
                    INT4,
                    SCALE_MUL,
                    SCALE_ADD,
                    STAGES,
                    TILES,
                    1,
                ),
            ),
            (
                _produce,
                (
                    x_desc,
                    x_tiles,
                    x_full,
                    x_empty,
                    item_expert,
                    item_begin,
                    item_count,
                    first_work,
                    num_works,
                    KB,
                    NUM_TILES,
                    BLOCK,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
