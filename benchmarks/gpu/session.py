# SPDX-License-Identifier: Apache-2.0
"""One sitting at a GPU: what is to be checked and measured there, most wanted first.

    python -m benchmarks.gpu.session --out DIR [--parts first | second | NAME,NAME ...] [--commit C]
    python -m benchmarks.gpu.session --out DIR --dry-run          without a GPU: tiny shapes

Each part is a process of its own with a time limit of its own; one that fails or hangs costs the
others nothing. Everything a part prints goes to DIR/NAME.log, its JSON lines to DIR/results.jsonl
with the part's name and the source that ran, and one line a part says how it ended. `first` to
`fifth` take ten minutes each at most. What a new kernel needs to become the default: its tests
pass, and its figures beat those of the one before it in the same run (the pairs of `kernels`
settings below).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.source_tree import COMMIT_VARIABLE, source_facts

ROOT = pathlib.Path(__file__).parents[2]
TAIL_LINES = 25
TESTS = "-m gpu -p no:benchmark -p no:cacheprovider -v -rf --timeout=150"  # names, if cut
TRIALS = (
    "tests/kernels/test_gpu_sampling.py tests/engine/test_gpu_deterministic.py"
    " tests/engine/test_gpu_speculation.py"
)
PREFILL_TESTS = (
    "tests/kernels/test_mla_prefill.py tests/kernels/test_gpu_kernels.py"
    " tests/engine/test_gpu_engine.py"
)
LOAD_TESTS = "tests/kvtiers/test_gpu_transfer.py"
STEPS = "-m benchmarks.gpu.steps --only decode --steps 100"
TINY_STEPS = "-m benchmarks.gpu.steps --shape tiny --weights bf16 --steps 3 --max-slots 4"
SERVER = "-m benchmarks.gpu.engine --cases 1x65536x4,8x32768x5,16x65536x4"
TINY_SERVER = (
    "-m benchmarks.gpu.engine --shape tiny --weights bf16 --cases 1x300x2,2x200x2 --new 20"
    " --output 8 --set engine.kv_dtype=auto --set engine.dtype=float32"
)
PREFILL = "-m benchmarks.gpu.steps --only prefill"
TINY_PREFILL = f"{TINY_STEPS} --only prefill"
COLD = "-m benchmarks.gpu.steps --only cold"
LAUNCHES = "--no-prefill-graphs"
SUMS = "moe_w4=triton_combined"
SHORT_TESTS = "tests/engine/test_gpu_short_prefill.py"
LONE_TESTS = "tests/engine/test_gpu_lone_steps.py"
FOLD_TESTS = "tests/engine/test_gpu_folding.py tests/engine/test_gpu_speculation.py"
TINY_DRAFTS = "-m benchmarks.gpu.draft_steps --shape tiny --weights bf16 --steps 3"
EXPANDED = "mla_prefill_form=expanded"
# Where a prefill's cost to streams shows: turns that come apart, over HTTP.
# Pinning L2 takes a machine whose memory grows as it is used most of a start.
SMALL_L2 = "--set engine.tiers.l2_bytes=8589934592"
TURNS = f"-m benchmarks.gpu.engine --cases 1x65536x4,8x32768x5 --trace {SMALL_L2}"
TINY_TURNS = f"{TINY_SERVER} --trace"
DRAWS = "--temperature 0.8 --top-p 0.95"
# 16 sessions of 32K tokens over a pool of a quarter of that, the rest in host memory.
TIERS = (
    "-m benchmarks.gpu.engine --cases 16x32768x3 --gap 4 --arrival 0.3 --output 100"
    " --set engine.kv_pool_tokens=131072 --set engine.max_context_len=65536"
    " --set engine.tiers.l2_bytes=34359738368"
)
# The peers' load: 65 GB of KV over a pool of 17.5 GB, tool gaps of 20 s.
OVERSUBSCRIBED = (
    "-m benchmarks.gpu.engine --cases 64x32768x3 --gap 20 --arrival 0.3 --output 100 --trace"
    " --set engine.kv_pool_tokens=562000 --set engine.max_context_len=65536"
    " --set engine.tiers.l2_bytes=73014444032 --set engine.tiers.l3=none"
)
TINY_TIERS = (
    f"{TINY_SERVER} --gap 0.2 --set engine.kv_pool_tokens=1024 --set engine.max_context_len=512"
    " --set engine.tiers.l2_bytes=16777216"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`command` goes behind the interpreter; `dry` is the same without a GPU."""

    name: str
    half: str
    limit_s: int
    command: str
    dry: str


