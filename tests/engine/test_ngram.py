# SPDX-License-Identifier: Apache-2.0
"""Drafts come from the longest, latest earlier occurrence, and as many as the last ones earned."""

from __future__ import annotations

import random

import numpy as np

from engine.spec_decode.ngram import MAX_MATCH, MIN_MATCH, NgramDrafter


def _drafter(ids: list[int], max_drafts: int = 8) -> NgramDrafter:
    return NgramDrafter(np.array(ids, dtype=np.int32), max_drafts)


def _by_scanning(ids: list[int], min_match: int, num: int) -> list[int]:
    """All earlier ends, each match counted token by token."""
    best = (0, 0)
    for end in range(len(ids) - 1):
        length = 0
        while length < MAX_MATCH and length <= end and ids[end - length] == ids[-1 - length]:
            length += 1
        best = max(best, (length, end))
    length, end = best
    if length < min_match:
        return []
    following = ids[end + 1 :]
    return [following[place % len(following)] for place in range(num)]


def test_drafts_are_those_that_a_plain_scan_finds() -> None:
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(3) for _ in range(rng.randrange(40))]
        assert _drafter(ids).propose().tolist() == _by_scanning(ids, MIN_MATCH, 4), ids


def test_the_longer_match_wins_over_the_later_one() -> None:
    ids = [1, 2, 3, 4, 70, 71, 72, 73, 9, 2, 3, 4, 80, 81, 82, 83, 1, 2, 3, 4]
    assert _drafter(ids).propose().tolist() == [70, 71, 72, 73]


def test_tokens_appended_later_are_found_too() -> None:
    drafter = _drafter([5])
    drafter.append([1, 2, 3, 4, 5, 6])
    for _ in range(200):
        drafter.append([7, 8, 9])
    drafter.append([1, 2, 3])
    assert drafter.propose().tolist() == [4, 5, 6, 7]


def test_right_drafts_earn_more_and_wrong_ones_fewer() -> None:
    ids = [*range(40), *range(10)]
    drafter = _drafter(ids)
    assert len(drafter.propose()) == 4
    drafter.note(4, 4)
    assert len(drafter.propose()) == 8
    drafter.note(8, 8)
    assert len(drafter.propose()) == 8, "no more than allowed"
    drafter.note(8, 2)
    assert len(drafter.propose()) == 3
    drafter.note(3, 0)
    assert len(drafter.propose()) == 1


def test_wrong_drafts_make_a_short_match_too_little_until_one_is_right() -> None:
    drafter = _drafter([1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert len(drafter.propose())
    drafter.note(4, 0)
    assert not len(drafter.propose())
    drafter.append([4, 5])
    assert drafter.propose().tolist() == [9], "five tokens match now"
    drafter.note(1, 1)
    assert len(_drafter([1, 2, 3, 4, 5, 9, 1, 2, 3]).propose())


def test_a_first_draft_that_was_not_run_counts_for_the_match_alone() -> None:
    ids = [*range(40), *range(10)]
    drafter = _drafter(ids)
    for _ in range(4):
        drafter.note_guess(False)
    assert not len(drafter.propose()), "ten tokens match, eleven are asked for"
    drafter.note_guess(True)
    assert len(drafter.propose()) == 4


def test_nothing_said_before_gives_no_drafts() -> None:
    assert not len(_drafter([]).propose())
    assert not len(_drafter([4]).propose())
    assert not len(_drafter(list(range(100))).propose())
