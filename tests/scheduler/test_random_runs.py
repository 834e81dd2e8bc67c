# SPDX-License-Identifier: Apache-2.0
"""Random sessions, forks, aborts, failures and drops on pools that force eviction and retraction.

After every step: pages are conserved and in one place each, every KV entry a row reads was
computed from exactly that row's tokens, and what an admission found cached is what a brute-force
search over everything ever computed allows. At the end: every output is the model's own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, Job, ToyModel, random_tokens

NUM_CHUNKS = 8
SESSIONS_PER_CHUNK = 70
STEPS_PER_SESSION = 300


def shared_len(a: list[int], b: list[int]) -> int:
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


@dataclass
class CacheOracle:
    """Everything ever computed, searched by brute force; knows nothing of trees or pages."""

    computed: list[tuple[str, list[int]]] = field(default_factory=list)

    def record(self, job: Job, num_tokens: int) -> None:
        self.computed.append((job.salt, (job.prompt + job.outputs)[:num_tokens]))

    def most(self, job: Job, length: int) -> int:
        sequence = (job.prompt + job.outputs)[: length - 1]
        return max(
            (shared_len(sequence, known) for salt, known in self.computed if salt == job.salt),
            default=0,
        )


class RandomRun:
    """One seeded run; small pages, small pools, small vocabularies make collisions common."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.page_size = rng.choice([1, 2, 4, 8])
        self.vocab = rng.choice([2, 3, 50])
        self.num_pages = rng.choice([6, 8, 12, 20, 40, 100])
        self.max_len = rng.choice([24, 40, 90])
        self.harness = Harness(
            cpp.SchedulerConfig(
                page_size=self.page_size,
                num_pages=self.num_pages,
                max_slots=rng.choice([1, 2, 4, 8]),
                max_context_len=self.max_len,
                token_budget=rng.choice([1, 3, 8, 32]),
                lone_token_budget=seed % 3 * 12,
                eviction=rng.choice(["value", "lru"]),
                attention_len=rng.choice([8, 1000]),
                lease_percent=rng.choice([0, 50, 100]),
                tenant_lease_percent=rng.choice([25, 100]),
                spare_percent=rng.choice([0, 25, 100]),
            ),
            ToyModel(self.vocab, stop_one_in=rng.choice([0, 0, 10])),
            overlap=rng.random() < 0.5,
        )
        self.history: list[Job] = []
        self.leases: dict[int, tuple[Job, list[int], int]] = {}  # (job, covered tokens, until)
        self.queued: dict[int, list[int]] = {}

    def random_prompt(self) -> list[int]:
        rng = self.rng
        if not self.history or rng.random() < 0.3:
            return random_tokens(rng, rng.randrange(1, self.max_len // 2), self.vocab)
        parent = rng.choice(self.history)
        sequence = parent.prompt + parent.outputs
        if rng.random() < 0.5:
            sequence = sequence[: rng.randrange(1, len(sequence) + 1)]
        return sequence + random_tokens(rng, rng.randrange(6), self.vocab)

    def submit(self) -> None:
        prompt = self.random_prompt()
        room = min(self.max_len - len(prompt), self.num_pages * self.page_size - len(prompt) + 1)
        if room < 1:
            return
        job = self.harness.submit(
            prompt,
            self.rng.randrange(1, min(room, 30) + 1),
            salt=self.rng.choice(["", "", "x"]),
            priority=self.rng.choice([0, 0, 1]),
            tenant=self.rng.choice(["default", "other"]),
            num_draft_tokens=self.rng.choice([0, 0, 0, 1, 3]),
        )
        self.history = [*self.history[-19:], job]

    def drop(self) -> None:
        job = self.rng.choice(self.history)
        sequence = np.array(job.prompt + job.outputs, np.int32)
        self.harness.scheduler.drop_prefix(sequence, self.rng.randrange(10), job.salt)

    def lease(self) -> None:
        """Lease a prefix of a known sequence under one of a few ids, renewing what has that id."""
        job, lease_id = self.rng.choice(self.history), self.rng.randrange(5)
        sequence = job.prompt + job.outputs
        sequence = sequence[: self.rng.randrange(1, len(sequence) + 1)]
        until = self.harness.now_ms + self.rng.randrange(60)
        grant = self.harness.scheduler.lease(
            lease_id=lease_id,
            token_ids=np.array(sequence, np.int32),
            until_ms=until,
            tenant=job.tenant,
            salt=job.salt,
        )
        self.leases.pop(lease_id, None)
        if grant.state in ("granted", "clipped"):
            self.leases[lease_id] = (job, sequence[: grant.tokens_granted], until)
        elif grant.state == "queued":
            self.leases[lease_id] = (job, [], until)
            self.queued[lease_id] = sequence

    def hint(self) -> None:
        job = self.rng.choice(self.history)
        sequence = np.array(job.prompt + job.outputs, np.int32)
        self.harness.scheduler.hint_prefix(sequence, self.rng.random(), job.salt)

    def change_drafts(self) -> None:
        """Between any two plans, whatever is in flight."""
        if self.harness.live:
            request_id = self.rng.choice(sorted(self.harness.live))
            self.harness.scheduler.set_num_draft_tokens(request_id, self.rng.randrange(4))

    def check_leases(self) -> None:
        """What is promised is there, unless it was said that it is not."""
        scheduler = self.harness.scheduler
        for event in scheduler.drain_lease_events():
            job, tokens, until = self.leases[event.lease_id]
            if event.kind in ("granted", "clipped"):
                tokens = self.queued[event.lease_id]
            else:
                assert event.kind in ("revoked", "expired", "denied")
                assert event.kind != "expired" or self.harness.now_ms >= until
            if event.num_tokens == 0:
                del self.leases[event.lease_id]
            else:
                self.leases[event.lease_id] = (job, tokens[: event.num_tokens], until)
        for job, tokens, _ in self.leases.values():
            if tokens:
                held = scheduler.query_prefix(np.array(tokens, np.int32), job.salt).l1
                assert held == len(tokens), "a leased prefix lost tokens without a word"

    def disturb(self) -> None:
        """At most one thing from outside before the next step."""
        harness, rng = self.harness, self.rng
        harness.now_ms += rng.choice([0, 1, 5])
        dice = rng.random()
        if dice < 0.35 and len(harness.live) < 30:
            self.submit()
        elif dice < 0.38 and harness.live:
            harness.abort(rng.choice(sorted(harness.live)))
        elif dice < 0.40 and harness.live:
            harness.fail_next = {rng.choice(sorted(harness.live))}
        elif dice < 0.43 and self.history:
            self.drop()
        elif dice < 0.47 and self.history:
            self.lease()
        elif dice < 0.48 and self.leases:
            lease_id = rng.choice(sorted(self.leases))
            assert harness.scheduler.release(lease_id)
            del self.leases[lease_id]
        elif dice < 0.50 and self.history:
            self.hint()
        if rng.random() < 0.1:
            self.change_drafts()

    def check_outputs(self) -> None:
        for job in self.harness.jobs.values():
            expected = self.harness.model.generate(job)
            assert job.ended is not None
            if job.ended.status == "finished":
                assert job.outputs == expected
            else:
                assert job.outputs == expected[: len(job.outputs)]


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_runs_keep_every_invariant(chunk: int) -> None:
    num_plans = num_retracted = num_evicted = num_copies = 0
    for seed in range(chunk * SESSIONS_PER_CHUNK, (chunk + 1) * SESSIONS_PER_CHUNK):
        run = RandomRun(seed)
        for _ in range(STEPS_PER_SESSION):
            run.disturb()
            run.harness.step()
            run.harness.check()
            run.check_leases()
        run.harness.run()
        run.check_outputs()
        stats = run.harness.check()
        assert stats["owned_pages"] == stats["in_flight_pages"] == stats["leaving"] == 0
        num_plans += run.harness.plans
        num_retracted += run.harness.num_retracted
        num_evicted += stats["evicted_pages"]
        num_copies += stats["page_copies"]
    assert num_plans >= 25_000  # eight chunks: 200,000 steps
    assert num_retracted > 50 and num_evicted > 1000 and num_copies > 500


@pytest.mark.parametrize("seed", range(40))
def test_admissions_find_what_a_brute_force_search_finds(seed: int) -> None:
    """With room for everything, a hit is exact up to the page a running branch may hold."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 3, 4])
    config = cpp.SchedulerConfig(
        page_size=page_size, num_pages=5000, max_slots=4, max_context_len=120, token_budget=24
    )
    harness = Harness(config, ToyModel(vocab=3), overlap=rng.random() < 0.5)
    oracle = CacheOracle()
    history: list[Job] = []
    for _ in range(60):
        stem = rng.choice(history) if history and rng.random() < 0.8 else None
        sequence = (stem.prompt + stem.outputs)[: rng.randrange(1, 80)] if stem else []
        job = harness.submit(sequence + random_tokens(rng, rng.randrange(1, 20), 3), 5)
        is_alone = len(harness.live) == 1
        while job.admissions == [] or rng.random() < 0.6:
            harness.step()
        length, cached = job.admissions[0]
        most = oracle.most(job, length)
        if is_alone:
            assert cached == most
        history.append(job)
        if rng.random() < 0.7:
            harness.run()
        for done in history:
            if done.ended is not None:
                oracle.record(done, done.ended.num_cached_tokens)
        history = [done for done in history if done.ended is None] + history[-8:]
        harness.check()
    harness.run()
