# SPDX-License-Identifier: Apache-2.0
"""A long random walk over the scheduler and a simulated three-tier KV memory.

    python -m benchmarks.soak.scheduler_soak [--minutes 10] [--seed 0]

One JSON line a minute and one at the end. Exit 1 with the seed of the run that broke: a page in
two places, KV of other tokens read, an output the model would not give, no progress.
Does not know how the scheduler decides anything.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

import numpy as np
from numpy.typing import NDArray

from _scheduler import SchedulerConfig
from tests.fakes.scheduler_sim import Harness, TierMover, ToyModel, random_tokens

STEPS_A_RUN = 1000


def random_config(rng: random.Random) -> SchedulerConfig:
    num_l2_pages = rng.choice([0, 1, 5, 20, 100])
    use_l3 = num_l2_pages > 0 and rng.random() < 0.5
    return SchedulerConfig(
        page_size=rng.choice([1, 2, 4, 8]),
        num_pages=rng.choice([8, 12, 20, 40, 100]),
        max_slots=rng.choice([1, 2, 4, 8]),
        max_context_len=rng.choice([24, 40, 90]),
        token_budget=rng.choice([1, 3, 8, 32]),
        lone_token_budget=rng.choice([0, 0, 12, 40]),
        eviction=rng.choice(["value", "lru"]),
        lease_percent=rng.choice([0, 50, 100]),
        num_l2_pages=num_l2_pages,
        use_l3=use_l3,
        num_l3_pages=rng.choice([15, 1 << 20]),
        probe_l3=use_l3 and rng.random() < 0.5,
        l3_wait_ms=rng.choice([0, 5, 50]),
        max_preemptions=rng.choice([0, 2]),
        overlap_loads=rng.random() < 0.5,
    )


class Walk:
    """One seeded run; `steps` of it, then to the end of every request."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        config = self.config = random_config(rng)
        self.vocab = rng.choice([2, 3, 50])
        model = ToyModel(self.vocab, stop_one_in=rng.choice([0, 10]))
        self.harness = Harness(config, model, overlap=rng.random() < 0.5)
        if config.num_l2_pages:
            self.harness.mover = TierMover(config, self.harness.device, rng)
            self.harness.mover.loss = rng.choice([0.0, 0.1])
            self.harness.mover.takes_heads_first = rng.random() < 0.5
        self.harness.sends_at_once = False
        self.history: list[list[int]] = [[0]]
        # Half of the runs branch from few stems: steps copy, and loads empty the pool meanwhile.
        self.stems = [random_tokens(rng, rng.randrange(4, 24), self.vocab) for _ in range(3)]
        self.has_stems = rng.random() < 0.5

    def submit(self) -> None:
        rng, config = self.rng, self.config
        stem = rng.choice(self.stems if self.has_stems else self.history)
        prompt = stem[: rng.randrange(len(stem) + 1)]
        prompt += random_tokens(rng, rng.randrange(1, 12), self.vocab)
        prompt = prompt[: config.max_context_len - 2]
        most = min(config.max_context_len, config.num_pages * config.page_size + 1) - len(prompt)
        if most < 1:
            return
        job = self.harness.submit(
            prompt,
            rng.randrange(1, min(most, 30) + 1),
            tenant=rng.choice(["a", "b"]),
            priority=rng.choice([0, 1]),
            expected_return=rng.random(),
            num_draft_tokens=rng.choice([0, 0, 2]),
            remote_prefill=(kind := rng.random()) < 0.1,
            send_kv=kind > 0.9,
        )
        self.history = [*self.history[-19:], job.prompt]

    def disturb(self) -> None:
        harness, rng = self.harness, self.rng
        harness.now_ms += rng.choice([0, 1, 5])
        dice = rng.random()
        tokens = np.array(rng.choice(self.history), np.int32)
        if dice < 0.35 and len(harness.live) < 20:
            self.submit()
        elif dice < 0.38 and harness.live:
            harness.abort(rng.choice(sorted(harness.live)))
        elif dice < 0.39 and harness.live:
            harness.fail_next = {rng.choice(sorted(harness.live))}
        elif dice < 0.40 and harness.live:
            request_id = rng.choice(sorted(harness.live))
            harness.scheduler.set_num_draft_tokens(request_id, rng.randrange(4))
        elif dice < 0.44:
            tiers = ["l1", "l2", "none"] + ["l3"] * self.config.use_l3
            harness.scheduler.move(tokens, rng.choice(tiers))
        elif dice < 0.47:
            self.lease(tokens)
        elif dice < 0.50:
            until = [rng.choice([0, harness.now_ms + rng.randrange(40)]) for _ in range(3)]
            harness.scheduler.hint_prefix(
                tokens,
                rng.random(),
                l1_until_ms=until[0],
                l2_until_ms=until[1],
                l3_until_ms=until[2],
            )
        elif dice < 0.51:
            speeds = dict(l2_us_per_page=rng.random(), l3_us_per_page=rng.random() * 9)
            harness.scheduler.set_costs(**speeds, prefill_us_per_token=rng.choice([0, 1, 5]))
        elif dice < 0.55 and harness.sends:
            harness.end_send(rng.choice(sorted(harness.sends)), ok=rng.random() < 0.7)
        elif dice < 0.7 and harness.remote:
            harness.end_remote(rng.choice(sorted(harness.remote)), ok=rng.random() < 0.7)

    def lease(self, tokens: NDArray[np.int32]) -> None:
        tiers = ["l1"] + ["l2"] * (self.config.num_l2_pages > 0) + ["l3"] * self.config.use_l3
        self.harness.scheduler.lease(
            lease_id=self.rng.randrange(4),
            token_ids=tokens,
            until_ms=self.harness.now_ms + 40,
            tier=self.rng.choice(tiers),
        )

    def run(self, steps: int) -> None:
        harness = self.harness
        for _ in range(steps):
            self.disturb()
            harness.step()
            harness.check()
        harness.sends_at_once = True
        for _ in range(100_000):
            if not harness.live:
                break
            for request_id in sorted(harness.remote):
                harness.end_remote(request_id, ok=True)
            harness.now_ms += 1
            harness.step()
        while harness.flights:
            harness.commit()
        assert not harness.live, "no progress"
        for job in harness.jobs.values():
            expected = harness.model.generate(job)
            assert job.outputs == expected[: len(job.outputs)], "an output is not the model's"
        if harness.mover is not None:
            self.move_about()

    def move_about(self) -> None:
        """Whatever state the walk left: where there is room, a move ends, and it loses nothing."""
        harness, rng, config = self.harness, self.rng, self.config
        assert harness.mover is not None
        harness.mover.loss, harness.mover.delay = 0.0, rng.choice([0.0, 0.3, 0.9])
        harness.now_ms += 1_000_000  # leases and wishes are over
        for _ in range(100):
            self.settle(20, ms=30)
            if harness.scheduler.stats()["move_orders"] == 0:
                break
        else:
            raise AssertionError("a move does not end")
        room = {"l1": config.num_pages, "l2": config.num_l2_pages}
        room |= {"l3": config.num_l3_pages} if config.use_l3 else {}
        for _ in range(6):
            tokens = np.array(rng.choice(self.history), np.int32)
            num_pages, tier = len(tokens) // config.page_size, rng.choice(list(room))
            if num_pages > room[tier]:
                continue
            depth = harness.scheduler.query_prefix(tokens)
            num_known = min(num_pages, (depth.l1 + depth.l2 + depth.l3) // config.page_size)
            if config.num_l3_pages < 1000:
                num_known = 0  # names are forgotten
            for _ in range(4):  # an order that nothing came of for long ends, and is given again
                harness.scheduler.move(tokens, tier)
                self.settle(150, ms=30)
                harness.scheduler.move(tokens, tier)  # asks the store
                self.settle(60, ms=1)
                result = harness.scheduler.move(tokens, tier)
                if result.tokens_pending == 0:
                    break
            assert result.tokens_pending == 0, f"a move to {tier} does not end"
            assert result.tokens_there >= num_known * config.page_size, f"lost on the way to {tier}"

    def settle(self, num_steps: int, *, ms: int) -> None:
        for _ in range(num_steps):
            self.harness.now_ms += ms
            self.harness.step()
            self.harness.check()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = said = time.monotonic()
    seed, num_steps, num_requests, num_overlapped = arguments.seed, 0, 0, 0
    while time.monotonic() - start < arguments.minutes * 60:
        walk = Walk(seed)
        try:
            walk.run(STEPS_A_RUN)
        except (AssertionError, RuntimeError) as error:
            print(json.dumps({"case": "scheduler_soak", "broken_seed": seed, "why": str(error)}))
            return 1
        seed += 1
        num_steps += walk.harness.plans
        num_requests += len(walk.harness.jobs)
        num_overlapped += walk.harness.num_rows_while_loading
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(json.dumps({"runs": seed - arguments.seed, "steps": num_steps}), flush=True)
    result = {"case": "scheduler_soak", "runs": seed - arguments.seed, "steps": num_steps}
    result |= {"requests": num_requests, "rows_while_loading": num_overlapped, "broken": 0}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
