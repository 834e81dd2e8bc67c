# SPDX-License-Identifier: Apache-2.0
"""Child of test_mla_prefill.py: runs the prefill's launch code with TRITON_INTERPRET=1, fp32."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.prefill_layer import LayerSizes, PrefillLayers
from engine.layers import mla_prefill as short_prefill
from kernels.latent_planes import latent_planes
from kernels.mla_workspace import make_mla_workspace
from kernels.portable import mla_prefill_planes
from kernels.reference.mla_prefill import mla_prefill as reference
from kernels.reference.mla_prefill import mla_prefill_planes as reference_of_planes
from kernels.selection import override
from kernels.step_work import StepWork
from kernels.triton import mla, mla_layer, mla_prefill, mla_prefill_plan, mla_prefill_scratch
from tests.fakes.attention_by_hand import attention_by_hand
from tests.kernels.triton_decode_interpreted import planes_case
from tests.kernels.triton_interpreted import relative_error

NOPE, ROPE, V_DIM, LATENT = 16, 16, 32, 32


def check(
    rows: list[tuple[int, int]],
    *,
    heads: int = 2,
    page: int = 16,
    expanded_bytes: int = 1 << 30,
    min_tiles: int = 8,
) -> None:
    """`rows` are (cached, new). Tokens of nobody hold NaN: reading one would show."""
    torch.manual_seed(len(rows))
    mla_prefill_scratch.EXPANDED_BYTES = expanded_bytes
    mla_prefill_plan.MIN_TILES = min_tiles
    lens = [past + new for past, new in rows]
    most = max(-(-length // page) for length in lens)
    num_pages = len(rows) * most + 1
    pool = torch.full((num_pages, 2, page, LATENT + ROPE), float("nan"))
    order = torch.randperm(num_pages)[: len(rows) * most].to(torch.int32)
    table = torch.zeros(len(rows) + 1, most, dtype=torch.int32)
    slots = torch.randperm(len(rows) + 1)[: len(rows)].to(torch.int32)
    table[slots.long()] = order.view(len(rows), most)
    for slot, length in zip(slots.tolist(), lens, strict=True):
        for at in range(0, length, page):
            real = torch.randn(min(page, length - at), LATENT + ROPE)
            pool[table[slot, at // page], 1, : len(real)] = real
    indptr = torch.tensor([0, *(new for _, new in rows)]).cumsum(0).to(torch.int32)
    # A view with gaps between tokens, as a fused projection leaves it.
    q = torch.randn(int(indptr[-1]), heads * (NOPE + ROPE) + 8)[:, :-8]
    args = (
        q.view(-1, heads, NOPE + ROPE),
        torch.randn(heads, NOPE, LATENT) * 0.3,
        torch.randn(heads, V_DIM, LATENT) * 0.3,
        pool[:, 1],
        table,
        slots,
        indptr,
        torch.tensor(lens, dtype=torch.int32),
        0.2,
    )
    found = mla_prefill.prefill_portable(*args, block_m=32, tile=32)
    error = relative_error(found, reference(*args))
    assert error < 1e-5, error


def check_planes(rows: list[tuple[int, int]], group: int, kept: int = 1 << 30) -> None:
    """Out of fp8 planes whose bytes behind a row's end are NaN, layer after layer: one StepWork."""
    torch.manual_seed(9)
    mla_prefill_scratch.EXPANDED_BYTES = group
    mla_prefill_scratch.KEPT_BYTES = kept
    lens = [past + new for past, new in rows]
    pool, table, slots, seq_lens = planes_case(lens)
    indptr = torch.tensor([0, *(new for _, new in rows)]).cumsum(0).to(torch.int32)
    work = StepWork()
    rooms: list[Any] = []
    for layer in (1, 1):
        args = (
            torch.randn(int(indptr[-1]), 2, NOPE + ROPE),
            torch.randn(2, NOPE, 128) * 0.3,
            torch.randn(2, V_DIM, 128) * 0.3,
            pool[:, layer],
            table,
            slots,
            indptr,
            seq_lens,
            0.2,
        )
        found = mla_prefill.prefill_portable(*args, work, block_m=32, tile=64)
        wanted = reference_of_planes(*args)
        assert relative_error(found, wanted) < 1e-5
        rooms += [scratch._room for scratch in work._kept.values()]
        expanded = mla_prefill_planes.prefill_of_expanded_pages(*args, StepWork())
        assert relative_error(expanded, wanted) < 1e-5
    if kept:
        assert len(rooms) == 2 and rooms[0] is rooms[1] is not None
    else:
        assert rooms == [None, None]


def check_short(specs: list[tuple[int, int]], kv: str, processors: int) -> None:
    """Rows in absorbed form, by the kernels of decode steps; `processors` of a GPU share them."""
    sizes = LayerSizes(
        num_heads=3,
        nope_dim=16,
        rope_dim=16,
        v_dim=24,
        latent_dim=128,
        dtype=torch.float32,
        device="cpu",
    )
    layers = PrefillLayers(specs, kv, sizes, 2)

    def decode(*args: Any) -> torch.Tensor:
        workspace = args[-1]
        return mla.decode_portable(*args[:-1], workspace.latent_dim, workspace)

    def expand(pool: torch.Tensor, latent: int, rope: int, table: torch.Tensor, *rest: Any) -> Any:
        slots, lens, dtype, work = rest
        pages = [-(-length // 64) for length in lens.tolist()]
        planes = latent_planes(pool, latent, rope)
        return mla_layer.mla_expand_pages(planes, table, slots, pages, dtype, work)

    patched: dict[str, Any] = {
        "mla_absorb": mla_layer.mla_absorb,
        "mla_decode": decode,
        "mla_expand_pages": expand,
        "plan_mla_decode": mla.plan,
        "make_mla_workspace": partial(make_mla_workspace, num_processors=processors),
    }
    work = StepWork()
    with mock.patch.multiple(short_prefill, **patched), override("mla_prefill_form", "absorbed"):
        for layer in (0, 1):
            found = layers.run(layer, work)
            error = relative_error(found, attention_by_hand(layers, layer))
            assert error < 1e-5, error


CHECKS: dict[str, Callable[[], None]] = {
    "cold": lambda: check([(0, 70)]),
    "rows_of_all_lengths": lambda: check([(0, 1), (5, 2), (63, 33), (128, 64), (10, 90)]),
    "split_prefix_merged": lambda: check([(300, 40)], min_tiles=2),
    "parts_that_some_queries_do_not_see": lambda: check([(3, 61), (40, 20)], min_tiles=1),
    "fp8_planes": lambda: check_planes([(100, 40), (0, 64), (7, 1)], 1 << 30),
    "fp8_planes_in_groups": lambda: check_planes([(70, 9)], 128 * 48 * 4 + 1),
    "large_keys_and_values_between_layers": lambda: check_planes([(70, 9)], 128 * 48 * 4 + 1, 0),
    "short": lambda: check_short([(130, 3), (70, 20), (0, 9)], "plain", 7),
    "short_beyond_one_launch": lambda: check_short([(600, 70)], "plain", 3),
    "short_fp8_planes": lambda: check_short([(200, 12), (63, 2)], "fp8", 5),
    "heads_in_groups": lambda: check([(50, 20)], heads=3, expanded_bytes=96 * 48 * 4 + 1),
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print("ok", name, flush=True)