PARTS = (
    Part(
        name="trial_tests",
        half="first",
        limit_s=150,
        command=f"-m pytest {TESTS} {TRIALS}",
        dry=f"-m pytest {TESTS} {TRIALS}",
    ),
    Part(
        name="steps_bf16",
        half="first",
        limit_s=90,
        command=f"{STEPS} --kv-dtype bf16",
        dry=f"{TINY_STEPS} --only decode",
    ),
    Part(
        name="steps_fp8",
        half="first",
        limit_s=80,
        command=f"{STEPS} --kv-dtype fp8",
        dry=f"{TINY_STEPS} --only decode",
    ),
    Part(
        name="steps_draws",
        half="first",
        limit_s=80,
        command=f"{STEPS} {DRAWS}",
        dry=f"{TINY_STEPS} --only decode {DRAWS}",
    ),
    Part(
        name="steps_draws_trial",
        half="first",
        limit_s=80,
        command=f"{STEPS} {DRAWS} --kernels draw_tokens=triton_search",
        dry=f"{TINY_STEPS} --only decode {DRAWS} --kernels draw_tokens=reference",
    ),
    Part(
        name="server_bf16",
        half="second",
        limit_s=200,
        command=SERVER,
        dry=TINY_SERVER,
    ),
    Part(
        name="server_fp8",
        half="second",
        limit_s=170,
        command=f"{SERVER} --kv fp8",
        dry=f"{TINY_SERVER} --api session",
    ),
    Part(
        name="tiers",
        half="second",
        limit_s=120,
        command=TIERS,
        dry=TINY_TIERS,
    ),
    Part(
        name="layered_tests",
        half="second",
        limit_s=100,
        command=f"-m pytest {TESTS} {LOAD_TESTS}",
        dry=f"-m pytest {TESTS} {LOAD_TESTS}",
    ),
    Part(
        name="layered",
        half="second",
        limit_s=150,
        command="-m benchmarks.gpu.layered",
        dry="-m benchmarks.gpu.layered --dry --rounds 2",
    ),
    Part(
        name="fold_tests",
        half="folds",
        limit_s=260,
        command=f"-m pytest {TESTS} {FOLD_TESTS}",
        dry=f"-m pytest {TESTS} {FOLD_TESTS}",
    ),
    Part(
        name="steps_drafts",
        half="folds",
        limit_s=140,
        command="-m benchmarks.gpu.draft_steps --kv-dtype bf16",
        dry=TINY_DRAFTS,
    ),
    Part(
        name="steps_drafts_fp8",
        half="folds",
        limit_s=140,
        command="-m benchmarks.gpu.draft_steps --kv-dtype fp8",
        dry=TINY_DRAFTS,
    ),
    Part(
        name="kernels",
        half="third",
        limit_s=200,
        command="-m benchmarks.gpu.kernels --only sampling,mla",
        dry="-m benchmarks.gpu.session --check-sampling",
    ),
    Part(
        name="moe_few",
        half="few",
        limit_s=150,
        command="-m benchmarks.gpu.kernels --only moe_few",
        dry="-m benchmarks.gpu.session --check-sampling",
    ),
    Part(
        name="prefill_tests",
        half="fourth",
        limit_s=330,
        command=f"-m pytest {TESTS} {PREFILL_TESTS}",
        dry=f"-m pytest {TESTS} {PREFILL_TESTS}",
    ),
    Part(
        name="prefill_bf16",
        half="fourth",
        limit_s=90,
        command=f"{PREFILL} --kv-dtype bf16",
        dry=TINY_PREFILL,
    ),
    Part(
        name="prefill_fp8",
        half="fourth",
        limit_s=90,
        command=f"{PREFILL} --kv-dtype fp8",
        dry=TINY_PREFILL,
    ),
    Part(
        name="prefill_bf16_launches",
        half="fourth",
        limit_s=90,
        command=f"{PREFILL} --kv-dtype bf16 {LAUNCHES}",
        dry=f"{TINY_PREFILL} {LAUNCHES}",
    ),
    Part(
        name="cold_bf16",
        half="fourth",
        limit_s=90,
        command=f"{COLD} --kv-dtype bf16",
        dry=f"{TINY_STEPS} --only cold",
    ),
    Part(
        name="short_tests",
        half="short",
        limit_s=120,
        command=f"-m pytest {TESTS} {SHORT_TESTS}",
        dry=f"-m pytest {TESTS} {SHORT_TESTS}",
    ),
    Part(
        name="short_forms",
        half="short",
        limit_s=90,
        command="-m benchmarks.gpu.prefill --only forms",
        dry=f"{TINY_PREFILL} --kernels mla_prefill_form=absorbed",
    ),
    Part(
        name="short_bf16",
        half="short",
        limit_s=90,
        command=f"{PREFILL} --kv-dtype bf16",
        dry=TINY_PREFILL,
    ),
    Part(
        name="short_fp8",
        half="short",
        limit_s=90,
        command=f"{PREFILL} --kv-dtype fp8",
        dry=TINY_PREFILL,
    ),
    Part(
        name="short_bf16_expanded",
        half="short",
        limit_s=90,
        command=f"{PREFILL} --kv-dtype bf16 --kernels {EXPANDED}",
        dry=f"{TINY_PREFILL} --kernels {EXPANDED}",
    ),
    Part(
        name="turns_bf16",
        half="fifth",
        limit_s=150,
        command=TURNS,
        dry=TINY_TURNS,
    ),
    Part(
        name="turns_fp8",
        half="fifth",
        limit_s=150,
        command=f"{TURNS} --kv fp8",
        dry=TINY_TURNS,
    ),
    Part(
        name="turns_session",
        half="fifth",
        limit_s=150,
        command=f"{TURNS} --api session",
        dry=f"{TINY_TURNS} --api session",
    ),
    Part(
        name="turns_wide",
        half="fifth",
        limit_s=170,
        command=f"-m benchmarks.gpu.engine --cases 16x65536x4 --trace {SMALL_L2} --kv fp8",
        dry=TINY_TURNS,
    ),
    Part(
        name="turns_wide_bf16",
        half="fifth",
        limit_s=170,
        command=f"-m benchmarks.gpu.engine --cases 16x65536x4 --trace {SMALL_L2}",
        dry=TINY_TURNS,
    ),
    *(
        Part(
            name=f"forks_{name}",
            half="forks",
            limit_s=120,
            command="-m benchmarks.gpu.engine --cases 8x65536x3 --shared 61440 --trace"
            f" {SMALL_L2} {setting}",
            dry=f"{TINY_TURNS} --shared 100",
        )
        for name, setting in (
            ("grouped", ""),
            ("apart", "--set engine.kernels=mla_decode_group=apart"),
        )
    ),
    Part(
        name="shared",
        half="forks",
        limit_s=100,
        command="-m benchmarks.gpu.kernels --only shared",
        dry="-m benchmarks.gpu.session --check-sampling",
    ),
    Part(
        name="lone_tests",
        half="lone",
        limit_s=120,
        command=f"-m pytest {TESTS} {LONE_TESTS}",
        dry=f"-m pytest {TESTS} {LONE_TESTS}",
    ),
    *(
        Part(
            name=f"cold_lone_{lone}",  # 4096: as the steps of everybody
            half="lone",
            limit_s=90,
            command="-m benchmarks.gpu.engine --cases 1x65536x2 --trace --kv fp8"
            f" {SMALL_L2} --set engine.lone_token_budget={lone}",
            dry=f"{TINY_TURNS} --set engine.lone_token_budget={lone}",
        )
        for lone in (4096, 8192, 16384)
    ),
    Part(
        name="oversubscribed",
        half="sixth",
        limit_s=270,
        command=OVERSUBSCRIBED,
        dry=f"{TINY_TIERS} --trace",
    ),
    Part(
        name="steps_fp8_again",
        half="sums",
        limit_s=80,
        command=f"{STEPS} --kv-dtype fp8",
        dry=f"{TINY_STEPS} --only decode",
    ),
    Part(
        name="steps_fp8_sums",
        half="sums",
        limit_s=80,
        command=f"{STEPS} --kv-dtype fp8 --kernels {SUMS}",
        dry=f"{TINY_STEPS} --only decode --kernels moe_w4=reference",
    ),
    Part(
        name="all_tests",
        half="third",
        limit_s=330,
        command=f"-m pytest {TESTS} tests/kernels tests/engine",
        dry=f"-m pytest {TESTS} tests/kernels/test_gpu_kernels.py",
    ),
)


