# SPDX-License-Identifier: Apache-2.0
"""A prefix is moved between three tiers on request, wished somewhere for a while, or forgotten."""

from __future__ import annotations

import random

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, Job, TierMover, ToyModel

PAGE = 4


def make(*, use_l3: bool = True, num_l2_pages: int = 50, **options: object) -> Harness:
    settings: dict[str, object] = dict(
        page_size=PAGE, num_pages=20, max_slots=2, max_context_len=80, token_budget=32
    )
    config = cpp.SchedulerConfig(
        **{**settings, **options},  # type: ignore[arg-type]
        num_l2_pages=num_l2_pages,
        use_l3=use_l3,
    )
    harness = Harness(config, ToyModel())
    harness.mover = TierMover(config, harness.device, random.Random(1))
    harness.mover.delay = 0.0
    return harness


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def hit(harness: Harness, tokens: list[int]) -> tuple[int, int, int]:
    found = harness.scheduler.query_prefix(ids(tokens))
    return found.l1, found.l2, found.l3


def settle(harness: Harness, *, steps: int = 12, ms: int = 1) -> None:
    for _ in range(steps):
        harness.now_ms += ms
        harness.step()
        harness.check()


def finish(harness: Harness, length: int, base: int = 0, **options: object) -> Job:
    job = harness.submit(list(range(base, base + length)), 1, **options)
    harness.run()
    settle(harness)
    return job


def parts(result: cpp.MoveResult) -> tuple[int, int, int]:
    return result.tokens_there, result.tokens_pending, result.tokens_missing


# ---- move ----------------------------------------------------------------------------------------


def test_a_prefix_put_into_the_store_leaves_both_tiers_above() -> None:
    harness = make()
    job = finish(harness, 20)
    assert hit(harness, job.prompt) == (20, 0, 0)
    assert parts(harness.scheduler.move(ids(job.prompt), "l3")) == (20, 0, 0)
    assert hit(harness, job.prompt) == (0, 0, 20)
    stats = harness.check()
    assert (stats["cached_pages"], stats["cached_l2_pages"], stats["cached_l3_pages"]) == (0, 0, 5)


def test_the_store_is_asked_before_anything_above_is_let_go_of() -> None:
    harness = make()
    assert harness.mover is not None
    job = harness.submit(list(range(20)), 1)
    harness.run()
    harness.mover.delay = 1.0  # the write-backs are still under way
    assert parts(harness.scheduler.move(ids(job.prompt), "l3")) == (0, 20, 0)
    assert harness.scheduler.query_prefix(ids(job.prompt)).pending == 20
    settle(harness)
    assert len(harness.mover.l3) == 0
    harness.mover.delay = 0.0
    settle(harness)
    assert len(harness.mover.l3) == 5
    assert hit(harness, job.prompt) == (0, 0, 20)
    assert parts(harness.scheduler.move(ids(job.prompt), "l3")) == (20, 0, 0)
    assert harness.check()["move_orders"] == 0
    again = harness.submit([*job.prompt, 7], 3)
    harness.run()
    assert again.admissions == [(21, 20)]
    assert again.outputs == harness.model.generate(again)


def test_a_small_l2_is_passed_through() -> None:
    harness = make(num_l2_pages=2)
    assert harness.mover is not None
    job = finish(harness, 40)
    there, pending, missing = parts(harness.scheduler.move(ids(job.prompt), "l3"))
    assert missing == 0 and there + pending == 40 and pending > 0
    settle(harness, steps=60, ms=30)
    assert hit(harness, job.prompt) == (0, 0, 40)
    assert harness.check()["move_orders"] == 0
    assert len(harness.mover.l3) == 10


