# SPDX-License-Identifier: Apache-2.0
"""The same inputs give the same plans, bit for bit: in a replay, and on every mirrored rank."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import _scheduler as cpp
from engine.loop import replay as log
from tests.fakes.scheduler_sim import Harness, ToyModel, random_tokens

ROOT = Path(__file__).resolve().parents[2]


def record_run(seed: int, steps: int = 250) -> bytes:
    """A busy run on a small pool: forks, aborts, leases, hints, drops, retraction."""
    rng = random.Random(seed)
    config = cpp.SchedulerConfig(
        page_size=4,
        num_pages=9,
        max_slots=4,
        max_context_len=36,
        token_budget=10,
        attention_len=16,
    )
    out = io.BytesIO()
    scheduler = log.RecordingScheduler(config, out)
    harness = Harness(config, ToyModel(vocab=3), overlap=seed % 2 == 0, scheduler=scheduler)
    for _ in range(steps):
        harness.now_ms += rng.randrange(4)
        jobs = list(harness.jobs.values())
        dice = rng.random()
        if dice < 0.4 and len(harness.live) < 12:
            stem = rng.choice(jobs).prompt[:12] if jobs and rng.random() < 0.6 else []
            prompt = stem + random_tokens(rng, rng.randrange(1, 8), 3)
            harness.submit(prompt, rng.randrange(1, 17), tenant=rng.choice("ab"))
        elif dice < 0.44 and harness.live:
            harness.abort(rng.choice(sorted(harness.live)))
        elif dice < 0.52 and jobs:
            job = rng.choice(jobs)
            tokens = np.array(job.prompt + job.outputs, np.int32)
            scheduler.hint_prefix(tokens, rng.random())
            scheduler.lease(
                lease_id=rng.randrange(3), token_ids=tokens, until_ms=harness.now_ms + 9
            )
            scheduler.release(rng.randrange(6))
        elif dice < 0.55 and jobs:
            scheduler.drop_prefix(np.array(rng.choice(jobs).prompt, np.int32), 2)
        harness.step()
    harness.run()
    assert harness.check()["retractions"] > 0
    return out.getvalue()


@pytest.mark.parametrize("seed", range(6))
def test_a_recorded_run_replays_to_identical_plans(seed: int) -> None:
    records = log.read_log(record_run(seed).splitlines())
    report = log.replay(records)
    assert report.first_difference == 0
    assert report.num_plans > 250


def test_four_mirrored_ranks_make_the_same_plans() -> None:
    records = log.read_log(record_run(seed=42, steps=600).splitlines())
    first = records[0]
    assert isinstance(first, log.Configured)
    ranks = [cpp.Scheduler(cpp.SchedulerConfig(**first.values)) for _ in range(4)]  # type: ignore[arg-type]
    for record in records[1:]:
        if isinstance(record, log.Planned):
            plans = [rank.next_plan(record.now_ms) for rank in ranks]
            for name in log.PLAN_ARRAYS:
                arrays = [getattr(plan, name) for plan in plans]
                assert all(np.array_equal(arrays[0], other) for other in arrays[1:]), name
            assert {log.digest_plan(plan) for plan in plans} == {record.digest}
        else:
            assert len({log.apply(rank, record) for rank in ranks}) == 1
    assert len({str(sorted(rank.stats().items())) for rank in ranks}) == 1


def test_a_changed_input_is_reported_at_the_first_plan_that_differs(tmp_path: Path) -> None:
    lines = record_run(seed=1).splitlines(keepends=True)
    records = log.read_log(lines)
    changed = next(
        index
        for index, record in enumerate(records)
        if isinstance(record, log.Submitted) and index > 20
    )
    submitted = records[changed]
    assert isinstance(submitted, log.Submitted)
    submitted.specs[0].token_ids += np.array([2], "<i4").tobytes()
    report = log.replay(records)
    assert report.first_difference > changed


def test_the_command_says_whether_a_log_replays(tmp_path: Path) -> None:
    good = tmp_path / "good.jsonl"
    good.write_bytes(record_run(seed=3, steps=60))
    assert run_command(str(good)).returncode == 0
    assert "bit-identical" in run_command(str(good)).stdout
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(good.read_bytes() + b"not a record\n")
    result = run_command(str(bad))
    assert result.returncode == 1
    assert "log line" in result.stderr
    assert run_command().returncode == 2
    assert run_command(str(tmp_path / "missing")).returncode == 1


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.loop.replay", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
