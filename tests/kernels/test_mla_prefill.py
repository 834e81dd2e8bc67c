# SPDX-License-Identifier: Apache-2.0
"""MLA prefill on a GPU: its plan by brute force, its kernels interpreted, compiled and run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

CHECKS = [
    "cold",
    "rows_of_all_lengths",
    "split_prefix_merged",
    "parts_that_some_queries_do_not_see",
    "fp8_planes",
    "fp8_planes_in_groups",
    "large_keys_and_values_between_layers",
    "heads_in_groups",
    "short",
    "short_beyond_one_launch",
    "short_fp8_planes",
]
# bf16 operands and P, fp32 sums; measured 1.7e-3 .. 3.1e-3 on an H200.
TOLERANCE = 6e-3

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def _run(module: str, arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_interpreted_prefill_agrees_with_the_reference() -> None:
    out = _run("tests.kernels.mla_prefill_interpreted", CHECKS, TRITON_INTERPRET="1")
    assert out.split("\n")[:-1] == [f"ok {name}" for name in CHECKS]


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(0, 128), (7, 129)],
        [(3000, 200)],
        [(100, 300), (2000, 20), (0, 64)],
        [(0, 1000)],
    ],
)
def test_a_plan_shows_each_query_all_of_its_tokens_once(rows: list[tuple[int, int]]) -> None:
    script = (
        "import json, sys, torch\n"
        "from kernels.triton.mla_prefill_plan import make_plan\n"
        "slots, starts, lens = json.loads(sys.argv[1])\n"
        "plan = make_plan(tuple(slots), tuple(starts), tuple(lens), num_heads=16, page_size=64,\n"
        "    block_m=128, tile=128, num_processors=132, device=torch.device('cpu'))\n"
        "print(json.dumps([plan.num_kv, plan.pages.tolist(), plan.items.tolist(),\n"
        "    plan.merges.tolist()]))\n"
    )
    starts = [0, *itertools.accumulate(new for _, new in rows)]
    lens = [past + new for past, new in rows]
    slots = list(range(3, 3 + len(rows)))
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps([slots, starts, lens])],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    num_kv, pages, items, merges = json.loads(done.stdout)
    where = [(slot, at) for slot, length in zip(slots, lens, strict=True) for at in range(length)]
    held: dict[int, tuple[int, int]] = {}
    for number, (slot, index, tokens, _) in enumerate(pages):
        held |= {number * 64 + i: (slot, index * 64 + i) for i in range(tokens)}
    assert sorted(held.values()) == where
    assert num_kv == len(pages) * 64
    merged = {
        first + part: (query, count)
        for query, count, first, parts in merges
        for part in range(parts)
    }
    seen: dict[int, list[tuple[int, int]]] = {}
    for query, count, kv_row, num_tiles, limit, partial, _, _ in items:
        assert merged.get(partial, (query, count)) == (query, count)
        for i in range(count):
            shown = range(kv_row, kv_row + min(num_tiles * 128, max(0, limit + i)))
            seen.setdefault(query + i, []).extend(held[at] for at in shown)
    assert len(merged) == sum(partial >= 0 for *_, partial, _, _ in items)
    for row, (past, new) in enumerate(rows):
        for i in range(new):
            expected = [(slots[row], at) for at in range(past + i + 1)]
            assert sorted(seen[starts[row] + i]) == expected


@pytest.mark.slow
def test_the_hopper_kernel_compiles_to_the_units_it_is_written_for() -> None:
    line = json.loads(_run("tests.kernels.triton_compiled", ["mla_prefill_hopper"]))
    assert (line["wgmma"], line["tma"], line["mma_sync"]) == (True, True, False)
    assert line["shared_bytes"] <= 227 * 1024


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kernel", ["prefill_hopper", "prefill_portable"])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 70)],
        [(0, 1), (5, 2), (63, 33), (128, 64), (1000, 300)],
        [(20000, 800)],
        [(0, 2048), (4096, 129)],
    ],
)
def test_prefill_agrees_with_the_reference(kernel: str, rows: list[tuple[int, int]]) -> None:
    from benchmarks.gpu.prefill import PrefillCase
    from benchmarks.gpu.timing import relative_error
    from kernels.reference.mla_prefill import mla_prefill as reference
    from kernels.triton import mla_prefill

    torch.manual_seed(0)
    case = PrefillCase(rows, poison=True)
    found = getattr(mla_prefill, kernel)(*case.args)
    assert relative_error(found, reference(*case.args)) < TOLERANCE
    assert torch.equal(found, getattr(mla_prefill, kernel)(*case.args))


@pytest.mark.gpu
@needs_gpu
def test_heads_that_do_not_fit_together_are_taken_in_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.gpu.prefill import PrefillCase
    from benchmarks.gpu.timing import relative_error
    from kernels.reference.mla_prefill import mla_prefill as reference
    from kernels.triton import mla_prefill, mla_prefill_scratch

    torch.manual_seed(1)
    arguments: tuple[Any, ...] = PrefillCase([(3000, 300)], poison=True).args
    monkeypatch.setattr(mla_prefill_scratch, "EXPANDED_BYTES", 5 * 3328 * 512)
    found = mla_prefill.prefill_hopper(*arguments)
    assert relative_error(found, reference(*arguments)) < TOLERANCE


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [[(0, 70)], [(0, 1), (5, 2), (1000, 300)], [(20000, 800)]])
def test_latents_gathered_from_fp8_planes_have_the_bits_of_expanded_pages(
    rows: list[tuple[int, int]],
) -> None:
    """Layer after layer over one StepWork; bytes where no token is are NaN."""
    from benchmarks.gpu.prefill import PrefillCase
    from kernels.latent_planes import E4M3_MAX, latent_planes
    from kernels.ops.mla_prefill import mla_prefill
    from kernels.selection import override
    from kernels.step_work import StepWork

    torch.manual_seed(2)
    case = PrefillCase(rows, poison=True)
    q, w_uk, w_uv, pool, *rest = case.args
    num_pages, page = pool.shape[:2]
    coded = torch.full((num_pages, 2, page * 656), 0xFF, dtype=torch.uint8, device="cuda")
    planes = latent_planes(coded[:, 1], 512, 64)
    real = pool.float()
    planes.values.copy_((real[..., :512] * 64).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))
    planes.scales.fill_(2.0**-6)
    planes.rope.copy_(real[..., 512:])
    work = StepWork()
    for _ in range(2):
        args = (q, w_uk, w_uv, coded[:, 1], *rest)
        with override("mla_prefill_planes", "expanded"):
            wanted = mla_prefill(*args)
        with override("mla_prefill_planes", "gluon_hopper"):
            found = mla_prefill(*args, work)
        assert bool(torch.isfinite(found).all()) and torch.equal(found, wanted)