@pytest.mark.parametrize("seed", range(60))
def test_a_prefix_of_any_size_reaches_a_store_that_takes_no_page_before_its_head(seed: int) -> None:
    """Through an L2 of any size, whatever was there before, in whatever order pages arrive."""
    rng = random.Random(seed)
    num_l2_pages = rng.randint(1, 12)
    harness = make(num_l2_pages=num_l2_pages, num_pages=80)
    mover = harness.mover
    assert mover is not None
    mover.rng, mover.takes_heads_first = rng, True
    takes = [rng.random() < 0.5]  # a store that takes nothing leaves L2 full of what it lacks
    carry_out = mover.carry_out
    mover.carry_out = (  # type: ignore[method-assign]
        lambda move, name: (move[1] != 3 or takes[0]) and carry_out(move, name)
    )
    mover.delay = rng.choice([0.0, 0.3, 0.9])
    parked = list(range(PAGE * rng.randint(1, 19)))
    others = [list(range(base, base + 40)) for base in (100, 200, 300)]
    for tokens in (others[0], parked, *others[1:]):
        harness.submit(tokens, 1)
        harness.run()
        if tokens is parked or rng.random() < 0.3:
            harness.scheduler.move(ids(parked), "l3")
        settle(harness, steps=rng.randrange(6), ms=20)
    takes[0] = True
    for _ in range(4):  # an order that nothing came of for long ends, and is given again
        if harness.scheduler.move(ids(parked), "l3").tokens_pending == 0:
            break
        settle(harness, steps=200, ms=30)
    assert hit(harness, parked) == (0, 0, len(parked))
    assert harness.check()["move_orders"] == 0


def test_a_store_that_loses_pages_is_tried_again_and_given_up_in_the_end() -> None:
    harness = make()
    assert harness.mover is not None
    carry_out, lost = harness.mover.carry_out, [3]

    def lossy(move: list[int], name: bytes) -> bool:
        if move[1] == 3 and lost[0] > 0:  # a store
            lost[0] -= 1
            return False
        return carry_out(move, name)

    harness.mover.carry_out = lossy  # type: ignore[method-assign]
    job = finish(harness, 20)
    harness.scheduler.move(ids(job.prompt), "l3")
    settle(harness, steps=20, ms=30)
    assert hit(harness, job.prompt) == (0, 0, 20)
    lost[0] = 10**6
    other = finish(harness, 20, base=100)
    harness.scheduler.move(ids(other.prompt), "l3")
    settle(harness, steps=80, ms=60)
    assert harness.check()["move_orders"] == 0, "bounded"
    assert hit(harness, other.prompt) == (20, 0, 0), "nothing is let go of that was not stored"


def test_a_store_that_loses_what_it_is_given_at_once_is_not_asked_again_at_once() -> None:
    harness = make()
    assert harness.mover is not None
    carry_out = harness.mover.carry_out
    harness.mover.carry_out = (  # type: ignore[method-assign]
        lambda move, name: move[1] != 3 and carry_out(move, name)
    )
    job = finish(harness, 20)
    before = harness.mover.num_by_kind[3]
    for _ in range(100):  # each millisecond, as somebody who waits for it
        harness.scheduler.move(ids(job.prompt), "l3")
        settle(harness, steps=2, ms=0)
        harness.now_ms += 1
    assert harness.mover.num_by_kind[3] - before <= 5 * 5, "some rounds of five pages in 100 ms"
    assert sum(hit(harness, job.prompt)) == 20


@pytest.mark.parametrize("num_l2_pages", [3, 6, 10])
def test_what_waits_for_a_slow_store_is_not_lost_to_others_meanwhile(num_l2_pages: int) -> None:
    harness = make(num_l2_pages=num_l2_pages, num_pages=60)
    assert harness.mover is not None
    carry_out, takes = harness.mover.carry_out, [False]

    def slow(move: list[int], name: bytes) -> bool:
        return (move[1] != 3 or takes[0]) and carry_out(move, name)

    harness.mover.carry_out = slow  # type: ignore[method-assign]
    job = finish(harness, 20)
    harness.scheduler.move(ids(job.prompt), "l3")
    for base in (100, 200, 300):  # what a full queue of stores lets go of, L2 may give to others
        finish(harness, 20, base=base)
    assert sum(hit(harness, job.prompt)) == 20
    takes[0] = True
    harness.scheduler.move(ids(job.prompt), "l3")
    settle(harness, steps=60, ms=30)
    assert hit(harness, job.prompt) == (0, 0, 20)
    assert harness.check()["move_orders"] == 0