def run_part(part: Part, out: pathlib.Path, is_dry: bool) -> dict[str, Any]:
    """Run it to its end or its limit; what it printed is in its log."""
    log = out / f"{part.name}.log"
    command = [sys.executable, *(part.dry if is_dry else part.command).split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if is_dry and part.name in ("kernels", "moe_few", "shared"):
        environment["TRITON_INTERPRET"] = "1"
    start = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # its own children end with it
        )
        try:
            rc: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            rc = None
        # A server that its benchmark left behind would hold the memory of the next part.
        end_group(process.pid)
        process.wait()
    return {
        "part": part.name,
        "rc": rc,  # null: over its limit
        "wall_s": round(time.monotonic() - start, 1),
        "limit_s": part.limit_s,
    }


def end_group(group: int) -> None:
    """End what is left of a part's processes."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def lines_of(log: pathlib.Path) -> tuple[list[dict[str, Any]], list[str]]:
    """(the JSON lines of a log, its last lines)."""
    text = log.read_text(errors="replace").splitlines()
    found = []
    for line in text:
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:  # an error message may begin with a brace
                continue
    return found, text[-TAIL_LINES:]


def chosen(names: str) -> list[Part]:
    """The parts asked for, in their order."""
    wanted = {name.strip() for name in names.split(",")}
    known = {part.name for part in PARTS} | {part.half for part in PARTS} | {"all"}
    if unknown := wanted - known:
        raise SystemExit(f"--parts: {sorted(unknown)} are not in {sorted(known)}")
    return [part for part in PARTS if wanted & {part.name, part.half, "all"}]


def check_sampling() -> int:
    """The sampling kernels' checks in the interpreter, for a dry run."""
    from benchmarks.gpu.sampling_bench import check

    for line in check(vocab=200, device="cpu"):
        print(json.dumps(line), flush=True)
        if not line["rel_error"] < 0.01:
            return 1
    return 0


def main() -> int:
    """Run the parts; 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu-session"))
    parser.add_argument("--parts", default="all")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--commit", default="", help="where this is a copy without history: $(git rev-parse HEAD)"
    )
    parser.add_argument("--check-sampling", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.check_sampling:
        return check_sampling()
    args.out.mkdir(parents=True, exist_ok=True)
    source = source_facts()
    if args.commit:
        source["commit"] = args.commit
    os.environ[COMMIT_VARIABLE] = source["commit"]
    num_failed = 0
    with (args.out / "results.jsonl").open("a") as results:
        for part in chosen(args.parts):
            verdict = run_part(part, args.out, args.dry_run)
            found, tail = lines_of(args.out / f"{part.name}.log")
            for one in [*found, verdict]:
                line = {"part": part.name, **one, **source}
                print(json.dumps(line), flush=True)
                print(json.dumps(line), file=results, flush=True)
            if verdict["rc"] != 0:
                num_failed += 1
                print("\n".join(tail), flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
