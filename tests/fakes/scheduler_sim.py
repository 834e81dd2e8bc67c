# SPDX-License-Identifier: Apache-2.0
"""A device and a greedy language model of toy size, to run the scheduler against.

Owns a KV memory that remembers, for each (page, offset), the whole token sequence the entry was
computed from; so a row that would read another request's KV, or stale KV, is caught at once. It
runs a step layer by layer, and a page that is being loaded comes layer by layer, none of it sooner
than a row that says what it waits for reads it.
Does not know how the scheduler decides anything.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor

import numpy as np
from numpy.typing import NDArray

import _scheduler as cpp

MASK = (1 << 61) - 1
NUM_LAYERS = 3


def mix(prefix: int, token: int) -> int:
    """Hash of a sequence from the hash of all but its last token."""
    return ((prefix ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 + 0x94D049BB) & MASK


def seed_of(salt: str) -> int:
    return mix(17, sum(salt.encode()) + 7)


@dataclass
class Job:
    """One request as its client knows it."""

    request_id: int
    prompt: list[int]
    max_new: int
    salt: str = ""
    priority: int = 0
    tenant: str = "default"
    num_draft_tokens: int = 0
    remote_prefill: bool = False
    expected_return: float = 0.5
    l3_wait_ms: int = -1
    send_kv: bool = False
    outputs: list[int] = field(default_factory=list)
    slot: int = -1
    ended: cpp.Ended | None = None
    admissions: list[tuple[int, int]] = field(default_factory=list)  # (length, cached)


class ToyModel:
    """Greedy: the next token is a function of the whole sequence; some sequences end themselves."""

    def __init__(self, vocab: int = 50, stop_one_in: int = 0) -> None:
        self.vocab = vocab
        self.stop_one_in = stop_one_in

    def next_token(self, sequence_hash: int) -> int:
        return (sequence_hash >> 7) % self.vocab

    def stops(self, sequence_hash: int) -> bool:
        return self.stop_one_in > 0 and (sequence_hash >> 17) % self.stop_one_in == 0

    def generate(self, job: Job) -> list[int]:
        """What the job's output must be, however it was scheduled."""
        state = seed_of(job.salt)
        for token in job.prompt:
            state = mix(state, token)
        outputs: list[int] = []
        while len(outputs) < job.max_new:
            token = self.next_token(state)
            outputs.append(token)
            if self.stops(state):
                break
            state = mix(state, token)
        return outputs


@dataclass
class Flight:
    """A step the device has run and whose results the scheduler has not seen.

    A real device may run it as late as its results arrive: see `Device.check_outside`.
    """

    step_id: int
    request_ids: list[int]
    samples: list[int]
    tokens: list[list[int]]
    finished: list[int]
    failed: list[int]
    loads: list[range]  # tickets that each row waited for
    touched: set[int]  # pages it reads, copies or writes
    written: set[int]

    @property
    def tickets(self) -> set[int]:
        return {ticket for row in self.loads for ticket in row}


