# SPDX-License-Identifier: Apache-2.0
"""What the loop counts for StatsReply: plain totals since the start, times in milliseconds.

Does not know: who asks, how a metric is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.api import CacheHit, FinishReason
from engine.execution.executor import StepResult

SMOOTHING = 0.2


@dataclass(slots=True)
class Counters:
    """Totals. `host_ms` is the loop's own CPU time for steps: planning, building, committing."""

    num_requests: int = 0
    num_refused: int = 0
    num_malformed: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    step_tokens: int = 0
    output_tokens: int = 0
    admitted_tokens: int = 0
    cached_tokens: int = 0
    host_ms: float = 0.0
    forward_ms: float = 0.0
    mask_wait_ms: float = 0.0
    sample_ms: float = 0.0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    # By drafter, then by a draft's place in its row: how many were verified, how many were right.
    drafts_at: dict[str, list[list[int]]] = field(default_factory=dict)
    prefill_us_per_token: float = 0.0  # lately; 0: no prefill yet
    last_us_per_token: float = 0.0  # of the newest step that counted for it
    num_finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )

    def note_plan(self, num_tokens: int, spent_ns: int) -> None:
        """A step was planned and dispatched."""
        self.num_steps += 1
        self.step_tokens += num_tokens
        self.host_ms += spent_ns / 1e6

    def note_admission(self, hit: CacheHit) -> None:
        """A request was admitted."""
        cached = hit.l1 + hit.l2 + hit.l3
        self.cached_tokens += cached
        self.admitted_tokens += cached + hit.to_compute

    def note_drafts(self, drafter: str, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts were verified: those before the first wrong one were right."""
        self.draft_tokens += num_drafts
        self.accepted_draft_tokens += num_accepted
        places = self.drafts_at.setdefault(drafter, [])
        places += ([0, 0] for _ in range(num_drafts - len(places)))
        for place in range(num_drafts):
            places[place][0] += 1
            places[place][1] += place < num_accepted

    def note_commit(
        self, result: StepResult, num_timed: int, num_sampled: int, spent_ns: int
    ) -> None:
        """A step's result was committed. `num_timed`: its tokens, if the time it took says what
        one costs to compute; else 0."""
        if num_timed and result.any_error is None:
            now_us = result.forward_ms * 1e3 / num_timed
            before_us = self.prefill_us_per_token or now_us
            self.prefill_us_per_token = before_us + SMOOTHING * (now_us - before_us)
            self.last_us_per_token = now_us
        self.output_tokens += num_sampled
        self.num_failed_steps += result.any_error is not None
        self.forward_ms += result.forward_ms
        self.mask_wait_ms += result.mask_wait_ms
        self.sample_ms += result.sample_ms
        self.host_ms += spent_ns / 1e6

    def as_dict(self) -> dict[str, float]:
        """By the names StatsReply carries."""
        totals = {
            "requests_received": self.num_requests,
            "requests_refused": self.num_refused,
            "messages_malformed": self.num_malformed,
            "steps": self.num_steps,
            "steps_failed": self.num_failed_steps,
            "step_tokens": self.step_tokens,
            "output_tokens": self.output_tokens,
            "admitted_tokens": self.admitted_tokens,
            "admitted_cached_tokens": self.cached_tokens,
            "host_ms_total": self.host_ms,
            "forward_ms_total": self.forward_ms,
            "mask_wait_ms_total": self.mask_wait_ms,
            "sample_ms_total": self.sample_ms,
            "draft_tokens": self.draft_tokens,
            "draft_tokens_accepted": self.accepted_draft_tokens,
            "prefill_us_per_token": self.prefill_us_per_token,
        }
        for drafter, places in self.drafts_at.items():
            for place, (num, num_accepted) in enumerate(places, 1):
                totals[f"draft_tokens.{drafter}.{place}"] = num
                totals[f"draft_tokens_accepted.{drafter}.{place}"] = num_accepted
        ended = {f"requests_{reason}": num for reason, num in self.num_finished.items()}
        return {name: float(value) for name, value in {**totals, **ended}.items()}
