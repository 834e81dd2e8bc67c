# SPDX-License-Identifier: Apache-2.0
"""Four ranks, a scheduler each: their transfers end at other times, their plans never differ."""

from __future__ import annotations

import random

import pytest

import _scheduler as cpp
from engine.loop.ack_quorum import AckQuorum
from engine.loop.replay import digest_plan
from tests.fakes.scheduler_sim import Harness, TierMover, ToyModel, random_tokens

NUM_RANKS = 4


class AgreedMover(TierMover):
    """Says of its transfers what all ranks agreed on."""

    agreed: list[cpp.TransferAck]

    def acks(self, everything: bool = False) -> list[cpp.TransferAck]:
        return self.agreed


@pytest.mark.parametrize("seed", range(12))
def test_ranks_whose_transfers_differ_plan_alike(seed: int) -> None:
    rng = random.Random(seed)
    config = cpp.SchedulerConfig(
        page_size=2,
        num_pages=12,
        max_slots=2,
        max_context_len=40,
        num_l2_pages=10,
        use_l3=seed % 2 == 0,
    )
    ranks = [Harness(config, ToyModel(3), overlap=seed % 3 == 0) for _ in range(NUM_RANKS)]
    movers = [
        AgreedMover(config, rank.device, random.Random(100 * seed + i))
        for i, rank in enumerate(ranks)
    ]
    for rank, mover in zip(ranks, movers, strict=True):
        rank.mover = mover
        mover.loss = 0.05
    quorum = AckQuorum(NUM_RANKS)
    history: list[list[int]] = [[]]
    for _ in range(400):
        if len(ranks[0].live) < 4:
            prompt = rng.choice(history)[:12] + random_tokens(rng, 3, 3)
            history.append(prompt)
            for rank in ranks:
                rank.submit(prompt, 4)
        plans = [rank.plan() for rank in ranks]
        assert len({digest_plan(plan) for plan in plans}) == 1
        agreed: list[cpp.TransferAck] = []
        for i, mover in enumerate(movers):
            agreed += quorum.report(i, TierMover.acks(mover))
        for rank, mover in zip(ranks, movers, strict=True):
            mover.agreed = agreed
            if len(rank.flights) > int(rank.overlap) or plans[0].step_id < 0:
                rank.commit()
            else:
                rank.scheduler.advance(agreed)
            rank.now_ms += 1
            rank.check()
    assert ranks[0].num_lower_tokens > 0
    assert [rank.scheduler.stats() for rank in ranks] == [ranks[0].scheduler.stats()] * NUM_RANKS


def ack(ticket: int, ok: bool = True) -> cpp.TransferAck:
    return cpp.TransferAck(ticket=ticket, ok=ok)


def test_a_ticket_is_over_when_it_is_over_everywhere_and_ok_if_it_is_everywhere() -> None:
    quorum = AckQuorum(3)
    assert quorum.report(0, [ack(5), ack(4, ok=False)]) == []
    assert quorum.report(2, [ack(4), ack(5)]) == []
    assert quorum.num_pending == 2
    done = quorum.report(1, [ack(5), ack(4)])
    assert [(a.ticket, a.ok) for a in done] == [(4, False), (5, True)]
    assert quorum.num_pending == 0


def test_an_unknown_rank_and_a_second_report_are_refused_whole() -> None:
    quorum = AckQuorum(2)
    with pytest.raises(ValueError, match="rank: 2 is not in"):
        quorum.report(2, [ack(1)])
    quorum.report(0, [ack(1)])
    with pytest.raises(ValueError, match=r"acks\[1\]\.ticket: 1 was reported by rank 0 before"):
        quorum.report(0, [ack(7), ack(1)])
    assert quorum.num_pending == 1
    with pytest.raises(ValueError, match="num_ranks: 0 is not >= 1"):
        AckQuorum(0)


def probe(probe_id: int, num_pages: int) -> cpp.ProbeDone:
    return cpp.ProbeDone(probe_id=probe_id, num_pages=num_pages)


def test_a_probe_has_found_the_leading_pages_that_every_rank_has() -> None:
    quorum = AckQuorum(3)
    assert quorum.report_probes(2, [probe(9, 4), probe(8, 0)]) == []
    assert quorum.report_probes(0, [probe(8, 7), probe(9, 6)]) == []
    assert quorum.num_pending == 2
    with pytest.raises(ValueError, match=r"probes\[1\]\.probe_id: 9 was reported by rank 0"):
        quorum.report_probes(0, [probe(7, 1), probe(9, 1)])
    done = quorum.report_probes(1, [probe(9, 5), probe(8, 7)])
    assert [(one.probe_id, one.num_pages) for one in done] == [(8, 0), (9, 4)]
    assert quorum.num_pending == 0
    with pytest.raises(ValueError, match="rank: 3 is not in"):
        quorum.report_probes(3, [probe(1, 1)])
