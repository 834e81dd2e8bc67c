# SPDX-License-Identifier: Apache-2.0
"""Hit depth over three tiers against a model that knows nothing of trees: sets of page names.

The names are computed here, from the definition. What lies where is folded from the KV events; that
those tell the truth is checked against the bytes: every page said to be in L2 or L3 is there with
the KV of its own tokens, and what a lease covers is there unless it was said not to be.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import (
    Harness,
    Job,
    TierMover,
    ToyModel,
    mix,
    random_tokens,
    seed_of,
)

FINGERPRINT = "toy"


def namespace(salt: str) -> bytes:
    raw = FINGERPRINT.encode()
    return hashlib.sha256(len(raw).to_bytes(4, "little") + raw + salt.encode()).digest()[:16]


def page_names(tokens: list[int], salt: str, page_size: int) -> list[bytes]:
    space, parent, names = namespace(salt), bytes(16), []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = np.array(tokens[start : start + page_size], "<i4").tobytes()
        parent = hashlib.sha256(space + parent + page).digest()[:16]
        names.append(parent)
    return names


class NotingMover(TierMover):
    """Remembers which name's bytes it last wrote to each L2 page."""

    def __init__(self, config: cpp.SchedulerConfig, harness: Harness, rng: random.Random) -> None:
        super().__init__(config, harness.device, rng)
        self.page_of: dict[bytes, int] = {}

    def carry_out(self, move: list[int], name: bytes) -> bool:
        is_done = super().carry_out(move, name)
        if is_done and move[4] == 2:
            self.page_of = {old: page for old, page in self.page_of.items() if page != move[5]}
            self.page_of[name] = move[5]
        return is_done


@dataclass
class Residency:
    """Names by tier, as the events tell it."""

    held: dict[str, set[bytes]] = field(
        default_factory=lambda: {"l1": set(), "l2": set(), "l3": set()}
    )
    parent_of: dict[bytes, bytes] = field(default_factory=dict)

    def fold(self, events: list[cpp.KvEvent]) -> None:
        for event in events:
            self.parent_of[event.page_hash] = event.parent_hash
            if event.kind == "stored":
                assert event.page_hash not in self.held[event.tier], "stored twice"
                self.held[event.tier].add(event.page_hash)
            elif event.kind == "moved":
                assert event.page_hash in self.held["l2"], "moved to where it is not"
                self.held["l1"].remove(event.page_hash)
            else:
                self.held[event.tier].remove(event.page_hash)

    def depth(self, names: list[bytes]) -> tuple[int, int, int]:
        """Leading pages by the nearest tier, without a gap."""
        l1 = next((i for i, name in enumerate(names) if name not in self.held["l1"]), len(names))
        counts = [l1, 0, 0]
        for name in names[l1:]:
            if name in self.held["l2"]:
                counts[1] += 1
            elif name in self.held["l3"]:
                counts[2] += 1
            else:
                break
        return counts[0], counts[1], counts[2]


