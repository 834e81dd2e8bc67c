# SPDX-License-Identifier: Apache-2.0
"""The loop's side of `_scheduler`: its values become wire messages, cache changes are published.

Does not know: steps' tensors, grammars, peers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from _scheduler import (
    Abort,
    Ended,
    Plan,
    ProbeDone,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
    StepDone,
    TransferAck,
)
from engine import api
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.execution.batch import ModelRunner
from engine.loop.log_file import Sink
from engine.loop.outbox import Outbox
from engine.loop.replay import RecordingScheduler
from engine.loop.requests import Request
from engine.loop.step_loads import StepLoad
from engine.loop.tier_plane import TierPlane
from engine.loop.tree_view import tree_reply
from engine.transport import unpack_ids

MAX_TOKENS = (1 << 31) - 1
MAX_HOLD_MS = 1 << 40
# The slowest that the scheduler reckons with; a machine that stood still measures more.
MOST_PAGE_US = 1e9
MOST_TOKEN_US = 1e4


def build_scheduler(
    config: EngineConfig,
    runner: ModelRunner,
    *,
    num_l2_pages: int = 0,
    use_l3: bool = False,
    log: Sink | None = None,
) -> Scheduler:
    """A scheduler for the pages and limits of `runner`; it writes its inputs to `log`.

    Raises: ValueError naming the field.
    """
    device = runner.next_input_ids.device.type
    limits = SchedulerConfig(
        page_size=runner.page_size,
        num_pages=runner.num_pages,
        max_slots=config.max_slots,
        max_context_len=runner.max_context_len,
        token_budget=config.tokens_per_step(device),
        lone_token_budget=config.tokens_per_lone_step(device),
        model_fingerprint=runner.model_fingerprint,
        num_l2_pages=num_l2_pages,
        use_l3=use_l3,
        probe_l3=use_l3,
        l3_wait_ms=config.tiers.l3_wait_ms,
        overlap_loads=_overlaps_loads(config, device) and num_l2_pages > 0,
    )
    if log is not None:
        return RecordingScheduler(limits, log)
    return Scheduler(limits)


def _overlaps_loads(config: EngineConfig, device: str) -> bool:
    """Beside a CPU's own step, copies take what the step needs."""
    chosen = config.tiers.overlap_loads
    return chosen == "on" or (chosen == "auto" and device == "cuda")


