# SPDX-License-Identifier: Apache-2.0
"""Checks and times every GPU kernel family; prints JSON lines. Does not know: the engine.

    python -m benchmarks.gpu.kernels [--only mla,moe] [--out FILE] [--sweep]

Each line carries the floor beside the figure. A failed check ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import decode_bench, mla_bench, moe_bench, prefill, sampling_bench
from benchmarks.gpu.machine import machine_facts
from benchmarks.gpu.timing import ceilings
from kernels.triton.moe import GemmTile, MoeTiles, RowTile


def _mla(sweep: bool) -> Iterator[dict[str, Any]]:
    for kernel in mla_bench.KERNELS:
        yield from mla_bench.check(kernel)
    yield mla_bench.bench_plan()
    yield from mla_bench.bench("gluon_hopper", mla_bench.SHAPES)
    plain = [s for s in mla_bench.SHAPES if s[2:] == (16, 1)]
    for kernel in mla_bench.FP8_KERNELS:
        yield from mla_bench.bench(kernel, plain)
    if sweep:
        some = [s for s in mla_bench.SHAPES if s[0] in (1, 16) and s[2] == 16]
        yield from mla_bench.bench("triton", some)


def _shared(sweep: bool) -> Iterator[dict[str, Any]]:
    yield from mla_bench.bench_shared()


def _moe(sweep: bool) -> Iterator[dict[str, Any]]:
    for fmt in ("nvfp4", "mxfp4", "mxint4"):
        yield from moe_bench.check(fmt, [1, 3, 16, 64, 301, 512] if fmt == "nvfp4" else [2, 33])
    copies = [moe_bench.make_weights("nvfp4") for _ in range(4)]
    for num_tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096):
        yield moe_bench.bench(copies, num_tokens, None)
    if not sweep:
        return
    for num_tokens in (1, 2, 4, 8, 16, 32):
        for tile in (
            RowTile(tokens=8),
            GemmTile(nm=1, kc=2, stages=3, warps=2),
        ):
            tokens = 8 if isinstance(tile, RowTile) else 16
            tiles = MoeTiles(tokens=tokens, first=tile, second=tile)
            yield moe_bench.bench(copies, num_tokens, tiles)
    shapes = [(1, 2, 3, 2, 4), (1, 2, 4, 2, 2), (1, 4, 3, 2, 4), (2, 1, 4, 2, 4), (1, 2, 3, 1, 2)]
    for num_tokens in (1, 16, 64):
        for nm, kc, stages, warps, slices in shapes:
            tile = GemmTile(nm=nm, kc=kc, stages=stages, warps=warps, slices=slices)
            tiles = MoeTiles(tokens=16, first=tile, second=tile)
            yield moe_bench.bench(copies, num_tokens, tiles)


def _moe_few(sweep: bool) -> Iterator[dict[str, Any]]:
    """Few tokens an expert: the usual tiles, and others in items of eight."""
    copies = [moe_bench.make_weights("nvfp4") for _ in range(8)]
    wide = GemmTile(nm=1, kc=4, stages=3, warps=4)
    narrow = GemmTile(nm=1, kc=2, stages=3, warps=2)
    halves = GemmTile(nm=1, kc=2, stages=3, warps=2, slices=2)
    for num_tokens in (4, 8, 16, 24, 32):
        yield moe_bench.bench(copies, num_tokens, None)
        for first, second in ((narrow, narrow), (wide, halves)):
            tiles = MoeTiles(tokens=8, first=first, second=second)
            yield moe_bench.bench(copies, num_tokens, tiles)


def _decode(sweep: bool) -> Iterator[dict[str, Any]]:
    yield from decode_bench.bench()


def _sampling(sweep: bool) -> Iterator[dict[str, Any]]:
    yield from sampling_bench.check()
    yield from sampling_bench.bench()


def _prefill(sweep: bool) -> Iterator[dict[str, Any]]:
    with torch.inference_mode():
        yield from prefill.checks_and_times()


FAMILIES = {
    "mla": _mla,
    "shared": _shared,
    "moe": _moe,
    "decode": _decode,
    "prefill": _prefill,
    "sampling": _sampling,
    "moe_few": _moe_few,
}


def main() -> int:
    """Run the chosen families; return 1 if a check failed or a family broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    usual = [name for name in FAMILIES if name != "moe_few"]
    parser.add_argument("--only", default=",".join(usual))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := sorted(set(names) - set(FAMILIES)):
        parser.error(f"--only: got {', '.join(unknown)}; allowed: {', '.join(FAMILIES)}")
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU, which these kernels need")
    torch.manual_seed(0)
    sink = args.out.open("w") if args.out else None
    bad = 0

    def emit(line: dict[str, Any]) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if sink:
            print(text, file=sink, flush=True)

    emit({**machine_facts(), **{k: round(v, 2) for k, v in ceilings().items()}})
    for name in names:
        try:
            for line in FAMILIES[name](args.sweep):
                emit(line)
                error = line.get("rel_error", 0.0)
                bad += not error < 0.01
        except Exception:
            traceback.print_exc()
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
