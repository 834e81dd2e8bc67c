# SPDX-License-Identifier: Apache-2.0
"""Which running requests get drafts, which drafts, and how many of them fit in a step.

A draft is verified by sampling: a row with d drafts samples after its newest token and after each
draft, each time as if the drafts before it were output, and what it sampled counts up to the first
draft that it did not sample itself. So tokens are those of a run without drafts, greedy or drawn.
A request with drafts waits for its results before it is planned again; one without runs ahead as
ever. Does not know: how drafts are found, steps' tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from _scheduler import Plan
from engine.config import TOKENS_WITH_DRAFTS, EngineConfig
from engine.loop.commit import TakenTokens
from engine.loop.control_plane import ControlPlane
from engine.loop.counters import Counters
from engine.loop.requests import Request
from engine.sampling.params import RowSampling
from engine.spec_decode.ngram import NO_DRAFTS, IdRow, NgramDrafter


class Speculation:
    """Owns the drafts of all requests. One thread."""

    def __init__(self, config: EngineConfig, control: ControlPlane, counters: Counters) -> None:
        self._kind = config.speculation
        self._max_drafts = config.max_draft_tokens
        self._control = control
        self._counters = counters

    def begin(self, request: Request) -> None:
        """A request was admitted. Penalties change with each token, so such a request has none."""
        row = request.row
        if self._kind != "ngram" or request.drafter is not None or _has_penalties(row):
            return
        known = np.concatenate([request.prompt_ids, request.output_ids()])
        request.drafter = NgramDrafter(known, self._max_drafts)

    def note(self, taken: TakenTokens) -> None:
        """A step gave a request tokens; find its next drafts."""
        request, num_drafts = taken.request, len(taken.drafts)
        if num_drafts and taken.token_ids:
            num_accepted = len(taken.token_ids) - 1
            self._counters.note_drafts(self._kind, num_drafts, num_accepted)
            if request.drafter is not None:
                request.drafter.note(num_drafts, num_accepted)
        elif request.drafter is not None and len(request.drafts) and taken.token_ids:
            # Found while the step that gave this token was under way.
            request.drafter.note_guess(taken.token_ids[0] == request.drafts[0])
        if request.outcome is not None or self._kind == "none":
            return
        num_before = len(request.drafts)
        request.drafts = _useful(request, self._proposed(taken))
        if len(request.drafts) != num_before:
            self._control.set_num_draft_tokens(request, len(request.drafts))

    def _proposed(self, taken: TakenTokens) -> IdRow:
        drafter = taken.request.drafter
        if drafter is not None:
            drafter.append(taken.token_ids)
            return drafter.propose()
        if taken.guess < 0 or _has_penalties(taken.request.row):
            return NO_DRAFTS
        return np.array([taken.guess], dtype=np.int32)

    def known_behind(
        self, plan: Plan, requests: Sequence[Request], granted: Sequence[IdRow] | None
    ) -> list[int] | None:
        """For a model that drafts: the token known behind each row of a step, -1 where it is
        sampled there. A row with drafts is one row a token, each sampled."""
        if self._kind != "mtp":
            return None
        known: list[int] = []
        ends = (plan.row_starts + plan.row_lens).tolist()
        for row, request in enumerate(requests):
            num = 1 if granted is None else 1 + len(granted[row])
            is_known = not plan.row_samples[row]
            known += [request.token_at(ends[row]) if is_known else -1] * num
        return known

    def grant(self, plan: Plan, requests: Sequence[Request]) -> list[IdRow] | None:
        """The drafts of each row of a plan; None where no row was planned with any."""
        wants = _rows_with_drafts(plan)
        if not len(wants):
            return None
        granted = [NO_DRAFTS] * len(requests)
        num_planned = int((plan.row_lens[wants] - 1).sum())
        room = TOKENS_WITH_DRAFTS - (len(plan.input_ids) - num_planned)
        for num_done, row in enumerate(wants.tolist()):
            share = -(-max(room, 0) // (len(wants) - num_done))
            drafts = requests[row].drafts[: min(int(plan.row_lens[row]) - 1, share)]
            granted[row] = drafts
            room -= len(drafts)
        return granted


def _has_penalties(row: RowSampling | None) -> bool:
    return row is None or row.penalties is not None


def _rows_with_drafts(plan: Plan) -> NDArray[np.intp]:
    """Rows whose tokens behind the first are not known to the scheduler."""
    longer = np.flatnonzero(plan.row_lens > 1)
    if not len(longer):
        return longer
    ends = plan.row_lens.cumsum()
    guesses: NDArray[np.intp] = longer[plan.input_ids[ends[longer] - 1] < 0]
    return guesses


def _useful(request: Request, drafts: IdRow) -> IdRow:
    """Without what the request could not go on behind, or its grammar does not allow."""
    for place, token_id in enumerate(drafts.tolist()):
        if token_id in request.stop_ids:
            drafts = drafts[:place]
            break
    if request.matcher is not None and len(drafts):
        drafts = drafts[: request.matcher.num_allowed(drafts.tolist())]
    return drafts