def test_a_page_takes_along_what_lies_before_it_and_the_store_did_not_take() -> None:
    harness = make()
    assert harness.mover is not None
    carry_out, takes = harness.mover.carry_out, [False]

    def choosy(move: list[int], name: bytes) -> bool:
        return (move[1] != 3 or takes[0]) and carry_out(move, name)

    harness.mover.carry_out = choosy  # type: ignore[method-assign]
    job = finish(harness, 20)
    assert len(harness.mover.l3) == 0
    takes[0] = True
    harness.now_ms += 1000
    finish(harness, 5, base=500)
    assert len(harness.mover.l3) == 1, "another prefix takes nothing along"
    harness.submit([*job.prompt, *range(700, 704)], 1)
    harness.run()
    settle(harness)
    assert len(harness.mover.l3) == 7, "the five before it, the one that is new, the other one"


def test_what_only_the_store_has_is_brought_to_l2_and_no_further() -> None:
    harness = make()
    job = finish(harness, 20)
    harness.scheduler.move(ids(job.prompt), "l3")
    settle(harness)
    assert parts(harness.scheduler.move(ids(job.prompt), "l2")) == (0, 20, 0)
    settle(harness)
    assert hit(harness, job.prompt) == (0, 20, 0)
    assert parts(harness.scheduler.move(ids(job.prompt), "l2")) == (20, 0, 0)


def test_a_prefetch_goes_through_from_the_store_to_l1() -> None:
    harness = make()
    job = finish(harness, 20)
    harness.scheduler.move(ids(job.prompt), "l3")
    settle(harness)
    assert parts(harness.scheduler.move(ids([*job.prompt, 9, 9, 9, 9]), "l1")) == (0, 20, 4)
    settle(harness)
    assert hit(harness, job.prompt) == (20, 0, 0)
    assert harness.check()["move_orders"] == 0
    again = harness.submit([*job.prompt, 7], 3)
    harness.run()
    assert again.admissions == [(21, 20)]
    assert again.outputs == harness.model.generate(again)


def test_a_prefetch_wider_than_l2_comes_in_several_rounds() -> None:
    harness = make(num_l2_pages=2)
    job = finish(harness, 40)
    harness.scheduler.move(ids(job.prompt), "l3")
    settle(harness, steps=60, ms=30)
    harness.scheduler.move(ids(job.prompt), "l1")
    settle(harness, steps=60, ms=30)
    assert hit(harness, job.prompt) == (40, 0, 0)


def test_a_prefetch_leaves_alone_what_runs_and_what_is_leased() -> None:
    harness = make(num_pages=12, lease_percent=100)
    job = finish(harness, 20)
    harness.scheduler.move(ids(job.prompt), "l2")
    kept = finish(harness, 32, base=100)
    harness.scheduler.lease(lease_id=1, token_ids=ids(kept.prompt), until_ms=10**6)
    harness.scheduler.move(ids(job.prompt), "l1")
    settle(harness, steps=40, ms=60)
    assert hit(harness, kept.prompt)[0] == 32
    assert sum(hit(harness, job.prompt)) == 20 and hit(harness, job.prompt)[0] <= 16
    assert harness.check()["move_orders"] == 0


def test_what_is_used_or_leased_stays_in_l1() -> None:
    harness = make()
    job = finish(harness, 20)
    harness.scheduler.lease(lease_id=1, token_ids=ids(job.prompt), until_ms=10**6)
    assert parts(harness.scheduler.move(ids(job.prompt), "l3")) == (20, 0, 0)
    assert hit(harness, job.prompt)[0] == 20
    harness.scheduler.release(1)
    running = harness.submit([*job.prompt, 1, 2, 3], 30)
    harness.step()
    harness.scheduler.move(ids(job.prompt), "l2")
    assert hit(harness, job.prompt)[0] == 20
    harness.run()
    assert running.outputs == harness.model.generate(running)


def test_a_page_of_a_chain_in_use_below_stays_while_its_continuation_is_there() -> None:
    harness = make()
    stem = finish(harness, 16)
    fork = finish(harness, 24)
    assert fork.prompt[:16] == stem.prompt
    harness.scheduler.move(ids(stem.prompt), "l3")
    assert hit(harness, fork.prompt) == (24, 0, 0)