class Device:
    """Runs steps in order, as a GPU stream would, checking every KV entry a row reads."""

    def __init__(self, config: cpp.SchedulerConfig, model: ToyModel) -> None:
        self.page_size = config.page_size
        self.num_pages = config.num_pages
        self.model = model
        width = -(-config.max_context_len // config.page_size) + 1
        self.page_table = np.full((config.max_slots, width), -1, np.int32)
        self.next_input_ids = np.full(config.max_slots, -1, np.int64)
        self.memory = np.zeros((config.num_pages, config.page_size), np.uint64)
        self.layers_in = np.full(config.num_pages, NUM_LAYERS)  # the first so many of a page
        self.bring: Callable[[int, int], bool] = lambda ticket, layer: False  # is it good?
        self.flights: deque[Flight] = deque()

    def check_outside(
        self,
        *,
        writes: Iterable[int] = (),
        reads: Iterable[int] = (),
        loads: Mapping[int, int] | None = None,
    ) -> None:
        """Moves between tiers and other engines do not wait for the steps in flight, nor they.

        But for loads, {page: ticket}, that a step waits for itself: they write what it reads.
        """
        for flight in self.flights:
            awaited = {page for page, ticket in (loads or {}).items() if ticket in flight.tickets}
            for page in writes:
                met = flight.written if page in awaited else flight.touched
                assert page not in met, (
                    f"page {page} is written from outside while step {flight.step_id} may use it"
                )
            for page in reads:
                assert page not in flight.written, (
                    f"page {page} is read from outside while step {flight.step_id} may write it"
                )

    def apply_tables(self, plan: cpp.Plan) -> None:
        seen = set()
        for slot, index, page in plan.page_deltas.tolist():
            assert (slot, index) not in seen, "a table entry is written twice in one plan"
            assert 0 <= page < self.num_pages
            seen.add((slot, index))
            self.page_table[slot, index] = page

    def copy_pages(self, plan: cpp.Plan) -> None:
        copies = plan.page_copies.tolist()
        targets = [target for _, target, _ in copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {source for source, _, _ in copies}, "copies depend on order"
        for source, target, tokens in copies:
            assert self.layers_in[source] == NUM_LAYERS, f"page {source} is copied as it comes"
            self.memory[target, :tokens] = self.memory[source, :tokens]
            self.layers_in[target] = NUM_LAYERS

    def wait_for_layers(self, plan: cpp.Plan) -> list[range]:
        """Read what rows find in place, layer after layer, each behind the loads the row names.

        Returns the tickets of each row; memory is as the loads leave it.
        """
        loads = [range(first, end) if first >= 0 else range(0) for first, end in plan.row_loads]
        rows = zip(plan.row_slots.tolist(), plan.row_starts.tolist(), loads, strict=True)
        for slot, start, tickets in rows:
            for layer in range(NUM_LAYERS):
                for ticket in tickets:
                    self.bring(ticket, layer)
                pages = self.page_table[slot, : -(-start // self.page_size)]
                late = pages[self.layers_in[pages] <= layer].tolist()
                assert not late, f"step {plan.step_id} reads layer {layer} of {late} too early"
        return loads

    def run(self, plan: cpp.Plan, jobs: dict[int, Job], fail: set[int]) -> Flight:
        self.apply_tables(plan)
        self.copy_pages(plan)
        self.check_plan_shape(plan, jobs)
        loads = self.wait_for_layers(plan)
        is_void = [not all(self.bring(ticket, NUM_LAYERS) for ticket in row) for row in loads]
        flight = Flight(plan.step_id, [], [], [], [], [], loads, *self.pages_of(plan))
        at = 0
        reads: list[tuple[Job, int, int, list[int]]] = []
        for r, request_id in enumerate(plan.row_request_ids.tolist()):
            job, slot = jobs[request_id], int(plan.row_slots[r])
            start, length = int(plan.row_starts[r]), int(plan.row_lens[r])
            ids = plan.input_ids[at : at + length].tolist()
            states: list[int] = []  # after each token of the row
            state = self.state_before(job, slot, start)
            for offset in range(length):
                if ids[offset] < 0:
                    ids[offset] = self.draft(states) if states else int(self.next_input_ids[slot])
                state = mix(state, ids[offset])
                states.append(state)
                position = start + offset
                page = int(self.page_table[slot, position // self.page_size])
                where = page * self.page_size + position % self.page_size
                assert plan.slot_mapping[at + offset] == where
                self.memory[page, position % self.page_size] = state
                self.layers_in[page] = NUM_LAYERS
            at += length
            if not is_void[r]:  # else its results must count for nothing
                reads.append((job, slot, start, ids))
            samples = int(plan.row_samples[r])
            is_decode = start >= job.admissions[-1][0]
            tokens, finished = self.sample(ids, states, is_decode) if samples else ([], False)
            if samples:
                self.next_input_ids[slot] = tokens[-1]
            flight.request_ids.append(request_id)
            flight.samples.append(samples)
            flight.tokens.append(tokens)
            flight.finished.append(int(finished))
            flight.failed.append(int(request_id in fail))
        assert at == len(plan.input_ids) == len(plan.slot_mapping)
        for job, slot, start, ids in reads:
            self.check_reads(job, slot, start, ids)
        return flight

    def pages_of(self, plan: cpp.Plan) -> tuple[set[int], set[int]]:
        """Of its step: (touched, written)."""
        written = {place // self.page_size for place in plan.slot_mapping.tolist()}
        touched = set(written)
        for source, target, _ in plan.page_copies.tolist():
            touched |= {source, target}
            written.add(target)
        ends = plan.row_starts + plan.row_lens
        for slot, end in zip(plan.row_slots.tolist(), ends.tolist(), strict=True):
            touched.update(self.page_table[slot, : -(-end // self.page_size)].tolist())
        return touched, written

    def draft(self, states: list[int]) -> int:
        """A guess at the next token, right two times in three."""
        guess = self.model.next_token(states[-1])
        return guess if states[-1] % 3 else (guess + 1) % self.model.vocab

    def sample(self, ids: list[int], states: list[int], is_decode: bool) -> tuple[list[int], bool]:
        """The accepted drafts and one token more; of a prompt, the one token after it."""
        tokens: list[int] = []
        for offset in range(0 if is_decode else len(ids) - 1, len(ids)):
            tokens.append(self.model.next_token(states[offset]))
            if self.model.stops(states[offset]):
                return tokens, True
            if offset + 1 < len(ids) and ids[offset + 1] != tokens[-1]:
                break
        return tokens, False

    def state_before(self, job: Job, slot: int, start: int) -> int:
        if start == 0:
            return seed_of(job.salt)
        page = self.page_table[slot, (start - 1) // self.page_size]
        return int(self.memory[page, (start - 1) % self.page_size])

    def check_reads(self, job: Job, slot: int, start: int, ids: list[int]) -> None:
        """Every KV entry a row reads must come from exactly this job's own tokens."""
        known = (job.prompt + job.outputs)[:start]
        assert len(known) == start, "a row runs past the tokens that exist"
        state = seed_of(job.salt)
        for position, token in enumerate(known + ids):
            state = mix(state, token)
            page = self.page_table[slot, position // self.page_size]
            held = int(self.memory[page, position % self.page_size])
            assert held == state, f"request {job.request_id} would read foreign KV at {position}"

    def check_plan_shape(self, plan: cpp.Plan, jobs: dict[int, Job]) -> None:
        ids = plan.row_request_ids.tolist()
        assert len(set(ids)) == len(ids), "a request has two rows"
        assert len(set(plan.row_slots.tolist())) == len(ids), "a slot has two rows"
        is_decode = [
            start >= jobs[i].admissions[-1][0]
            for i, start in zip(ids, plan.row_starts.tolist(), strict=True)
        ]
        assert is_decode == sorted(is_decode), "a decode row stands before a prefill row"
        written = plan.slot_mapping.tolist()
        assert len(set(written)) == len(written), "two tokens are written to one place"


class TierMover:
    """Lower tiers of the device: moves take a while, some are lost, targets are garbage till then.

    Bytes are read when a move ends, as late as it may; so a source let go too early is caught.
    """

    def __init__(self, config: cpp.SchedulerConfig, device: Device, rng: random.Random) -> None:
        self.device = device
        self.rng = rng
        self.loss = 0.0
        self.delay = rng.choice([0.0, 0.3, 0.9])
        self.l2 = np.zeros((config.num_l2_pages, config.page_size), np.uint64)
        self.l3: dict[bytes, NDArray[np.uint64]] = {}
        self.waiting: list[tuple[list[int], bytes]] = []
        self.probes: list[tuple[int, list[bytes]]] = []
        self.num_by_kind = [0, 0, 0, 0]
        self.takes_heads_first = False  # L3 takes no page before the one it follows
        self.parents: dict[bytes, bytes] = {}
        self.fates: dict[int, bool] = {}  # of loads that a step has seen come
        self.lost: set[int] = set()  # tickets acked so
        device.bring = self.bring

    def check_outside(self) -> None:
        """No move under way meets a step in flight, nor another move."""
        moves = [move for move, _ in self.waiting]
        writes = [(tier, target) for _, _, _, _, tier, target in moves if tier < 3]
        reads = {(tier, source) for _, _, tier, source, _, _ in moves if tier < 3}
        assert len(set(writes)) == len(writes), "two moves write to one page"
        assert reads.isdisjoint(writes), "a move writes where another reads"
        self.device.check_outside(
            writes=[target for _, _, _, _, tier, target in moves if tier == 1],
            loads={target: ticket for ticket, kind, _, _, _, target in moves if kind == 0},
            reads=[source for _, _, tier, source, _, _ in moves if tier == 1],
        )

    def take(self, plan: cpp.Plan) -> None:
        for move, name in zip(plan.moves.tolist(), plan.move_hashes, strict=True):
            self.waiting.append((move, name.tobytes()))
            _, kind, _, _, target_tier, target = move
            self.num_by_kind[kind] += 1
            if target_tier < 3:
                self.memory(target_tier)[target] = self.rng.getrandbits(60)
            if target_tier == 1:
                self.device.layers_in[target] = 0
        for i, probe_id in enumerate(plan.probe_ids.tolist()):
            asked = plan.probe_hashes[plan.probe_indptr[i] : plan.probe_indptr[i + 1]]
            self.probes.append((probe_id, [name.tobytes() for name in asked]))

    def answers(self) -> list[cpp.ProbeDone]:
        """What L3 holds of the pages asked for, some time later."""
        late = [probe for probe in self.probes if self.rng.random() < self.delay]
        done = [probe for probe in self.probes if probe not in late]
        self.probes = late
        return [
            cpp.ProbeDone(probe_id=probe_id, num_pages=self.num_leading(names))
            for probe_id, names in done
        ]

    def know(self, token_ids: list[int], salt: str) -> None:
        """Which page of these tokens follows which."""
        size = self.l2.shape[1]
        names = cpp.name_pages(np.array(token_ids, np.int32), page_size=size, salt=salt)
        pages = [names[at : at + 16] for at in range(0, len(names), 16)]
        self.parents |= dict(zip(pages, [b"", *pages], strict=False))

    def num_leading(self, names: list[bytes]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.l3), len(names))

    def memory(self, tier: int) -> NDArray[np.uint64]:
        return self.device.memory if tier == 1 else self.l2

    def bring(self, ticket: int, layer: int) -> bool:
        """One layer more of a page under way comes to L1, good or bad; whether it is good."""
        move = next((move for move, _ in self.waiting if move[0] == ticket), None)
        if move is None:  # it is over, others of its run are not
            return ticket not in self.lost
        source, target = move[3], move[5]
        is_good = self.fates.setdefault(ticket, self.loss == 0 or self.rng.random() >= self.loss)
        if is_good:
            self.device.memory[target] = self.l2[source]
        self.device.layers_in[target] = max(
            self.device.layers_in[target], min(layer + 1, NUM_LAYERS)
        )
        return is_good

    def acks_of(self, tickets: set[int]) -> list[cpp.TransferAck]:
        """Acks of those that are not acked yet, in any order."""
        mine = [(move, name) for move, name in self.waiting if move[0] in tickets]
        self.waiting = [one for one in self.waiting if one[0][0] not in tickets]
        self.rng.shuffle(mine)
        return [self.end(move, name) for move, name in mine]

    def acks(self, everything: bool = False) -> list[cpp.TransferAck]:
        """Acks of what is done by now, in any order."""
        self.rng.shuffle(self.waiting)
        done: list[cpp.TransferAck] = []
        late: list[tuple[list[int], bytes]] = []
        for move, name in self.waiting:
            if not everything and self.rng.random() < self.delay:
                late.append((move, name))
                continue
            done.append(self.end(move, name))
        self.waiting = late
        return done

    def end(self, move: list[int], name: bytes) -> cpp.TransferAck:
        ok = self.carry_out(move, name)
        if not ok:
            self.lost.add(move[0])
            if move[4] == 1:  # rubbish, in all layers
                self.device.layers_in[move[5]] = NUM_LAYERS
        return cpp.TransferAck(ticket=move[0], ok=ok)

    def carry_out(self, move: list[int], name: bytes) -> bool:
        ticket, _, source_tier, source, target_tier, target = move
        is_good = self.fates.pop(ticket, None)
        if is_good is False or (is_good is None and self.rng.random() < self.loss):
            return False
        if source_tier == 3:
            if name not in self.l3:
                return False
            data = self.l3[name]
        else:
            data = self.memory(source_tier)[source]
        if target_tier == 3:
            if self.takes_heads_first and self.parents[name] not in (b"", *self.l3):
                return False
            self.l3[name] = data.copy()
        else:
            self.memory(target_tier)[target] = data
        if target_tier == 1:
            self.device.layers_in[target] = NUM_LAYERS
        return True


def lone_tokens(config: cpp.SchedulerConfig, start: int) -> int:
    """Tokens that a prompt computed up to `start` gets in a step it has alone: those of the larger
    budget, as far as they cost no more than two and a half times what they do at its start."""
    cost = 1 + Fraction(int(start), config.attention_len)  # of a token there; 1 at the start
    most = config.lone_token_budget
    return max(config.token_budget, min(most, floor(Fraction(5, 2) * most / cost)))


class Harness:
    """Drives scheduler and device together, with up to one step of overlap."""

    def __init__(
        self,
        config: cpp.SchedulerConfig,
        model: ToyModel | None = None,
        *,
        overlap: bool = False,
        scheduler: cpp.Scheduler | None = None,
    ) -> None:
        self.config = config
        self.model = model or ToyModel()
        self.scheduler = scheduler or cpp.Scheduler(config)
        self.device = Device(config, self.model)
        self.overlap = overlap
        self.mover: TierMover | None = None
        self.num_lower_tokens = 0
        self.remote: dict[int, tuple[int, int]] = {}  # awaited: slot, tokens there already
        self.sends: dict[int, cpp.Send] = {}  # what another engine reads
        self.sends_at_once = True
        self.jobs: dict[int, Job] = {}
        self.live: set[int] = set()
        self.over: set[int] = set()  # aborted or failed, though a step may still be in flight
        self.flights = self.device.flights
        self.now_ms = 0
        self.next_id = 0
        self.fail_next: set[int] = set()
        self.num_retracted = 0
        self.num_rows_while_loading = 0
        self.num_void_rows = 0
        self.admitted_at: dict[int, int] = {}  # request -> number of the plan
        self.plans = 0

    def submit(self, prompt: list[int], max_new: int, **options: object) -> Job:
        job = Job(self.next_id, list(prompt), max_new, **options)  # type: ignore[arg-type]
        self.next_id += 1
        self.scheduler.submit(
            [
                cpp.RequestSpec(
                    request_id=job.request_id,
                    token_ids=np.array(prompt, np.int32),
                    max_new_tokens=max_new,
                    priority=job.priority,
                    tenant=job.tenant,
                    salt=job.salt,
                    num_draft_tokens=job.num_draft_tokens,
                    remote_prefill=job.remote_prefill,
                    expected_return=job.expected_return,
                    l3_wait_ms=job.l3_wait_ms,
                    send_kv=job.send_kv,
                )
            ]
        )
        self.jobs[job.request_id] = job
        self.live.add(job.request_id)
        if self.mover is not None and self.mover.takes_heads_first:
            self.mover.know(job.prompt + self.model.generate(job), job.salt)
        return job

    def plan(self) -> cpp.Plan:
        """Plan and run a step; its results stay in flight."""
        plan = self._plan_and_run()
        if self.mover is not None:
            self.mover.check_outside()
        return plan

    def _plan_and_run(self) -> cpp.Plan:
        plan = self.scheduler.next_plan(self.now_ms)
        self.plans += 1
        if self.mover is not None:
            self.mover.take(plan)
        else:
            assert len(plan.moves) == 0
        for admission in plan.admissions:
            job = self.jobs[admission.request_id]
            assert admission.prompt_len == len(job.prompt) + len(job.outputs)
            assert admission.readmitted == bool(job.admissions)
            assert 0 <= admission.cached_l1 < admission.prompt_len
            cached = admission.cached_l1 + admission.cached_l2 + admission.cached_l3
            self.num_lower_tokens += admission.cached_l2 + admission.cached_l3
            assert 0 <= cached < admission.prompt_len
            job.admissions.append((admission.prompt_len, cached))
            job.slot = admission.slot
            if admission.remote:
                self.remote[job.request_id] = (admission.slot, cached)
            self.admitted_at.setdefault(job.request_id, self.plans)
        self.num_retracted += len(plan.retracted)
        if plan.step_id < 0:
            assert len(plan.row_request_ids) == 0 and len(plan.page_copies) == 0
            self.device.apply_tables(plan)
            return plan
        self.check_size(plan)
        assert set(plan.row_request_ids.tolist()) <= self.live
        self.num_rows_while_loading += int((plan.row_loads[:, 0] >= 0).sum())
        self.flights.append(self.device.run(plan, self.jobs, self.fail_next))
        self.fail_next = set()
        return plan

    def check_size(self, plan: cpp.Plan) -> None:
        """More than the budget is one prompt's alone, where nobody else runs or waits."""
        num = len(plan.input_ids)
        assert num > 0
        if num > self.config.token_budget:
            assert self.live - set(self.sends) == set(plan.row_request_ids.tolist())
            assert num == int(plan.row_lens[0]) <= lone_tokens(self.config, plan.row_starts[0])

    def commit(self, aborts: list[int] | None = None) -> list[cpp.Ended]:
        """Deliver the oldest results, then the aborts."""
        events: list[object] = []
        if self.flights:
            flight = self.flights.popleft()
            if flight.tickets:
                assert self.mover is not None
                events += self.mover.acks_of(flight.tickets)
            self.drop_void_rows(flight)
            events.append(self.step_done(flight))
            for r, request_id in enumerate(flight.request_ids):
                job = self.jobs[request_id]
                if self.is_void(flight, r):
                    continue
                if flight.failed[r]:
                    self.over.add(request_id)
                elif request_id in self.live and not self.is_over(job):
                    job.outputs += flight.tokens[r]
        events += [cpp.Abort(request_id=request_id) for request_id in aborts or []]
        if self.mover is not None:
            events += self.mover.acks()
            events += self.mover.answers()
        ended = self.advance(events)
        if self.sends_at_once:
            for request_id in sorted(self.sends):
                ended += self.end_send(request_id, ok=True)
        return ended

    def is_void(self, flight: Flight, row: int) -> bool:
        """It read a page that turned out bad."""
        return self.mover is not None and not self.mover.lost.isdisjoint(flight.loads[row])

    def drop_void_rows(self, flight: Flight) -> None:
        """Their tokens; what else they say is for the scheduler to ignore."""
        for row in range(len(flight.tokens)):
            if self.is_void(flight, row):
                flight.tokens[row] = []
                self.num_void_rows += 1

    def advance(self, events: list[object]) -> list[cpp.Ended]:
        ended = self.scheduler.advance(events)  # type: ignore[arg-type]
        for result in ended:
            self.jobs[result.request_id].ended = result
            self.live.discard(result.request_id)
        for send in self.scheduler.drain_sends():
            self.sends[send.request_id] = send
            self.check_send(send)
        return ended

    def check_send(self, send: cpp.Send) -> None:
        """The pages to be read hold the KV of exactly the request's own tokens."""
        job = self.jobs[send.request_id]
        known = (job.prompt + job.outputs)[: send.num_tokens]
        assert len(known) == send.num_tokens >= len(job.prompt)
        size = self.config.page_size
        assert len(send.pages) == -(-send.num_tokens // size)
        assert len(send.page_hashes) == 16 * (send.num_tokens // size)
        state = seed_of(job.salt)
        for position, token in enumerate(known):
            state = mix(state, token)
            held = int(self.device.memory[send.pages[position // size], position % size])
            assert held == state, f"request {job.request_id} would send foreign KV"

    def end_send(self, request_id: int, ok: bool) -> list[cpp.Ended]:
        """The other engine is done; it read as late as it may."""
        self.check_send(self.sends.pop(request_id))
        return self.advance([cpp.SendDone(request_id=request_id, ok=ok)])

    def is_over(self, job: Job) -> bool:
        """It finished, failed or was aborted: what a late step samples is ignored."""
        if job.request_id in self.over or len(job.outputs) >= job.max_new:
            return True
        if not job.outputs:
            return False
        state = seed_of(job.salt)
        for token in job.prompt + job.outputs[:-1]:
            state = mix(state, token)
        return self.model.stops(state)

    def step_done(self, flight: Flight) -> cpp.StepDone:
        accepted = [
            [] if failed else tokens
            for tokens, failed in zip(flight.tokens, flight.failed, strict=True)
        ]
        token_ids = np.zeros((len(accepted), max(map(len, accepted)) + 1), np.int32)
        for row, tokens in enumerate(accepted):
            token_ids[row, : len(tokens)] = tokens
        return cpp.StepDone(
            step_id=flight.step_id,
            num_accepted=np.array([len(tokens) for tokens in accepted], np.int32),
            token_ids=token_ids,
            finished=np.array(flight.finished, np.uint8),
            failed=np.array(flight.failed, np.uint8),
        )

    def end_remote(self, request_id: int, ok: bool) -> None:
        """The other engine is done: it wrote the prompt's KV, as late as it may, or nothing."""
        job = self.jobs[request_id]
        slot, start = self.remote.pop(request_id)
        known = job.prompt + job.outputs
        state = seed_of(job.salt)
        for position, token in enumerate(known[:-1] if ok else []):
            state = mix(state, token)
            page = self.device.page_table[slot, position // self.config.page_size]
            if position >= start:
                self.device.check_outside(writes=[int(page)])
                self.device.memory[page, position % self.config.page_size] = state
                self.device.layers_in[page] = NUM_LAYERS
        self.advance([cpp.RemotePrefill(request_id=request_id, ok=ok)])

    def abort(self, request_id: int) -> list[cpp.Ended]:
        self.over.add(request_id)
        return self.commit_only_aborts([request_id])

    def commit_only_aborts(self, request_ids: list[int]) -> list[cpp.Ended]:
        return self.advance([cpp.Abort(request_id=i) for i in request_ids])

    def step(self) -> cpp.Plan:
        plan = self.plan()
        if len(self.flights) > (1 if self.overlap else 0) or plan.step_id < 0:
            self.commit()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Step until every job has ended."""
        for _ in range(max_steps):
            if not self.live:
                break
            self.now_ms += 1
            self.step()
        assert not self.live, "the scheduler made no progress"
        while self.flights:
            self.commit()

    def check(self) -> dict[str, int]:
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        held = sum(stats[f"{kind}_pages"] for kind in ("free", "owned", "cached", "in_flight"))
        assert held == stats["num_pages"]
        return stats


def random_tokens(rng: random.Random, length: int, vocab: int = 50) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]
