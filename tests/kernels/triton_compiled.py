# SPDX-License-Identifier: Apache-2.0
"""Child of test_triton_kernels.py: compiles kernels for sm_90 without a GPU.

Prints one JSON line per kernel: shared memory in bytes, whether wgmma, mma.sync and TMA are in the
PTX, and what the assembler gave a thread.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

from kernels._triton import gl, triton

TENSORS = {
    "seq_lens": "*i32",
    "plan": "*i32",
    "page_table": "*i32",
    "row_slots": "*i32",
    "out": "*bf16",
    "partial_out": "*fp32",
    "partial_lse": "*fp32",
    "x": "*bf16",
    "codes": "*u32",
    "scales": "*u32",
    "globals_": "*fp32",
    "pairs": "*i32",
    "item_expert": "*i32",
    "item_begin": "*i32",
    "item_count": "*i32",
    "pair_weights": "*fp32",
    "q": "*bf16",
    "kv": "*bf16",
    "kv_rope": "*bf16",
    "kv_scales": "*fp32",
    "logits": "*fp32",
    "bias": "*fp32",
    "norm_weight": "*fp32",
    "residual": "*bf16",
    "weight": "*bf16",
    "topk_ids": "*i32",
    "topk_weights": "*fp32",
    "items": "*i32",
    "factors": "*fp32",
    "temperatures": "*fp32",
    "top_ks": "*i32",
    "top_ps": "*fp32",
    "min_ps": "*fp32",
    "chances": "*fp64",
    "peaks": "*fp32",
    "places": "*i32",
    "masses": "*fp64",
    "k_sums": "*fp64",
    "p_sums": "*fp64",
    "k_lows": "*i32",
    "p_lows": "*i32",
    "least_of": "*fp32",
    "counts": "*i32",
    "weights": "*fp32",
    "ids": "*i32",
    "repetitions": "*fp32",
    "presences": "*fp32",
    "frequencies": "*fp32",
    "masks": "*i32",
    "bad": "*i32",
    "pair_ends": "*i32",
    "tile_ends": "*i32",
    "token_slots": "*i32",
    "token_lens": "*i32",
}
SCALARS = {"eps": "fp32", "scale_log2": "fp32", "scale": "fp32", "page_stride": "i64"}


def compile_one(
    kernel: Any,
    constants: dict[str, Any],
    *,
    warps: int,
    gluon: bool = False,
    boxes: dict[str, tuple[int, int]] | None = None,
    types: dict[str, str] | None = None,
) -> Any:
    """Compile for sm_90 with 16-byte aligned tensors; names give the types, and the boxes of
    descriptors where `boxes` does not."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource, compile  # type: ignore[import-untyped]
    from triton.experimental.gluon._runtime import (  # type: ignore[import-untyped]
        GluonASTSource,
    )

    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_desc"):
            kind, bits = ("u8", 8) if name.startswith("coded") else ("bf16", 16)
            layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
            default = (64, 64 if "rope" in name else 128 if bits == 8 else 256)
            rows, columns = (boxes or {}).get(name, default)
            signature[name] = f"tensordesc<{kind}[{rows}, {columns}],{layout!r}>"
        else:
            signature[name] = (
                (types or {}).get(name) or TENSORS.get(name) or SCALARS.get(name, "i32")
            )
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source_class = GluonASTSource if gluon else ASTSource
    source = source_class(kernel, signature, constexprs=values, attrs=attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def mla_hopper(query_tokens: int = 4, group: int = 1) -> Any:
    """Four query tokens of 16 heads: a full 64-row tile; of eight: two; of one in a group."""
    from kernels.triton.mla_decode_hopper import mla_decode_hopper_kernel

    tiles = max(1, query_tokens // 4)
    constants = dict(H=16, Q_LEN=query_tokens, D=512, NUM_PARTS=132 // tiles, TILE=64, STAGES=2)
    constants["GROUP"] = group
    constants["ROWS_PAD"] = 64 * tiles
    constants["USE_PDL"] = True
    return compile_one(mla_decode_hopper_kernel, constants, warps=4, gluon=True)


def absorb(placed: bool) -> Any:
    """Queries of a V2-Lite layer; `placed`: into folded rows."""
    from kernels.triton.mla_decode_parts import mla_absorb_kernel

    constants = dict(H=16, NOPE=128, C=512, R=64, PAGE=64, TOKENS=16, COLS=128, FP8=False)
    constants |= dict(PLACED=placed, USE_PDL=True)
    names = ("pool", "rope_pool", "scale_pool", "w_uk")
    types = {name: "*bf16" for name in names}
    types |= {name: "*i32" for name in ("positions", "slot_mapping")} | {"cos_sin": "*fp32"}
    return compile_one(mla_absorb_kernel, constants, warps=4, types=types)


def merge_values(placed: bool, group: int = 1) -> Any:
    """Of eight tokens, which may be one row of eight queries or two of four, or rows in groups."""
    from kernels.triton.mla_decode_parts import mla_merge_values_kernel

    constants = dict(H=16, Q_LEN=8 if placed else 1, ROWS_PAD=128 if placed else 64, D=512, V=128)
    constants |= dict(NUM_PARTS=66 if placed else 132, BLOCK_P=32, BLOCK_D=512)
    constants |= dict(PLACED=placed, USE_PDL=True, GROUP=group)
    types = {"attended": "*bf16", "w_uv": "*bf16"}
    return compile_one(mla_merge_values_kernel, constants, warps=16, types=types)


def mla_portable() -> Any:
    """One query token of 16 heads."""
    from kernels.triton.mla_decode import mla_decode_kernel

    constants = dict(H=16, Q_LEN=1, D=512, R=64, NUM_PARTS=132, ROWS_PAD=64, BLOCK_M=16)
    constants |= dict(TILE=64, STAGES=2, FP8=False, USE_PDL=True, GROUP=1)
    return compile_one(mla_decode_kernel, constants, warps=4)


def mla_shared() -> Any:
    """What groups of four rows share."""
    from kernels.triton.mla_plan import mla_shared_kernel

    constants = dict(TILE=64, GROUP=4, CHUNK=1024, LEAST=16)
    return compile_one(mla_shared_kernel, constants, warps=4, types={"shared": "*i32"})


def mla_plan(group: int) -> Any:
    """Of sixteen rows, alone or in groups."""
    from kernels.triton.mla_plan import mla_plan_kernel

    constants = dict(TILE=64, Q_LEN=1, GROUP=group, NUM_PARTS=132, PARTS_PAD=256)
    constants |= dict(SPANS_PAD=32, CHUNK=32, LEAST=500)
    return compile_one(mla_plan_kernel, constants, warps=8, types={"shared": "*i32"})


def moe_gate_up() -> Any:
    """The first GEMM of a V2-Lite layer."""
    from kernels.triton.moe_w4 import moe_w4_kernel

    constants = dict(K=2048, N=2816, TOP_K=6, TOKENS=16, NM=1, SLICES=4, KC=2, STAGES=3)
    constants |= dict(FIRST=True, UNSORTED=False, INT4=False, SCALE_MUL=16, SCALE_ADD=0x6F006F00)
    constants |= dict(PORTABLE=False, USE_PDL=True, COMBINES=False, HAS_BEHIND=False)
    return compile_one(moe_w4_kernel, constants, warps=2)


def moe_down(tokens: int, *, unsorted: bool, combines: bool) -> Any:
    """The second GEMM of a V2-Lite layer, as `tiles_for` has it; `combines`: with the sum."""
    from kernels.triton.moe_w4 import moe_w4_kernel

    constants = dict(K=1408, N=2048, TOP_K=8, TOKENS=tokens, NM=1, SLICES=4, KC=2, STAGES=2)
    constants |= dict(FIRST=False, UNSORTED=unsorted, INT4=False, SCALE_MUL=16)
    constants |= dict(SCALE_ADD=0x6F006F00, PORTABLE=False, USE_PDL=True)
    constants |= dict(COMBINES=combines, HAS_BEHIND=combines)
    types = {"out": "*fp32", "combined": "*bf16", "behind": "*bf16", "counters": "*i32"}
    return compile_one(moe_w4_kernel, constants, warps=2, types=types)


def moe_down_rows(combines: bool, first: bool = False) -> Any:
    """The same of one token; `first`: the first GEMM."""
    from kernels.triton.w4_rows import w4_rows_kernel

    constants = dict(TOP_K=8, TOKENS=8, LOADS=1, WAYS=4, KC=8, PARTS=0)
    constants |= dict(K=2048, N=2816) if first else dict(K=1408, N=2048)
    constants |= dict(NORMS=False, ADDS=False, SWIGLU=first, EXPERTS=True, UNSORTED=True)
    constants |= dict(INT4=False, SCALE_MUL=16, SCALE_ADD=0x6F006F00, PORTABLE=False, USE_PDL=True)
    constants |= dict(COMBINES=combines, HAS_BEHIND=combines)
    types = {"combined": "*bf16", "behind": "*bf16", "counters": "*i32"}
    types["out"] = "*bf16" if first else "*fp32"
    return compile_one(w4_rows_kernel, constants, warps=4, types=types)


def gather_planes() -> Any:
    """Latents of V2-Lite out of fp8 planes."""
    from kernels.triton.mla_prefill_kernels import gather_planes_kernel

    types = {"values": "*fp8e4nv", "scales": "*fp32", "rope": "*bf16", "pages": "*i32"}
    constants = dict(PAGE=64, ROWS=16, C=512, R=64)
    return compile_one(gather_planes_kernel, constants, warps=4, types=types)


def mla_prefill_hopper() -> Any:
    """Sixteen heads of 192 / 128."""
    from kernels.triton.mla_prefill_hopper import mla_prefill_hopper_kernel

    constants = dict(H=16, N=128, R=64, V=128, C=512, TILE=128, STAGES=2)
    boxes = dict(q_nope_desc=(64, 128), k_nope_desc=(128, 128), k_rope_desc=(128, 64))
    boxes["v_desc"] = (128, 128)
    return compile_one(mla_prefill_hopper_kernel, constants, warps=4, gluon=True, boxes=boxes)


def moe_w4_hopper(tiles: int = 1) -> Any:
    """The first GEMM of a V2-Lite layer, many tokens."""
    from kernels.triton.moe_w4_hopper import moe_w4_hopper_kernel

    constants = dict(K=2048, N=2816, FIRST=True, INT4=False, SCALE_MUL=16, SCALE_ADD=0x6F006F00)
    constants |= dict(STAGES=4 if tiles == 1 else 6, TILES=tiles)
    boxes = dict(x_desc=(64 // tiles, 64))
    return compile_one(moe_w4_hopper_kernel, constants, warps=4, gluon=True, boxes=boxes)


def _routing(num_experts: int) -> dict[str, Any]:
    """One group with a bias, as Kimi K2 has it."""
    from kernels.sizes import next_power_of_2

    constants = dict(E=num_experts, E_PAD=next_power_of_2(num_experts), TOP_K=8, NUM_SHARED=1)
    constants |= dict(GROUPS=1, GROUPS_KEPT=1, SIGMOID=True, HAS_BIAS=True, GROUP_TOP2=False)
    return {**constants, "RENORMALISE": True, "USE_PDL": True}


def moe_topk(num_experts: int) -> Any:
    """Of scores that are there."""
    from kernels.triton.moe_route import moe_topk_kernel

    return compile_one(moe_topk_kernel, {**_routing(num_experts), "TERMS": 1}, warps=1)


def moe_norm_route(num_experts: int, hidden: int) -> Any:
    """With the norm and the scores before it."""
    from kernels.triton.moe_route import moe_norm_route_kernel

    constants = {**_routing(num_experts), "K": hidden, "BLOCK": 8192, "PER_PROGRAM": 4}
    types = {"router": "*fp32", "normed": "*bf16", "arrivals": "*i32", "norm_weight": "*bf16"}
    return compile_one(moe_norm_route_kernel, constants, warps=16, types=types)


def moe_place(num_experts: int) -> Any:
    """The sort of many pairs, as `sort_pairs` launches it."""
    from kernels.sizes import next_power_of_2
    from kernels.triton.moe_large import place_sizes
    from kernels.triton.moe_sort import moe_place_kernel

    constants = dict(TOKENS=128, **place_sizes(next_power_of_2(num_experts)))
    return compile_one(moe_place_kernel, constants, warps=8)


def w4_rows() -> Any:
    """The query and latent projection of a V2-Lite layer, one token."""
    from kernels.triton.w4_rows import w4_rows_kernel

    constants = dict(K=2048, N=3648, TOP_K=1, TOKENS=8, LOADS=1, WAYS=4, KC=8, PARTS=0, NORMS=True)
    constants |= dict(ADDS=False, SWIGLU=False, EXPERTS=False, UNSORTED=False)
    constants |= dict(COMBINES=False, HAS_BEHIND=False)
    constants |= dict(INT4=False, SCALE_MUL=16, SCALE_ADD=0x6F006F00, PORTABLE=False, USE_PDL=True)
    return compile_one(w4_rows_kernel, constants, warps=4)


def dense_rows() -> Any:
    """The same in bf16."""
    from kernels.triton.dense_rows import dense_rows_kernel

    constants = dict(K=2048, N=3648, TOKENS=8, LOADS=1, WAYS=4, COLS=2048, PARTS=0, NORMS=True)
    constants |= dict(ADDS=False, SCALED=False, USE_PDL=True)
    return compile_one(dense_rows_kernel, constants, warps=4)


def mla_fp8(query_tokens: int = 1) -> Any:
    """One query token of 16 heads over fp8 planes, or two."""
    from kernels.triton.mla_decode_fp8 import mla_decode_fp8_kernel
    from kernels.triton.mla_decode_fp8_terms import mla_decode_fp8_terms_kernel

    constants = dict(H=16, Q_LEN=query_tokens, D=512, NUM_PARTS=132, ROWS_PAD=64, TILE=64)
    if query_tokens == 1:
        return compile_one(mla_decode_fp8_terms_kernel, constants, warps=4, gluon=True)
    return compile_one(mla_decode_fp8_kernel, constants | {"N": 32}, warps=4, gluon=True)


_ROW = dict(PIECES=32, BLOCK=1024, STEPS=4)  # of 102,400 to 131,072 tokens


def draw_search(by_count: bool = False) -> Any:
    from kernels.triton.draw_rows import draw_search_kernel

    return compile_one(draw_search_kernel, {**_ROW, "BY_COUNT": by_count}, warps=4)


def draw_choose() -> Any:
    from kernels.triton.draw_rows import draw_choose_kernel

    return compile_one(draw_choose_kernel, _ROW, warps=4, types={"out": "*i32"})


def edit_rows() -> Any:
    from kernels.triton.edit_rows import edit_rows_kernel

    types = {"out": "*fp32", "rows": "*fp64", "slots": "*fp64"}
    return compile_one(edit_rows_kernel, _ROW, warps=4, types=types)


def apply_bitmask() -> Any:
    from kernels.triton.bitmask import apply_bitmask_kernel

    return compile_one(apply_bitmask_kernel, {"BLOCK": 2048}, warps=4, types={"logits": "*fp32"})


_FIXED = dict(BLOCK_M=16, BLOCK_N=64, BLOCK_K=64)
_FP32 = {name: "*fp32" for name in ("x", "w", "q", "kv", "out")}
_BF16 = {name: "*bf16" for name in _FP32}


def fixed_linear(types: dict[str, str] = _BF16, warps: int = 4) -> Any:
    from kernels.triton.fixed_linear import fixed_linear_kernel

    constants = {**_FIXED, "x_k_stride": 1, "w_k_stride": 1}
    return compile_one(fixed_linear_kernel, constants, warps=warps, types=types)


def fixed_experts() -> Any:
    from kernels.triton.fixed_linear import fixed_experts_kernel

    constants = {**_FIXED, "EXPERTS_PAD": 64}
    return compile_one(fixed_experts_kernel, constants, warps=4, types=_BF16)


def fixed_part(types: dict[str, str] = _BF16, warps: int = 4) -> Any:
    from kernels.triton.fixed_attention import fixed_part_kernel

    constants = dict(H=16, D=512, R=64, PAGE=64, PART=1024, NUM_PARTS=64, TILE=64)
    constants |= dict(SLICE=128, CHUNK=64, BLOCK_H=16)
    return compile_one(fixed_part_kernel, constants, warps=warps, types=types)


KERNELS = {
    "fixed_linear": fixed_linear,
    "fixed_linear_fp32": lambda: fixed_linear(_FP32, 8),
    "fixed_experts": fixed_experts,
    "fixed_part": fixed_part,
    "fixed_part_fp32": lambda: fixed_part(_FP32, 8),
    "draw_search": draw_search,
    "draw_search_count": lambda: draw_search(True),
    "draw_choose": draw_choose,
    "edit_rows": edit_rows,
    "apply_bitmask": apply_bitmask,
    "w4_rows": w4_rows,
    "dense_rows": dense_rows,
    "mla_fp8": mla_fp8,
    "mla_fp8_of_two": lambda: mla_fp8(2),
    "mla_hopper": mla_hopper,
    "mla_hopper_of_eight": lambda: mla_hopper(8),
    "mla_hopper_of_a_group": lambda: mla_hopper(1, 4),
    "mla_shared": mla_shared,
    "mla_plan": lambda: mla_plan(1),
    "mla_plan_of_groups": lambda: mla_plan(4),
    "merge_values_of_groups": lambda: merge_values(False, 4),
    "absorb": lambda: absorb(False),
    "absorb_placed": lambda: absorb(True),
    "merge_values": lambda: merge_values(False),
    "merge_values_placed": lambda: merge_values(True),
    "mla_portable": mla_portable,
    "gather_planes": gather_planes,
    "mla_prefill_hopper": mla_prefill_hopper,
    "moe_gate_up": moe_gate_up,
    "moe_gate_up_rows": partial(moe_down_rows, False, True),
    **{
        f"moe_down{'_combined' if combines else ''}_{name}": make
        for combines in (False, True)
        for name, make in {
            "rows": partial(moe_down_rows, combines),
            "unsorted": partial(moe_down, 16, unsorted=True, combines=combines),
            "sorted": partial(moe_down, 16, unsorted=False, combines=combines),
            "sorted_32": partial(moe_down, 32, unsorted=False, combines=combines),
        }.items()
    },
    "moe_topk_384": partial(moe_topk, 384),
    "moe_norm_route_384": partial(moe_norm_route, 384, 7168),
    **{f"moe_place_{num}": partial(moe_place, num) for num in (66, 162, 257)},
    "moe_w4_hopper": moe_w4_hopper,
    "moe_w4_hopper_tall": partial(moe_w4_hopper, 2),
}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of its stack: what did not fit into them is spilled there."""
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    used = dict(re.findall(r"\b(REG|STACK):(\d+)", text))
    return {"registers": int(used["REG"]), "stack_bytes": int(used["STACK"])}


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        compiled = KERNELS[chosen]()
        ptx = compiled.asm["ptx"]
        line = {
            "kernel": chosen,
            "shared_bytes": compiled.metadata.shared,
            "wgmma": "wgmma.mma_async" in ptx,
            "mma_sync": "mma.sync.aligned" in ptx,
            "tma": "cp.async.bulk.tensor" in ptx,
            "bf16x2_scale": "mul.bf16x2" in ptx,
            **resources(compiled.asm["cubin"]),
        }
        print(json.dumps(line), flush=True)
