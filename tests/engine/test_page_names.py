# SPDX-License-Identifier: Apache-2.0
"""What is known of a page by its name; and that a prompt's first step does not wait for names."""

from __future__ import annotations

import hashlib
from typing import cast

import numpy as np
import pytest

from _scheduler import Plan, RequestSpec, Scheduler
from engine import api
from engine.loop.control_plane import ControlPlane
from engine.loop.outbox import Outbox
from engine.loop.page_names import ROOT_HASH, PageNames
from engine.loop.requests import Request
from engine.loop.tier_plane import TierPlane
from kvtiers.transfer import Move, MoveKind, TransferEngine

PAGE = 4
MODEL = "a model"


def names_of(tokens: list[int], salt: str) -> list[bytes]:
    """Of the full pages, by the rule that csrc/prefix/page_hash.h states."""
    before = len(MODEL).to_bytes(4, "little") + MODEL.encode() + salt.encode()
    space = hashlib.sha256(before).digest()[:16]
    names, parent = [], bytes(16)
    for at in range(0, len(tokens) - PAGE + 1, PAGE):
        page = np.array(tokens[at : at + PAGE], "<i4").tobytes()
        parent = hashlib.sha256(space + parent + page).digest()[:16]
        names.append(parent)
    return names


def page_names(most: int = 100) -> PageNames:
    return PageNames(page_size=PAGE, model_fingerprint=MODEL, most=most)


def request_of(index: int, tokens: list[int], salt: str = "") -> Request:
    return Request(
        request_id=f"r{index}",
        index=index,
        prompt_ids=np.array(tokens, np.int32),
        resumed_ids=np.zeros(0, np.int32),
        params=api.SamplingParams(max_new_tokens=8),
        stop_ids=frozenset(),
        received_ms=0,
        salt=salt,
    )


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_a_name_leads_back_to_its_tokens_and_to_the_page_before(salt: str) -> None:
    tokens = np.random.default_rng(1).integers(0, 1 << 30, 4 * PAGE + 1).tolist()
    expected, names = names_of(tokens, salt), page_names()
    request = request_of(0, tokens[:-6], salt)
    names.extend(request)
    assert len(names) == 2
    request.output += np.array(tokens[-6:], "<i4").tobytes()
    names.extend(request)
    assert len(names) == 4
    for place, page_hash in enumerate(expected):
        found = names.find(page_hash)
        assert found is not None
        assert found.page_hash == page_hash
        assert found.parent_hash == (expected[place - 1] if place else ROOT_HASH)
        assert np.frombuffer(found.token_ids, "<i4").tolist() == tokens[place * PAGE :][:PAGE]
        assert (found.salt, found.start) == (salt, place * PAGE)


class Queue:
    """Takes requests in, as a scheduler does."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def submit(self, specs: list[RequestSpec]) -> None:
        self.tokens += [spec.token_ids.tolist() for spec in specs]


def test_a_prompt_is_queued_without_names() -> None:
    queue, names = Queue(), page_names()
    plane = TierPlane(cast(Scheduler, queue), cast(TransferEngine, None), names, list, lambda: None)
    control = ControlPlane(cast(Scheduler, queue), cast(Outbox, None), page_size=PAGE)
    control.attach_tiers(plane)
    control.submit(request_of(0, list(range(9))))
    assert queue.tokens == [list(range(9))]
    assert len(names) == 0


class Moves:
    """Keeps what a plane has submitted."""

    def __init__(self) -> None:
        self.taken: list[Move] = []

    def submit(self, moves: list[Move]) -> None:
        self.taken += moves


class PlanOfMoves:
    """One write-back of each page named."""

    probe_ids = np.zeros(0, np.int64)
    row_loads = np.zeros((0, 2), np.int64)

    def __init__(self, page_hashes: list[bytes]) -> None:
        rows = [(at, MoveKind.WRITE_BACK, 0, at, 1, at) for at in range(len(page_hashes))]
        self.moves = np.array(rows, np.int64)
        self.move_hashes = np.frombuffer(b"".join(page_hashes), np.uint8).reshape(-1, 16)


def test_a_page_that_moves_is_named_whoever_of_the_live_requests_it_is() -> None:
    prompts = [list(range(10 * index, 10 * index + 9)) for index in range(3)]
    requests = [request_of(index, tokens) for index, tokens in enumerate(prompts)]
    wanted = [names_of(prompts[index], "")[place] for index, place in ((1, 1), (0, 0), (2, 1))]
    moves = Moves()
    plane = TierPlane(
        cast(Scheduler, None),
        cast(TransferEngine, moves),
        page_names(),
        lambda: requests,
        lambda: None,
    )
    plane.take(cast(Plan, PlanOfMoves([*wanted, bytes(range(16))])))
    found = [move.name.page_hash if move.name is not None else None for move in moves.taken]
    assert found == [*wanted, None]


class CountedNames(PageNames):
    """Keeps whose pages it was asked to name."""

    def __init__(self) -> None:
        super().__init__(page_size=PAGE, model_fingerprint=MODEL, most=100)
        self.asked: list[str] = []

    def extend(self, request: Request) -> None:
        self.asked.append(request.request_id)
        super().extend(request)


def test_pages_that_nobody_knows_cost_one_look_at_each_request_and_not_one_a_page() -> None:
    """As after a restart, whose L2 pages go down beside a long queue."""
    requests = [request_of(index, list(range(10 * index, 10 * index + 9))) for index in range(3)]
    wanted = names_of(list(range(10, 19)), "")
    names, moves = CountedNames(), Moves()
    plane = TierPlane(
        cast(Scheduler, None),
        cast(TransferEngine, moves),
        names,
        lambda: requests,
        lambda: None,
    )
    unknown = [bytes([at]) * 16 for at in range(5)]
    plane.take(cast(Plan, PlanOfMoves([wanted[1], *unknown, wanted[0]])))
    assert names.asked == ["r0", "r1", "r2"]
    found = [move.name.page_hash if move.name is not None else None for move in moves.taken]
    assert found == [wanted[1], *[None] * 5, wanted[0]]
