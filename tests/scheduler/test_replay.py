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
from tests.fakes.scheduler_sim import Harness, TierMover, ToyModel, random_tokens

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


def record_tiers(seed: int, steps: int = 300) -> tuple[bytes, dict[str, int]]:
    """A busy run over three tiers: every call and event there is, some transfers late or lost."""
    rng = random.Random(seed)
    config = cpp.SchedulerConfig(
        page_size=2,
        num_pages=14,
        max_slots=3,
        max_context_len=36,
        token_budget=10,
        attention_len=16,
        num_l2_pages=12,
        use_l3=True,
        num_l3_pages=20,
        probe_l3=True,
        l3_wait_ms=4,
        lease_percent=80,
    )
    out = io.BytesIO()
    scheduler = log.RecordingScheduler(config, out)
    harness = Harness(config, ToyModel(vocab=3), overlap=seed % 2 == 0, scheduler=scheduler)
    harness.mover = TierMover(config, harness.device, rng)
    harness.mover.loss = 0.05
    history = [[1]]
    for _ in range(steps):
        harness.now_ms += rng.randrange(4)
        tokens = np.array(rng.choice(history), np.int32)
        dice = rng.random()
        if dice < 0.4 and len(harness.live) < 10:
            prompt = rng.choice(history)[:12] + random_tokens(rng, rng.randrange(1, 8), 3)
            history.append(prompt)
            harness.submit(
                prompt,
                rng.randrange(1, 10),
                priority=rng.randrange(2),
                tenant=rng.choice("ab"),
                expected_return=rng.random(),
                send_kv=(kind := rng.random()) < 0.15,
                remote_prefill=kind > 0.85,
                l3_wait_ms=rng.choice([-1, 0, 9]),
            )
        elif dice < 0.5:
            scheduler.move(tokens, rng.choice(["l1", "l2", "l3", "none"]))
        elif dice < 0.56:
            scheduler.lease(
                lease_id=rng.randrange(4),
                token_ids=tokens,
                until_ms=harness.now_ms + 20,
                tier=rng.choice(["l1", "l2", "l3"]),
            )
        elif dice < 0.62:
            until = [harness.now_ms + rng.randrange(9) for _ in range(3)]
            scheduler.hint_prefix(
                tokens,
                rng.random(),
                l1_until_ms=until[0],
                l2_until_ms=until[1],
                l3_until_ms=until[2],
            )
        elif dice < 0.65:
            scheduler.set_costs(
                l2_us_per_page=rng.random(), l3_us_per_page=9 * rng.random(), prefill_us_per_token=1
            )
        elif dice < 0.68 and harness.live:
            scheduler.set_num_draft_tokens(rng.choice(sorted(harness.live)), rng.randrange(3))
        elif dice < 0.8 and harness.remote:
            harness.end_remote(rng.choice(sorted(harness.remote)), ok=rng.random() < 0.7)
        harness.step()
    while harness.live:
        for request_id in sorted(harness.remote):
            harness.end_remote(request_id, ok=True)
        harness.now_ms += 1
        harness.step()
    return out.getvalue(), harness.check()


@pytest.mark.parametrize("seed", range(4))
def test_every_call_over_three_tiers_replays_to_identical_results(seed: int) -> None:
    raw, stats = record_tiers(seed)
    for name in ("preemptions", "probes", "declined_pages", "loaded_pages", "transfers_lost"):
        assert stats[name] > 0, name
    records = log.read_log(raw.splitlines())
    events = [event for r in records if isinstance(r, log.Advanced) for event in r.events]
    kinds = {type(event) for event in events} | {type(record) for record in records}
    assert kinds >= {
        log.Moved,
        log.Leased,
        log.Hinted,
        log.Costs,
        log.AckRecord,
        log.ProbeRecord,
        log.SendRecord,
    }
    report = log.replay(records)
    assert report.first_difference == 0
    moved = next(i for i, r in enumerate(records) if isinstance(r, log.Moved))
    records[moved].digest += "?"  # type: ignore[union-attr]
    assert log.replay(records).first_difference == moved + 1


@pytest.mark.parametrize("seed", range(6))
def test_a_recorded_run_replays_to_identical_plans(seed: int) -> None:
    records = log.read_log(record_run(seed).splitlines())
    report = log.replay(records)
    assert report.first_difference == 0
    assert report.num_plans > 250


def test_four_mirrored_ranks_make_the_same_plans() -> None:
    mirror(log.read_log(record_run(seed=42, steps=600).splitlines()))


def test_four_mirrored_ranks_over_three_tiers_make_the_same_plans() -> None:
    mirror(log.read_log(record_tiers(seed=43, steps=500)[0].splitlines()))


def mirror(records: list[log.Record]) -> None:
    """Make the calls on four schedulers at once."""
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