def test_tokens_that_are_nowhere_are_missing_and_end_the_order() -> None:
    harness = make()
    assert parts(harness.scheduler.move(ids(list(range(8))), "l3")) == (0, 0, 8)
    assert parts(harness.scheduler.move(ids([1, 2]), "l2")) == (0, 0, 0)
    assert harness.check()["move_orders"] == 0


def test_the_newest_wish_counts() -> None:
    harness = make()
    assert harness.mover is not None
    job = finish(harness, 20)
    harness.mover.delay = 1.0
    harness.scheduler.move(ids(job.prompt), "l2")
    harness.scheduler.move(ids(job.prompt), "l1")
    assert harness.check()["move_orders"] == 1
    harness.scheduler.move(ids(job.prompt), "none")
    assert harness.check()["move_orders"] == 0


def test_without_tiers_nothing_moves_and_without_a_store_l3_is_refused() -> None:
    harness = make(use_l3=False, num_l2_pages=0)
    harness.mover = None
    job = harness.submit(list(range(20)), 1)
    harness.run()
    assert parts(harness.scheduler.move(ids(job.prompt), "l2")) == (0, 0, 20)
    assert parts(harness.scheduler.move(ids(job.prompt), "l1")) == (20, 0, 0)
    assert hit(harness, job.prompt) == (20, 0, 0)
    with pytest.raises(ValueError, match="tier: 'l3' needs use_l3"):
        harness.scheduler.move(ids(job.prompt), "l3")


def test_a_page_that_a_full_l2_refused_is_written_back_when_there_is_room() -> None:
    harness = make(use_l3=False, num_l2_pages=5, lease_percent=100)
    first = finish(harness, 20)
    harness.scheduler.lease(lease_id=1, token_ids=ids(first.prompt), until_ms=10**6, tier="l2")
    assert harness.check()["leased_l2_pages"] == 5
    second = finish(harness, 20, base=100)
    assert harness.check()["cached_l2_pages"] == 5
    harness.scheduler.release(1)
    settle(harness, steps=20, ms=20)
    assert parts(harness.scheduler.move(ids(second.prompt), "l2")) == (20, 0, 0)
    assert hit(harness, second.prompt) == (0, 20, 0)


@pytest.mark.parametrize("asks", ["request", "prefetch"])
def test_a_tail_that_only_l2_has_may_make_room_for_its_head(asks: str) -> None:
    harness = make(num_l2_pages=2)
    tokens = list(range(12))
    names = cpp.name_pages(ids(tokens), page_size=PAGE)
    none = ids([])
    harness.scheduler.adopt("l3", ids(tokens[:8]), names[:32], none)
    tail = dict(before=names[16:32], start=8)
    harness.scheduler.adopt("l2", ids(tokens[8:]), names[32:], ids([1]), **tail)
    assert hit(harness, tokens) == (0, 4, 8)
    if asks == "prefetch":
        harness.scheduler.move(ids(tokens), "l1")
        settle(harness)
    job = harness.submit([*tokens, 7], 3)
    harness.run()
    assert job.outputs == harness.model.generate(job)
    settle(harness)


@pytest.mark.parametrize(
    ("before", "start"), [(b"", 4), (bytes(15) + b"1", 0), (bytes(15) + b"1", 3)]
)
def test_a_fragment_says_where_it_begins(before: bytes, start: int) -> None:
    harness = make()
    names = cpp.name_pages(ids([1, 2, 3, 4]), page_size=PAGE, parent=before)
    with pytest.raises(ValueError, match="start: "):
        harness.scheduler.adopt("l3", ids([1, 2, 3, 4]), names, ids([]), before=before, start=start)


# ---- drop ----------------------------------------------------------------------------------------


def drop(harness: Harness, tokens: list[int], keep: int) -> None:
    harness.scheduler.drop_prefix(ids(tokens), keep)
    harness.check()