class Walk:
    """One seeded run with all that moves pages; `check` after every step."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.page_size = rng.choice([1, 2, 4])
        self.vocab = rng.choice([2, 3, 50])
        self.use_l3 = rng.random() < 0.7
        config = cpp.SchedulerConfig(
            page_size=self.page_size,
            num_pages=rng.choice([8, 12, 20, 40]),
            max_slots=rng.choice([1, 2, 4]),
            max_context_len=40,
            token_budget=rng.choice([3, 8, 32]),
            lone_token_budget=seed % 3 * 12,
            model_fingerprint=FINGERPRINT,
            eviction=rng.choice(["value", "lru"]),
            attention_len=rng.choice([8, 1000]),
            lease_percent=rng.choice([50, 100]),
            num_l2_pages=rng.choice([2, 5, 20, 100]),
            use_l3=self.use_l3,
            num_l3_pages=rng.choice([15, 1 << 20]),
            probe_l3=self.use_l3 and rng.random() < 0.5,
            l3_wait_ms=rng.choice([0, 5, 50]),
        )
        model = ToyModel(self.vocab, rng.choice([0, 10]))
        self.harness = Harness(config, model, overlap=rng.random() < 0.5)
        self.mover = self.harness.mover = NotingMover(config, self.harness, rng)
        self.mover.loss = rng.choice([0.0, 0.0, 0.1])
        self.residency = Residency()
        self.history: list[tuple[list[int], str]] = [([0], "")]
        self.sequences: dict[bytes, tuple[list[int], str]] = {}
        self.leases: dict[int, tuple[str, list[bytes]]] = {}  # tier, names covered
        self.queued: dict[int, list[bytes]] = {}
        self.num_lower = 0
        self.num_dropped = 0

    def remember(self, tokens: list[int], salt: str) -> None:
        self.history = [*self.history[-15:], (tokens, salt)]

    def submit(self) -> None:
        rng, harness = self.rng, self.harness
        stem, salt = rng.choice(self.history)
        prompt = stem[: rng.randrange(len(stem) + 1)]
        prompt = (prompt + random_tokens(rng, rng.randrange(1, 12), self.vocab))[:36]
        room = min(40, harness.config.num_pages * self.page_size + 1) - len(prompt)
        if room < 1:
            return
        harness.submit(
            prompt,
            rng.randrange(1, min(room, 20) + 1),
            salt=salt if rng.random() < 0.9 else "other",
            priority=rng.choice([0, 0, 1]),
            expected_return=rng.random(),
            send_kv=rng.random() < 0.1,
        )
        self.remember(prompt, salt)

    def lease(self, tokens: list[int], salt: str) -> None:
        rng = self.rng
        tier = rng.choice(["l1", "l2"] + ["l3"] * self.use_l3)
        lease_id = rng.randrange(5)
        grant = self.harness.scheduler.lease(
            lease_id=lease_id,
            token_ids=np.array(tokens, np.int32),
            until_ms=self.harness.now_ms + rng.randrange(1, 60),
            salt=salt,
            tier=tier,
        )
        self.leases.pop(lease_id, None)
        self.queued.pop(lease_id, None)
        names = page_names(tokens, salt, self.page_size)
        if grant.state in ("granted", "clipped"):
            self.leases[lease_id] = (tier, names[: grant.tokens_granted // self.page_size])
        elif grant.state == "queued":
            self.leases[lease_id] = (tier, [])
            self.queued[lease_id] = names

    def hint(self, tokens: list[int], salt: str) -> None:
        rng, now = self.rng, self.harness.now_ms
        until = [rng.choice([0, now + rng.randrange(40)]) for _ in range(3)]
        self.harness.scheduler.hint_prefix(
            np.array(tokens, np.int32),
            rng.random(),
            salt,
            l1_until_ms=until[0],
            l2_until_ms=until[1],
            l3_until_ms=until[2],
        )

    def drop(self, job: Job) -> None:
        """Forget the end of a sequence, and see what a scan of all names expects gone."""
        scheduler, salt = self.harness.scheduler, job.salt
        tokens = job.prompt + job.outputs
        keep = self.rng.randrange(len(tokens) + 1)
        self.residency.fold(scheduler.drain_kv_events())
        before = {tier: set(names) for tier, names in self.residency.held.items()}
        is_quiet = self.harness.check()["transfers_in_flight"] == 0
        scheduler.drop_prefix(np.array(tokens, np.int32), keep, salt)
        self.residency.fold(scheduler.drain_kv_events())
        held = self.residency.held
        names = page_names(tokens, salt, self.page_size)
        num_kept = -(-keep // self.page_size)
        for tier in ("l1", "l2", "l3"):
            assert before[tier] - held[tier] <= set(names[num_kept:]), "somebody else's page went"
        if not is_quiet:
            return
        num_kept = max(num_kept, self.residency.depth(names)[0])
        leased = {name for tier, some in self.leases.values() if tier != "l1" for name in some}
        stop = len(names)
        while stop > num_kept:
            name, followers = names[stop - 1], self.followers_of(names[stop - 1], before)
            if name in leased or followers - set(names[stop : stop + 1]):
                break
            stop -= 1
        for tier in ("l2", "l3"):
            assert not held[tier] & set(names[stop:]), "dropped, but there"
            assert before[tier] - set(names[stop:]) == held[tier]
        self.num_dropped += len((before["l2"] | before["l3"]) & set(names[stop:]))

    def followers_of(self, name: bytes, held: dict[str, set[bytes]]) -> set[bytes]:
        return {page for page in held["l2"] | held["l3"] if self.residency.parent_of[page] == name}

    def disturb(self) -> None:
        rng, harness = self.rng, self.harness
        harness.now_ms += rng.choice([0, 1, 5])
        tokens, salt = rng.choice(self.history)
        dice = rng.random()
        if dice < 0.35 and len(harness.live) < 12:
            self.submit()
        elif dice < 0.38 and harness.live:
            harness.abort(rng.choice(sorted(harness.live)))
        elif dice < 0.40 and harness.live:
            harness.fail_next = {rng.choice(sorted(harness.live))}
        elif dice < 0.48:
            tiers = ["l1", "l2", "none"] + ["l3"] * self.use_l3
            ids = np.array(tokens, np.int32)
            result = harness.scheduler.move(ids, rng.choice(tiers), salt)
            full = len(tokens) // self.page_size * self.page_size
            assert result.tokens_there + result.tokens_pending + result.tokens_missing == full
        elif dice < 0.50:
            jobs = list(harness.jobs.values())[-15:]
            if jobs:
                self.drop(rng.choice(jobs))
        elif dice < 0.53:
            self.lease(tokens, salt)
        elif dice < 0.58:
            self.hint(tokens, salt)
        elif dice < 0.60:
            speeds = dict(l2_us_per_page=rng.random(), l3_us_per_page=rng.random() * 9)
            harness.scheduler.set_costs(**speeds, prefill_us_per_token=rng.choice([0, 1, 5]))

    def check(self) -> None:
        harness = self.harness
        stats = harness.check()
        self.residency.fold(harness.scheduler.drain_kv_events())
        held = self.residency.held
        assert stats["cached_l2_pages"] == len(held["l2"])
        assert stats["cached_l3_pages"] == len(held["l3"])
        assert len(set(self.mover.page_of.values())) == len(self.mover.page_of)
        assert held["l2"] <= set(self.mover.page_of), "said to be in L2, but never written there"
        assert held["l3"] <= set(self.mover.l3), "said to be in L3, but never stored"
        for tokens, salt in self.rng.sample(self.history, min(3, len(self.history))):
            self.check_depth(tokens, salt)
        self.check_leases()

    def check_depth(self, tokens: list[int], salt: str) -> None:
        names = page_names(tokens, salt, self.page_size)
        l1, l2, l3 = (pages * self.page_size for pages in self.residency.depth(names))
        found = self.harness.scheduler.query_prefix(np.array(tokens, np.int32), salt)
        assert (found.l2, found.l3) == (l2, l3)
        if l2 + l3 > 0:
            assert found.l1 == l1
        else:  # and some of a partly filled page
            assert l1 <= found.l1 < l1 + self.page_size or found.l1 == l1
        self.num_lower += l2 + l3 > 0
        self.check_bytes(tokens, salt, names)

    def check_bytes(self, tokens: list[int], salt: str, names: list[bytes]) -> None:
        """A page said to be below holds the KV of exactly these tokens."""
        state = seed_of(salt)
        for index, name in enumerate(names):
            expected = []
            for token in tokens[index * self.page_size : (index + 1) * self.page_size]:
                state = mix(state, token)
                expected.append(state)
            if name in self.residency.held["l2"]:
                assert self.mover.l2[self.mover.page_of[name]].tolist() == expected
            if name in self.residency.held["l3"]:
                assert self.mover.l3[name].tolist() == expected

    def check_leases(self) -> None:
        for event in self.harness.scheduler.drain_lease_events():
            tier, names = self.leases[event.lease_id]
            if event.kind in ("granted", "clipped"):
                names = self.queued.pop(event.lease_id)
            if event.kind == "demoted":
                assert tier == "l1"
                tier = "l2"
            self.leases[event.lease_id] = (tier, names[: event.num_tokens // self.page_size])
            if event.num_tokens == 0:
                del self.leases[event.lease_id]
        coming = {name for move, name in self.mover.waiting if move[4] == 2}
        for tier, names in self.leases.values():
            there = self.residency.held[tier] | (coming if tier == "l2" else set())
            assert set(names) <= there | self.not_told(), "a leased page is gone without a word"

    def not_told(self) -> set[bytes]:
        """Losses are told with the next plan; where nothing is ever lost there are none."""
        return (
            set() if self.mover.loss == 0.0 else set().union(*(n for _, n in self.leases.values()))
        )


@pytest.mark.parametrize("chunk", range(6))
def test_hit_depth_is_what_a_search_over_all_names_finds(chunk: int) -> None:
    moves = np.zeros(4, np.int64)
    num_lower = num_dropped = 0
    for seed in range(chunk * 12, chunk * 12 + 12):
        walk = Walk(seed)
        for _ in range(200):
            walk.disturb()
            walk.harness.step()
            walk.check()
        walk.harness.run()
        walk.mover.delay = walk.mover.loss = 0.0
        for _ in range(120):
            walk.harness.now_ms += 60
            walk.harness.step()
        walk.check()
        for job in walk.harness.jobs.values():
            expected = walk.harness.model.generate(job)
            assert job.outputs == expected[: len(job.outputs)]
        stats = walk.harness.check()
        assert stats["owned_pages"] == stats["transfers_in_flight"] == stats["leaving"] == 0
        moves += walk.mover.num_by_kind
        for job in walk.harness.jobs.values():
            walk.drop(job)
        walk.check()
        num_lower += walk.num_lower
        num_dropped += walk.num_dropped
    assert moves.min() > 20 and num_lower > 100 and num_dropped > 100