class ControlPlane:
    """Calls the scheduler. One thread."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox, *, page_size: int = 1) -> None:
        self._scheduler = scheduler
        self._page_size = page_size
        self._outbox = outbox
        self._tiers: TierPlane | None = None

    def attach_tiers(self, tiers: TierPlane) -> None:
        """From now on pages are moved between tiers."""
        self._tiers = tiers

    def name_pages(self, request: Request) -> None:
        """Note what the pages of a request are, while its tokens are at hand."""
        if self._tiers is not None:
            self._tiers.names.extend(request)

    def submit(self, request: Request) -> None:
        """Queue a request with the output of its earlier life. Raises: ValueError.

        Its pages are named when one of them is to move, or at its end: not before its first step.
        """
        token_ids = np.concatenate([request.prompt_ids, request.resumed_ids])
        spec = RequestSpec(
            request_id=request.index,
            token_ids=token_ids.astype(np.int32),
            max_new_tokens=request.params.max_new_tokens - len(request.resumed_ids),
            priority=request.priority,
            tenant=request.tenant,
            salt=request.salt,
        )
        self._scheduler.submit([spec])

    def set_num_draft_tokens(self, request: Request, num_draft_tokens: int) -> None:
        """How many drafts the rows of a running request have from the next plan on."""
        self._scheduler.set_num_draft_tokens(request.index, num_draft_tokens)

    def next_plan(self, now_ms: int) -> Plan:
        """The next step; its views are valid until the next call. Its moves are started."""
        plan = self._scheduler.next_plan(now_ms)
        if self._tiers is not None:
            # What it evicted first: a page that comes back by one of its moves is not meant.
            self._publish_changes()
            self._tiers.take(plan)
        return plan

    def loads_of(self, plan: Plan) -> list[StepLoad | None]:
        """What each row of the newest plan reads as it comes from L2."""
        if self._tiers is None:
            return [None] * len(plan.row_slots)
        return self._tiers.loads_of(plan)

    def take_bad_loads(self) -> list[StepLoad]:
        """Of those, what came to a bad end since the last call: the scheduler knows it by now."""
        return [] if self._tiers is None else self._tiers.take_bad_loads()

    def take_acks(self) -> list[Ended]:
        """Tell the scheduler which moves are over; who left it by that."""
        acks = self._tiers.take_acks() if self._tiers is not None else []
        return self.advance(acks) if acks else []

    def advance(self, events: Sequence[StepDone | Abort | TransferAck | ProbeDone]) -> list[Ended]:
        """Apply results; who left the scheduler by them."""
        ended = self._scheduler.advance(events)
        self._publish_changes()
        return ended

    def tell_costs(self, prefill_us_per_token: float) -> None:
        """Let the scheduler weigh a fetch against computing, by what was measured lately."""
        if self._tiers is not None:
            l2_us, l3_us = self._tiers.measured_costs()
            self._scheduler.set_costs(
                l2_us_per_page=min(l2_us, MOST_PAGE_US),
                l3_us_per_page=min(l3_us, MOST_PAGE_US),
                prefill_us_per_token=min(prefill_us_per_token, MOST_TOKEN_US),
            )

    def wait_for_loads(self, timeout_s: float) -> list[Ended]:
        """Let what steps read come to its end; who left the scheduler by that."""
        if self._tiers is not None:
            self._tiers.transfers.wait_copied(timeout_s)
        return self.take_acks()

    def finish_tiers(
        self, requests: Sequence[Request], timeout_s: float, *, may_plan: bool
    ) -> None:
        """End requests for the scheduler, let their pages go down, and wait for what is moving.

        Args:
            may_plan: False where two steps are still in flight.
        """
        tiers = self._tiers
        if tiers is None:
            return
        self.advance([Abort(request_id=r.index) for r in requests if r.is_submitted])
        tiers.finish(self, timeout_s, may_plan=may_plan)

    def query_prefix(self, message: api.QueryPrefix) -> api.PrefixReply:
        """How much of a prefix each tier holds. Raises: ValueError for broken ids."""
        token_ids = unpack_ids(message.token_ids).astype(np.int32)
        hit = self._scheduler.query_prefix(token_ids, message.salt)
        found = api.CacheHit(
            l1=hit.l1, l2=hit.l2, l3=hit.l3, to_compute=len(token_ids) - hit.l1 - hit.l2 - hit.l3
        )
        return api.PrefixReply(query_id=message.query_id, cache=found)

    def drop_prefix(self, message: api.DropPrefix) -> None:
        """Let go of a prefix. Raises: ValueError for broken ids or a length no prefix has."""
        if not 0 <= message.keep_tokens <= MAX_TOKENS:
            raise RequestError("keep_tokens", message.keep_tokens, f"0 to {MAX_TOKENS}")
        token_ids = unpack_ids(message.token_ids).astype(np.int32)
        self._scheduler.drop_prefix(token_ids, message.keep_tokens, message.salt)
        self._publish_changes()

    def hint_prefix(self, message: api.HintPrefix, now_ms: int) -> api.HintReply:
        """Weigh a prefix for eviction. Raises: ValueError for broken ids or no probability."""
        if not 0.0 <= message.expected_return <= 1.0:
            raise RequestError("expected_return", message.expected_return, "0 to 1")
        holds = {
            name: getattr(message, name) for name in ("hold_l1_ms", "hold_l2_ms", "hold_l3_ms")
        }
        for name, hold_ms in holds.items():
            if not 0 <= hold_ms <= MAX_HOLD_MS:
                raise RequestError(name, hold_ms, f"0 to {MAX_HOLD_MS}")
        l1_until_ms, l2_until_ms, l3_until_ms = (
            now_ms + hold_ms if hold_ms else 0 for hold_ms in holds.values()
        )
        token_ids = unpack_ids(message.token_ids).astype(np.int32)
        num_tokens = self._scheduler.hint_prefix(
            token_ids,
            message.expected_return,
            message.salt,
            l1_until_ms=l1_until_ms,
            l2_until_ms=l2_until_ms,
            l3_until_ms=l3_until_ms,
        )
        return api.HintReply(query_id=message.query_id, num_tokens=num_tokens)

    def tree(self, message: api.QueryTree) -> api.TreeReply:
        """A bounded picture of what is cached, in all tiers."""
        return tree_reply(self._scheduler, message.query_id, message.max_nodes, self._page_size)

    def stats(self) -> dict[str, float]:
        """The scheduler's counters and gauges."""
        return {name: float(value) for name, value in self._scheduler.stats().items()}

    def _publish_changes(self) -> None:
        events = self._scheduler.drain_kv_events()
        if self._tiers is not None and events:
            self._tiers.note_events(events)
        if not events or not self._outbox.wants_kv_events:
            return
        batch = tuple(
            api.KvEvent(
                kind=event.kind,
                tier=event.tier,
                page_hash=event.page_hash,
                parent_hash=event.parent_hash,
                num_tokens=event.num_tokens,
            )
            for event in events
        )
        self._outbox.publish_kv(api.KvEventBatch(events=batch))