@pytest.mark.parametrize("tier", ["l1", "l2", "l3"])
def test_a_dropped_end_leaves_every_tier_and_what_is_kept_stays(tier: str) -> None:
    harness = make()
    job = finish(harness, 20)
    harness.scheduler.move(ids(job.prompt), tier)
    settle(harness)
    drop(harness, job.prompt, 10)  # tokens 10 and 11 lie in the page that is kept
    assert sum(hit(harness, job.prompt)) == 12
    stats = harness.check()
    assert stats["cached_pages"] == (3 if tier == "l1" else 0)
    assert stats["cached_l2_pages"] == (0 if tier == "l3" else 3)
    assert stats["cached_l3_pages"] == 3


@pytest.mark.parametrize("tier", ["l1", "l2", "l3"])
def test_what_another_session_goes_on_from_is_not_dropped(tier: str) -> None:
    harness = make()
    mine = finish(harness, 20)
    other = harness.submit([*range(12), 90, 91, 92, 93, 94], 1)
    harness.run()
    settle(harness)
    harness.scheduler.move(ids(other.prompt), tier)
    settle(harness)
    drop(harness, mine.prompt, 0)
    assert sum(hit(harness, other.prompt)) >= 16
    assert sum(hit(harness, mine.prompt)) == 12
    drop(harness, other.prompt, 0)
    assert sum(hit(harness, mine.prompt)) == 0
    stats = harness.check()
    assert stats["free_pages"] == 20 and stats["free_l2_pages"] == 50
    assert stats["cached_l3_pages"] == 0


def test_what_is_on_its_way_down_is_dropped_when_it_has_come() -> None:
    harness = make()
    assert harness.mover is not None
    harness.mover.delay = 1.0
    job = harness.submit(list(range(20)), 1)
    harness.run()
    result = harness.scheduler.move(ids(job.prompt), "none")
    assert parts(result) == (0, 20, 0) and result.num_pages == 10
    harness.mover.delay = 0.0
    settle(harness)
    assert parts(harness.scheduler.move(ids(job.prompt), "none")) == (0, 0, 20)
    stats = harness.check()
    assert stats["free_pages"] == 20 and stats["free_l2_pages"] == 50
    assert stats["cached_l3_pages"] == 0 and not harness.mover.l3, "it was not stored on the way"


def test_a_page_that_is_lost_on_its_way_takes_along_what_was_dropped_before_it() -> None:
    harness = make()
    assert harness.mover is not None
    job = finish(harness, 16)
    harness.mover.delay = 1.0
    longer = harness.submit([*job.prompt, 50, 51, 52, 53], 1)
    harness.run()
    drop(harness, longer.prompt, 4)
    harness.mover.delay, harness.mover.loss = 0.0, 1.0
    settle(harness)
    assert sum(hit(harness, longer.prompt)) == 4
    assert harness.check()["cached_l2_pages"] == 1


def test_who_says_the_dropped_words_again_in_time_keeps_them() -> None:
    harness = make()
    assert harness.mover is not None
    harness.mover.delay = 1.0
    job = harness.submit(list(range(20)), 1)
    harness.run()
    drop(harness, job.prompt, 0)
    again = harness.submit([*job.prompt, 3, 4], 2)
    harness.run()
    harness.mover.delay = 0.0
    settle(harness)
    assert again.outputs == harness.model.generate(again)
    stats = harness.check()
    assert (stats["cached_l2_pages"], stats["cached_l3_pages"]) == (5, 5)


def test_a_prefix_that_a_request_is_waiting_for_is_not_dropped() -> None:
    harness = make()
    assert harness.mover is not None
    job = finish(harness, 20)
    harness.scheduler.move(ids(job.prompt), "l3")
    settle(harness)
    harness.mover.delay = 1.0
    again = harness.submit([*job.prompt, 7], 2)
    harness.step()  # fetching
    drop(harness, job.prompt, 0)
    harness.mover.delay = 0.0
    harness.run()
    assert again.admissions == [(21, 20)]


# ---- hold times ----------------------------------------------------------------------------------


def hint(harness: Harness, job: Job, share: float = 0.5, **until_ms: int) -> int:
    return harness.scheduler.hint_prefix(ids(job.prompt), share, **until_ms)


