# SPDX-License-Identifier: Apache-2.0
"""What share of their tokens sessions find again where memory is too small for all of them.

The real scheduler, in simulated time: transfers and steps end at once, nothing is computed. Prints
one JSON line a load and set of tiers: `python -m benchmarks.oversubscription`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import _scheduler as cpp

PAGE_SIZE = 16
SESSION_PAGES = 50
NUM_PAGES = 1000  # L1: 20 sessions


@dataclass
class Machine:
    """One scheduler with tiers that work at once; L3 keeps every page, or there is none."""

    eviction: str
    num_l2_pages: int

    def __post_init__(self) -> None:
        self.scheduler = cpp.Scheduler(
            cpp.SchedulerConfig(
                page_size=PAGE_SIZE,
                num_pages=NUM_PAGES,
                max_slots=4,
                max_context_len=4 * SESSION_PAGES * PAGE_SIZE,
                token_budget=4096,
                eviction=self.eviction,
                num_l2_pages=self.num_l2_pages,
            )
        )
        self.now_ms = 0
        self.num_requests = 0

    def turn(self, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """Run one request to its end; tokens found in L1, and in L2."""
        self.num_requests += 1
        self.scheduler.submit(
            [cpp.RequestSpec(request_id=self.num_requests, token_ids=tokens, max_new_tokens=1)]
        )
        found = (0, 0)
        is_over = False
        while not is_over:
            self.now_ms += 5
            plan = self.scheduler.next_plan(self.now_ms)
            for admission in plan.admissions:
                found = (admission.cached_l1, admission.cached_l2)
            events: list[cpp.Event] = [
                cpp.TransferAck(ticket=ticket, ok=True) for ticket in plan.moves[:, 0].tolist()
            ]
            if plan.step_id >= 0:
                samples = plan.row_samples.astype(np.int32)
                ids = np.full((len(samples), 1), 1, np.int32)
                flags = np.zeros(len(samples), np.uint8)
                events.append(
                    cpp.StepDone(
                        step_id=plan.step_id,
                        num_accepted=samples,
                        token_ids=ids,
                        finished=flags,
                        failed=flags,
                    )
                )
            is_over = bool(self.scheduler.advance(events))
        self.scheduler.drain_kv_events()
        return found


def cyclic(num_sessions: int, num_turns: int) -> Iterator[int]:
    """One session after the other, round and round."""
    for turn in range(num_turns):
        yield turn % num_sessions


def uniform(num_sessions: int, num_turns: int) -> Iterator[int]:
    """Any session may be next."""
    rng = random.Random(1)
    for _ in range(num_turns):
        yield rng.randrange(num_sessions)


def shifting(num_live: int, num_turns: int) -> Iterator[int]:
    """So many sessions take turns at random; each ends after 20 turns and a new one comes."""
    rng = random.Random(2)
    live, newest = list(range(num_live)), num_live
    for _ in range(num_turns):
        place = rng.randrange(num_live)
        yield live[place]
        if rng.random() < 1 / 20:
            live[place], newest = newest, newest + 1


def reopened(num_live: int, num_turns: int) -> Iterator[int]:
    """As `shifting`; half of those that come are old sessions, opened again after a long time."""
    rng = random.Random(3)
    live, newest = list(range(num_live)), num_live
    old: list[int] = []
    for _ in range(num_turns):
        place = rng.randrange(num_live)
        yield live[place]
        if rng.random() < 1 / 20:
            old.append(live[place])
            if rng.random() < 0.5:
                live[place] = old.pop(rng.randrange(len(old)))
            else:
                live[place], newest = newest, newest + 1


LOADS = {
    "cyclic, 1.2 times what fits": lambda turns: cyclic(24, turns),
    "cyclic, 3 times what fits": lambda turns: cyclic(60, turns),
    "uniform, 3 times what fits": lambda turns: uniform(60, turns),
    "15 live of 20 that fit, new ones come": lambda turns: shifting(15, turns),
    "15 live of 20 that fit, old ones come back": lambda turns: reopened(15, turns),
    "30 live of 20 that fit, new ones come": lambda turns: shifting(30, turns),
}


def measure(load: str, eviction: str, num_l2_pages: int, num_turns: int) -> dict[str, object]:
    """Shares of all tokens after the first fifth of the turns."""
    machine = Machine(eviction, num_l2_pages)
    history: dict[int, NDArray[np.int32]] = {}
    in_l1 = in_l2 = total = 0
    scale = max(1, num_l2_pages // NUM_PAGES)
    for turn, session in enumerate(LOADS[load](num_turns)):
        for part in range(scale):  # as many sessions more as L2 is larger
            key = session * scale + part
            if key not in history:
                rng = np.random.default_rng(key)
                length = SESSION_PAGES * PAGE_SIZE + 1
                history[key] = rng.integers(0, 1 << 30, length, np.int32)
            l1, l2 = machine.turn(history[key])
            if turn >= num_turns // 5:
                in_l1, in_l2, total = in_l1 + l1, in_l2 + l2, total + len(history[key])
    return {
        "bench": "oversubscription",
        "load": load,
        "eviction": eviction,
        "l2_pages": num_l2_pages,
        "hit_l1": round(in_l1 / total, 3),
        "hit_l2": round(in_l2 / total, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=600)
    turns = parser.parse_args().turns
    for load in LOADS:
        for eviction in ("value", "lru"):
            for num_l2_pages in (0, 2 * NUM_PAGES):
                print(json.dumps(measure(load, eviction, num_l2_pages, turns)), flush=True)


if __name__ == "__main__":
    main()
