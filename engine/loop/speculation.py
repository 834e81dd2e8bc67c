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
from engine.loop.control_plane import ControlPlane
from engine.loop.counters import Counters
from engine.loop.requests import Request
from engine.spec_decode.ngram import NO_DRAFTS, IdRow, NgramDrafter


class Speculation:
    """Owns the drafts of all requests. One thread."""

    def __init__(self, config: EngineConfig, control: ControlPlane, counters: Counters) -> None:
        self._is_on = config.speculation != "none"
        self._max_drafts = config.max_draft_tokens
        self._control = control
        self._counters = counters

    def begin(self, request: Request) -> None:
        """A request was admitted. Penalties change with each token, so such a request has none."""
        row = request.row
        if not self._is_on or request.drafter is not None or row is None or row.penalties:
            return
        known = np.concatenate([request.prompt_ids, request.output_ids()])
        request.drafter = NgramDrafter(known, self._max_drafts)

    def note(self, request: Request, drafts: Sequence[int], token_ids: list[int]) -> None:
        """A step gave a request these tokens, which had these drafts; find its next ones."""
        drafter = request.drafter
        if drafter is None:
            return
        if drafts:
            num_accepted = len(token_ids) - 1
            drafter.note(len(drafts), num_accepted)
            self._counters.note_drafts(len(drafts), num_accepted)
        if request.outcome is not None:
            return
        drafter.append(token_ids)
        num_before = len(request.drafts)
        request.drafts = _useful(request, drafter.propose())
        if len(request.drafts) != num_before:
            self._control.set_num_draft_tokens(request, len(request.drafts))

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