def test_when_its_time_in_l1_is_over_a_prefix_goes_to_l2() -> None:
    harness = make()
    job = finish(harness, 20)
    until = harness.now_ms + 10
    assert hint(harness, job, l1_until_ms=until) == 20
    harness.now_ms = until - 1
    harness.step()
    assert hit(harness, job.prompt) == (20, 0, 0)
    harness.now_ms = until
    harness.step()
    assert hit(harness, job.prompt) == (0, 20, 0)


def test_when_its_time_in_l2_is_over_it_stays_in_the_store_alone() -> None:
    harness = make()
    job = finish(harness, 20)
    start = harness.now_ms
    hint(harness, job, l1_until_ms=start + 5, l2_until_ms=start + 10, l3_until_ms=start + 50)
    harness.now_ms = start + 5
    harness.step()
    assert hit(harness, job.prompt) == (0, 20, 0)
    harness.now_ms = start + 10
    harness.step()
    assert hit(harness, job.prompt) == (0, 0, 20)
    harness.scheduler.drain_kv_events()
    harness.now_ms = start + 50
    harness.step()
    assert hit(harness, job.prompt) == (0, 0, 0)
    told = [(e.kind, e.tier) for e in harness.scheduler.drain_kv_events()]
    assert told == [("removed", "l3")] * 5
    stats = harness.check()
    assert stats["free_pages"] == 20 and stats["free_l2_pages"] == 50


def test_a_turn_that_goes_on_in_time_keeps_all_of_it() -> None:
    harness = make()
    job = finish(harness, 20)
    hint(harness, job, l1_until_ms=harness.now_ms + 10)
    turn = harness.submit([*job.prompt, 1, 2, 3, 4], 30)
    harness.step()
    harness.now_ms += 20
    harness.step()
    harness.run()
    assert hit(harness, turn.prompt)[0] >= 20


def test_a_new_hint_replaces_the_deadlines() -> None:
    harness = make()
    job = finish(harness, 20)
    hint(harness, job, l1_until_ms=harness.now_ms + 10, l2_until_ms=harness.now_ms + 10)
    hint(harness, job)
    harness.now_ms += 100
    settle(harness)
    assert hit(harness, job.prompt) == (20, 0, 0)
    harness.scheduler.move(ids(job.prompt), "l2")
    assert hit(harness, job.prompt) == (0, 20, 0)


def test_a_prefix_somebody_wishes_kept_outlives_an_equal_one() -> None:
    harness = make(use_l3=False, num_l2_pages=0)
    harness.mover = None
    held = harness.submit(list(range(32)), 1)
    harness.run()
    hint(harness, held, l1_until_ms=10**6)
    harness.now_ms += 1
    for base in (100, 200, 300):
        harness.submit(list(range(base, base + 32)), 1)
        harness.run()
    assert hit(harness, held.prompt)[0] == 32


def test_a_wish_is_no_promise() -> None:
    harness = make(use_l3=False, num_l2_pages=0)
    harness.mover = None
    held = harness.submit(list(range(32)), 1)
    harness.run()
    hint(harness, held, l1_until_ms=10**6)
    big = harness.submit(list(range(100, 170)), 2)
    harness.run()
    assert big.outputs == harness.model.generate(big)
    assert hit(harness, held.prompt)[0] < 32


def test_in_l2_a_wished_prefix_is_evicted_after_an_equal_one() -> None:
    harness = make(use_l3=False, num_l2_pages=10, num_pages=30)
    held, other = finish(harness, 20), finish(harness, 20, base=100)
    hint(harness, held, l2_until_ms=10**6)
    for job in (held, other):
        harness.scheduler.move(ids(job.prompt), "l2")
    finish(harness, 12, base=200)
    assert hit(harness, held.prompt) == (0, 20, 0)
    assert hit(harness, other.prompt)[1] < 20


def test_negative_deadlines_are_refused() -> None:
    harness = make()
    with pytest.raises(ValueError, match="l2_until_ms: -1 is not >= 0"):
        harness.scheduler.hint_prefix(ids([1]), 0.5, l2_until_ms=-1)
