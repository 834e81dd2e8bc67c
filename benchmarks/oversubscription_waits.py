# SPDX-License-Identifier: Apache-2.0
"""How long turns wait for their first token where sessions need several times the memory there is.

The real scheduler in simulated time; what a step and a page's copy take is a model, its constants
measured on an H200 (2026-11). Planning takes none; a step begins when the pages of L2 it reads are
there, and gets its successor when the engine's loop would give it one. Prints a JSON line for each
combination of what it is given, the same everywhere: `python -m benchmarks.oversubscription_waits`,
with `--arrival-ms 300 200 --seed 1 2 3 --jitter 0.3 --slow 1 1.15` for how much hangs on the load.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import _scheduler as cpp
from engine.loop.event_loop import MAX_STEPS_IN_FLIGHT, RUN_AHEAD_MS, RUN_AHEAD_TOKENS

PAGE_SIZE = 64
COPY_MS = {0: 0.044, 1: 0.2}  # a page, by a move's kind: load-back, write-back; a queue each


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sessions that come one after the other, and take turns with a tool call between them."""

    num_sessions: int = 64
    context_len: int = 32_768  # tokens of a first prompt
    shared_len: int = 4_000  # of those, the same in every session
    num_turns: int = 3
    new_len: int = 800  # tokens a later turn adds to prompts and outputs so far
    output_len: int = 100
    arrival_ms: float = 300.0
    gap_ms: float = 20_000.0  # from a turn's last token to the next turn
    jitter: float = 0.0  # arrivals and gaps are longer or shorter by up to this share of them
    num_pages: int = 8_781  # L1: a quarter of what 64 sessions need
    num_l2_pages: int = 36_578
    seed: int = 0

    def around(self, most: float) -> NDArray[np.float64]:
        """Times around that one, in ms [num_sessions, num_turns]."""
        shares = np.random.default_rng(self.seed).uniform(
            1 - self.jitter, 1 + self.jitter, (self.num_sessions, self.num_turns)
        )
        return most * shares

    def prompt_len(self, number: int) -> int:
        """Tokens of a session's turn of that number, from 0."""
        return self.context_len + number * (self.output_len + self.new_len)

    def transcripts(self) -> list[NDArray[np.int32]]:
        """All that each session will ever say: a turn's prompt begins it, its output follows."""
        rng = np.random.default_rng(self.seed)
        shared = rng.integers(0, 100_000, self.shared_len, np.int32)
        shape = self.num_sessions, self.prompt_len(self.num_turns) - self.shared_len
        return [np.concatenate([shared, own]) for own in rng.integers(0, 100_000, shape, np.int32)]


def step_ms(starts: NDArray[np.int32], lens: NDArray[np.int32]) -> float:
    """What a step of rows takes, each of lens[r] tokens behind starts[r] that are in place."""
    s, n = starts[lens > 1].astype(np.float64), lens[lens > 1].astype(np.float64)
    num_decodes = len(lens) - len(n)
    if len(n) == 0:
        return 1.8 + 0.3 * num_decodes
    prefill_ms = float((9e-3 * n + 1.7e-4 * s + 4.3e-7 * n * (s + n / 2)).sum())
    return max(prefill_ms, 12.0) + (4.0 if num_decodes else 0.0)


@dataclass(slots=True, kw_only=True)
class Turn:
    """One request. uncached_len: prompt tokens that no tier had at an admission, at most."""

    session: int
    number: int
    asked_ms: float
    seen_ms: float = -1.0  # by a plan
    admitted_ms: float = -1.0
    first_ms: float = -1.0
    num_sampled: int = 0
    uncached_len: int = 0

    @property
    def waits_ms(self) -> NDArray[np.float64]:
        """For a plan that sees it, for its place and memory, for its first token."""
        return np.diff([self.asked_ms, self.seen_ms, self.admitted_ms, self.first_ms])


@dataclass(slots=True, kw_only=True)
class Step:
    """A step under way."""

    plan: cpp.Plan
    end_ms: float
    successor_ms: float  # when the step behind it may be planned


