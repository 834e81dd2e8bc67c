# SPDX-License-Identifier: Apache-2.0
"""What a request finds in the radix tree: token-exact, to the last computed token."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

import _scheduler as cpp
from tests.fakes.scheduler_sim import Harness, random_tokens

PAGE = 4


def make_harness(overlap: bool = False, **options: object) -> Harness:
    settings: dict[str, object] = dict(
        page_size=PAGE, num_pages=200, max_slots=8, max_context_len=300, token_budget=16
    )
    return Harness(cpp.SchedulerConfig(**{**settings, **options}), overlap=overlap)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def as_array(sequence: list[int]) -> np.ndarray:
    return np.array(sequence, np.int32)


def page_name(space: bytes, parent: bytes, page: list[int]) -> bytes:
    return hashlib.sha256(space + parent + np.array(page, "<i4").tobytes()).digest()[:16]


def chain(fingerprint: str, salt: str, sequence: list[int]) -> list[bytes]:
    """Names of the full pages of a sequence, from the definition alone."""
    print_bytes = fingerprint.encode()
    length = len(print_bytes).to_bytes(4, "little")
    space = hashlib.sha256(length + print_bytes + salt.encode()).digest()[:16]
    names, parent = [], bytes(16)
    for start in range(0, len(sequence) - PAGE + 1, PAGE):
        parent = page_name(space, parent, sequence[start : start + PAGE])
        names.append(parent)
    return names


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_new", [1, 2, 3, 4, 5, 9])
def test_each_turn_finds_all_of_the_turn_before_but_its_last_sampled_token(
    overlap: bool, num_new: int
) -> None:
    harness = make_harness(overlap)
    rng = random.Random(num_new)
    sequence = random_tokens(rng, 7)
    cached = 0
    for turn in range(8):
        job = harness.submit(sequence, max_new=5)
        harness.run()
        assert job.admissions == [(len(sequence), cached)], f"turn {turn}"
        assert job.ended is not None and job.ended.status == "finished"
        assert job.ended.num_cached_tokens == len(sequence) + 5 - 1
        cached = job.ended.num_cached_tokens
        sequence = sequence + job.outputs + random_tokens(rng, num_new)
        harness.check()


def test_the_next_turn_goes_on_in_the_partly_filled_page_without_a_copy() -> None:
    harness = make_harness()
    first = harness.submit([1, 2, 3, 4, 5, 6], max_new=1)
    harness.run()
    before = harness.check()
    harness.submit(first.prompt + first.outputs, max_new=1)
    plan = harness.plan()
    assert plan.page_copies.tolist() == []
    assert plan.row_starts.tolist() == [6]
    harness.commit()
    assert harness.check()["cached_pages"] == before["cached_pages"] == 2


def test_a_fork_copies_the_shared_part_of_the_page_it_diverges_in() -> None:
    harness = make_harness()
    stem = harness.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_new=1)
    harness.run()
    harness.submit(stem.prompt[:6] + [40, 41], max_new=1)
    plan = harness.plan()
    assert plan.admissions[0].cached_l1 == 6
    (copy,) = plan.page_copies.tolist()
    assert copy[2] == 2  # tokens 4 and 5 of the second page
    assert copy[0] != copy[1]
    harness.commit()
    again = harness.submit(stem.prompt + [9], max_new=1)
    harness.run()
    assert again.admissions == [(10, 9)]  # the stem lost nothing to its fork


def test_two_branches_over_one_partly_filled_page_each_get_it() -> None:
    harness = make_harness()
    stem = harness.submit([1, 2, 3, 4, 5, 6], max_new=1)
    harness.run()
    # While the first branch runs the page is its own; the second then finds full pages only.
    left = harness.submit(stem.prompt + [20], max_new=1)
    harness.run()
    right = harness.submit(stem.prompt + [30], max_new=1)
    harness.run()
    assert left.admissions == [(7, 6)]
    assert right.admissions == [(7, 6)]


def test_a_prompt_that_is_cached_whole_computes_its_last_token_only() -> None:
    harness = make_harness()
    first = harness.submit(list(range(12)), max_new=3)
    harness.run()
    second = harness.submit(list(range(12)), max_new=3)
    plan = harness.plan()
    assert plan.row_starts.tolist() == [11]
    assert plan.row_lens.tolist() == [1]
    assert plan.row_samples.tolist() == [1]
    harness.commit()
    harness.run()
    assert second.outputs == first.outputs


def test_prefixes_are_shared_only_within_one_salt() -> None:
    harness = make_harness()
    harness.submit(list(range(20)), max_new=2, salt="a")
    harness.run()
    other = harness.submit(list(range(20)), max_new=2, salt="b")
    harness.run()
    same = harness.submit(list(range(20)), max_new=2, salt="a")
    harness.run()
    assert other.admissions == [(20, 0)]
    assert same.admissions == [(20, 19)]


def test_page_hashes_are_chained_sha256_cut_to_128_bits() -> None:
    harness = make_harness(model_fingerprint="llama-135m")
    job = harness.submit(random_tokens(random.Random(3), 11), max_new=7, salt="tenant")
    harness.run()
    sequence = (job.prompt + job.outputs)[:-1]
    expected = chain("llama-135m", "tenant", sequence)
    assert job.ended is not None
    assert job.ended.page_hashes == b"".join(expected)
    events = harness.scheduler.drain_kv_events()
    assert [e.page_hash for e in events] == expected
    assert [e.parent_hash for e in events] == [bytes(16), *expected[:-1]]
    assert {(e.kind, e.tier, e.num_tokens) for e in events} == {("stored", "l1", PAGE)}


def test_kv_events_add_up_to_what_the_tree_holds() -> None:
    harness = make_harness(num_pages=30, max_context_len=60)
    rng = random.Random(5)
    held: dict[bytes, bytes] = {}
    for _ in range(60):
        harness.now_ms += 1
        job = harness.submit(random_tokens(rng, rng.randrange(1, 30), vocab=3), max_new=4)
        harness.run()
        for event in harness.scheduler.drain_kv_events():
            if event.kind == "stored":
                assert event.page_hash not in held
                assert event.parent_hash == bytes(16) or event.parent_hash in held
                held[event.page_hash] = event.parent_hash
            else:
                assert event.kind == "removed"
                assert held.pop(event.page_hash) == event.parent_hash
                assert event.page_hash not in held.values(), "a parent went before its child"
        nodes = harness.scheduler.tree(10_000)
        full_pages = sum(node.num_tokens // PAGE for node in nodes)
        assert len(held) == full_pages
        assert job.ended is not None
    assert harness.check()["evicted_pages"] > 0


def test_query_prefix_counts_tokens_and_leaves_recency_alone() -> None:
    harness = make_harness(num_pages=12, max_context_len=48)
    old = harness.submit(list(range(10)), max_new=1)
    harness.run()
    new = harness.submit([40, *range(10)], max_new=1)
    harness.run()
    harness.now_ms += 100
    for _ in range(3):
        assert harness.scheduler.query_prefix(as_array(old.prompt)).l1 == 10
    assert harness.scheduler.query_prefix(tokens(0, 1, 2, 3, 4, 9)).l1 == 5
    assert harness.scheduler.query_prefix(as_array(old.prompt), "salt").l1 == 0
    harness.submit(random_tokens(random.Random(0), 28), max_new=1)  # needs room: evicts the oldest
    harness.run()
    assert harness.scheduler.query_prefix(as_array(old.prompt)).l1 < 10
    assert harness.scheduler.query_prefix(as_array(new.prompt)).l1 == 11


def test_drop_prefix_frees_what_no_one_shares() -> None:
    harness = make_harness()
    stem = harness.submit(list(range(12)), max_new=1)
    harness.run()
    fork = harness.submit(stem.prompt[:8] + [40] * 7, max_new=1)
    harness.run()
    before = harness.check()["cached_pages"]
    scheduler = harness.scheduler
    assert scheduler.drop_prefix(as_array(fork.prompt), keep_tokens=13) == 0
    assert scheduler.drop_prefix(as_array(fork.prompt), keep_tokens=11) == 1
    assert scheduler.drop_prefix(as_array(fork.prompt[:12])) == 1
    assert scheduler.query_prefix(as_array(stem.prompt)).l1 == 12
    assert scheduler.drop_prefix(as_array(stem.prompt)) == 3
    assert harness.check()["cached_pages"] == before - 5 == 0


def test_drop_prefix_never_takes_pages_from_a_running_request() -> None:
    harness = make_harness()
    job = harness.submit(list(range(20)), max_new=10)
    for _ in range(4):
        harness.step()
    assert harness.scheduler.drop_prefix(as_array(job.prompt)) == 0
    harness.run()
    assert job.outputs == harness.model.generate(job)


def test_a_long_prefill_publishes_its_full_pages_while_it_runs() -> None:
    harness = make_harness()
    harness.submit(random_tokens(random.Random(1), 64), max_new=1)
    for expected in (16, 32, 48):
        harness.plan()
        harness.commit()
        assert harness.scheduler.query_prefix(as_array(harness.jobs[0].prompt)).l1 == expected


def test_a_failed_request_publishes_nothing_of_its_failed_step() -> None:
    harness = make_harness()
    job = harness.submit(list(range(10)), max_new=4)
    harness.fail_next = {job.request_id}
    harness.run()
    assert job.ended is not None and job.ended.status == "failed"
    assert harness.scheduler.query_prefix(as_array(job.prompt)).l1 == 0
    assert harness.check()["free_pages"] == 200


def test_a_failed_turn_keeps_what_earlier_turns_had_cached() -> None:
    harness = make_harness()
    first = harness.submit([1, 2, 3, 4, 5, 6], max_new=2)
    harness.run()
    second = harness.submit(first.prompt + first.outputs + [7, 7, 7], max_new=2)
    harness.fail_next = {second.request_id}
    harness.run()
    assert second.ended is not None and second.ended.num_cached_tokens == 7
    third = harness.submit(second.prompt, max_new=2)
    harness.run()
    assert third.admissions == [(len(third.prompt), 7)]
    assert third.outputs == harness.model.generate(third)


def test_an_aborted_request_leaves_what_it_computed_in_the_tree() -> None:
    harness = make_harness()
    job = harness.submit(list(range(40)), max_new=4)
    harness.step()
    harness.step()
    (ended,) = harness.abort(job.request_id)
    assert (ended.status, ended.num_cached_tokens) == ("aborted", 32)
    assert harness.check()["owned_pages"] == 0


def test_a_page_computed_twice_is_kept_once() -> None:
    harness = make_harness()
    first = harness.submit([1, 2, 3], max_new=20)
    second = harness.submit([1, 2, 3], max_new=20)
    harness.run()
    assert first.outputs == second.outputs == harness.model.generate(first)
    stats = harness.check()
    assert stats["duplicate_pages"] > 0
    assert stats["cached_pages"] == -(-(3 + 19) // PAGE)


def test_the_tree_snapshot_is_bounded_and_linked() -> None:
    harness = make_harness()
    stem = list(range(8))
    for branch in range(5):
        harness.submit(stem + [40 + branch] * 6, max_new=1)
        harness.run()
    nodes = harness.scheduler.tree(100)
    roots = [node for node in nodes if node.parent_id == -1]
    assert len(roots) == 1 and roots[0].num_tokens == 0
    ids = {node.node_id for node in nodes}
    assert all(node.parent_id in ids for node in nodes if node.parent_id != -1)
    assert sum(node.num_pages for node in nodes) == harness.check()["cached_pages"]
    (shared,) = [node for node in nodes if node.num_children == 5]
    assert shared.first_token_ids.tolist() == stem
    assert len(harness.scheduler.tree(3)) == 3