class Simulation:
    """One scheduler, one device and two copy queues, from the first arrival to the last token."""

    def __init__(self, load: Load, config: cpp.SchedulerConfig, slow: float = 1.0) -> None:
        self.load, self.slow = load, slow
        self.scheduler = cpp.Scheduler(config)
        self.transcripts = load.transcripts()
        self.now_ms, self.num_live = 0.0, 0
        self.turns: list[Turn] = []  # by request id
        self.unseen: list[Turn] = []
        self.steps: deque[Step] = deque()
        self.gaps_ms = load.around(load.gap_ms)
        came_ms = np.cumsum(load.around(load.arrival_ms)[:, 0]) - load.arrival_ms
        # Heaps: (when, session, number of the turn) and (when, ticket).
        self.arrivals = [(max(0.0, ms), i, 0) for i, ms in enumerate(came_ms.tolist())]
        heapq.heapify(self.arrivals)
        self.acks: list[tuple[float, int]] = []
        self.ready_ms: dict[int, float] = {}  # by ticket
        self.free_ms = dict.fromkeys(COPY_MS, 0.0)  # when a queue has done all it was given

    def run(self) -> list[Turn]:
        """Every turn of every session. Raises RuntimeError if the scheduler comes to a halt."""
        while self.arrivals or self.num_live:
            self.submit_arrived()
            self.scheduler.advance(self.acks_due())
            if not self.may_plan() or not self.plan_step():
                self.wait()
            while self.steps and self.steps[0].end_ms <= self.now_ms:
                self.end_step(self.steps.popleft())
        return self.turns

    def may_plan(self) -> bool:
        if not self.steps:
            return True
        return len(self.steps) < MAX_STEPS_IN_FLIGHT and self.steps[-1].successor_ms <= self.now_ms

    def wait(self) -> None:
        """Let time pass until something happens."""
        coming = [heap[0][0] for heap in (self.arrivals, self.acks) if heap]
        coming += [ms for step in self.steps for ms in (step.end_ms, step.successor_ms)]
        later = [ms for ms in coming if ms > self.now_ms]
        if not later:
            raise RuntimeError(f"{self.num_live} requests wait for nothing")
        self.now_ms = min(later)

    def plan_step(self) -> bool:
        """Whether there was something to run."""
        plan = self.scheduler.next_plan(int(self.now_ms))
        for turn in self.unseen:
            turn.seen_ms = self.now_ms
        self.unseen.clear()
        for entered in plan.admissions:
            turn = self.turns[entered.request_id]
            uncached = entered.prompt_len - entered.cached_l1 - entered.cached_l2
            turn.uncached_len = max(turn.uncached_len, uncached)
            turn.admitted_ms = self.now_ms if turn.admitted_ms < 0 else turn.admitted_ms
        self.start_copies(plan)
        if plan.step_id >= 0:
            self.steps.append(self.start_step(plan))
        return plan.step_id >= 0

    def submit_arrived(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now_ms:
            asked_ms, session, number = heapq.heappop(self.arrivals)
            prompt = self.transcripts[session][: self.load.prompt_len(number)]
            new_id, most = len(self.turns), self.load.output_len
            spec = cpp.RequestSpec(request_id=new_id, token_ids=prompt, max_new_tokens=most)
            self.scheduler.submit([spec])
            self.turns.append(Turn(session=session, number=number, asked_ms=asked_ms))
            self.unseen.append(self.turns[-1])
            self.num_live += 1

    def start_copies(self, plan: cpp.Plan) -> None:
        for ticket, kind in plan.moves[:, :2].tolist():
            self.free_ms[kind] = max(self.free_ms[kind], self.now_ms) + COPY_MS[kind]
            self.ready_ms[ticket] = self.free_ms[kind]
            heapq.heappush(self.acks, (self.free_ms[kind], ticket))

    def acks_due(self) -> list[cpp.Event]:
        due: list[cpp.Event] = []
        while self.acks and self.acks[0][0] <= self.now_ms:
            due.append(cpp.TransferAck(ticket=heapq.heappop(self.acks)[1], ok=True))
        return due

    def start_step(self, plan: cpp.Plan) -> Step:
        """The rows run once those of the step before have, and what they read is there."""
        read_ms = [self.ready_ms[i] for row in plan.row_loads.tolist() for i in range(*row)]
        begin_ms = max([self.now_ms, *read_ms, *(step.end_ms for step in self.steps)])
        end_ms = begin_ms + self.slow * step_ms(plan.row_starts, plan.row_lens)
        is_small = len(plan.input_ids) <= RUN_AHEAD_TOKENS
        successor_ms = self.now_ms if is_small else end_ms - RUN_AHEAD_MS
        return Step(plan=plan, end_ms=end_ms, successor_ms=successor_ms)

    def end_step(self, step: Step) -> None:
        """The rows sample what the transcripts say."""
        plan = step.plan
        samples, flags = plan.row_samples.astype(np.int32), np.zeros(len(plan.row_lens), np.uint8)
        ids = np.zeros((len(samples), 1), np.int32)
        for row in np.flatnonzero(samples).tolist():
            turn = self.turns[int(plan.row_request_ids[row])]
            place = self.load.prompt_len(turn.number) + turn.num_sampled
            ids[row] = self.transcripts[turn.session][place]
            turn.first_ms = step.end_ms if turn.first_ms < 0 else turn.first_ms
            turn.num_sampled += 1
        done = cpp.StepDone(
            step_id=plan.step_id, num_accepted=samples, token_ids=ids, finished=flags, failed=flags
        )
        for ended in self.scheduler.advance([*self.acks_due(), done]):
            turn, self.num_live = self.turns[ended.request_id], self.num_live - 1
            if turn.number + 1 < self.load.num_turns:
                again_ms = step.end_ms + self.gaps_ms[turn.session, turn.number]
                heapq.heappush(self.arrivals, (again_ms, turn.session, turn.number + 1))
        self.scheduler.drain_kv_events()


def waits(name: str, turns: list[Turn]) -> dict[str, object]:
    """Time to the first token from when it was asked for, in ms."""
    ordered = sorted(turn.first_ms - turn.asked_ms for turn in turns)
    places = {f"p{p}": len(ordered) * p // 100 for p in (50, 90, 99)} | {"max": -1}
    return {f"{name}_{key}_ms": round(ordered[place], 1) for key, place in places.items()}


def slowest(turns: list[Turn]) -> dict[str, object]:
    """What the slowest twentieth waited for: means, in ms."""
    ordered = sorted((turn.waits_ms for turn in turns), key=np.sum)
    means = np.mean(ordered[len(ordered) * 19 // 20 :], axis=0)
    names = "unseen", "for_room", "for_token"
    return {f"slowest_{n}_ms": round(float(m), 1) for n, m in zip(names, means, strict=True)}


def measure(load: Load, slow: float = 1.0, **options: Any) -> dict[str, object]:
    """One line of figures; slow: how many times as long as measured every step takes; options:
    fields of the scheduler's configuration."""
    config = cpp.SchedulerConfig(
        page_size=PAGE_SIZE,
        num_pages=load.num_pages,
        num_l2_pages=load.num_l2_pages,
        max_slots=64,
        max_context_len=load.prompt_len(load.num_turns),
        token_budget=4096,
        **options,
    )
    simulation = Simulation(load, config, slow)
    turns = simulation.run()
    later = [turn for turn in turns if turn.number > 0]
    most = load.new_len + PAGE_SIZE  # a page that is not full goes to no lower tier
    return {
        "bench": "oversubscription_waits",
        "sessions": load.num_sessions,
        "overlap_loads": config.overlap_loads,
        "suffix_us": config.suffix_us_per_token,
        "spare_percent": config.spare_percent,
        "arrival_ms": load.arrival_ms,
        "seed": load.seed,
        "jitter": load.jitter,
        "slow": slow,
        **waits("cold", [turn for turn in turns if turn.number == 0]),
        **waits("later", later),
        **slowest(later),
        "later_new_only": round(sum(turn.uncached_len <= most for turn in later) / len(later), 3),
        "end_s": round(simulation.now_ms / 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--overlap-loads", action="store_true", help="turns run while pages come")
    parser.add_argument("--suffix-us", type=int, metavar="N", dest="suffix_us_per_token")
    parser.add_argument("--spare-percent", type=int, metavar="N")
    parser.add_argument("--arrival-ms", type=float, nargs="+", default=[300.0])
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--jitter", type=float, default=0.0, help="of arrivals and gaps, a share")
    parser.add_argument("--slow", type=float, nargs="+", default=[1.0], help="steps' times, times")
    options = vars(parser.parse_args())
    num_sessions, jitter = options.pop("sessions"), options.pop("jitter")
    lists = (options.pop(name) for name in ("arrival_ms", "seed", "slow"))
    for arrival_ms, seed, slow in itertools.product(*lists):
        load = Load(num_sessions=num_sessions, arrival_ms=arrival_ms, seed=seed, jitter=jitter)
        print(json.dumps(measure(load, slow, **options)), flush=True)


if __name__ == "__main__":
    main()
