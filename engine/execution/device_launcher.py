# SPDX-License-Identifier: Apache-2.0
"""Runs steps on a device without waiting for it: uploads, forward, sample, one download.

A step of decode rows alone is two captured graphs, one of its padded size each: forward, then
sample, so that a grammar's mask may arrive in between. A step with prefill rows runs the same
model eagerly, or in captured pieces (prefill_pieces.py); decode rows beside a short prefill keep to
their graph (rows_apart.py). Sampled ids stay on the device; the host waits for an event, elsewhere.

Safety of the graphs: padding rows use a slot and a page of their own (the sentinels) and have no
KV; the tail of every buffer is rewritten each step; ids are clamped to the vocabulary on the
device. `eager` runs the very same functions without capture.

Does not know: the scheduler, requests, grammars beyond a bitmask. One worker thread calls `launch`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.batch import ForwardBatch
from engine.execution.decode_inputs import DecodeInputs
from engine.execution.device_clock import DeviceStream
from engine.execution.device_drafts import DeviceDrafts
from engine.execution.device_logprobs import LogprobsLater
from engine.execution.device_sampler import (
    NUM_PARAMS,
    SLOT,
    TOP_P,
    EditTables,
    SlotMasks,
    fill_params,
    has_edits,
    is_greedy,
    sample_edited_rows,
    sample_rows,
    sample_slots,
)
from engine.execution.graphs import GraphSet
from engine.execution.host_ring import HostRing
from engine.execution.prefill_pieces import PrefillPieces
from engine.execution.row_order import RowOrder
from engine.execution.rows_apart import are_better_apart, part_rows, places_apart
from engine.execution.steps import Step, StepResult
from engine.models.model import (
    DraftingModel,
    FoldingModel,
    PagedModel,
    PiecewiseModel,
    StepRows,
)
from engine.sampling.params import SampleBatch, Sampled
from kernels.ops.page_copy import copy_pages
from kernels.ops.step_ids import feed_ids

logger = logging.getLogger(__name__)

Places = NDArray[np.int64]  # of the sampled rows' logits in the logits buffer
Later = Callable[[], Sampled | None]

# Prefill kernels differ by how many tokens an expert gets, by whether few of them attend in
# absorbed form, and by whether there is a prefix and it is split; Triton compiles each once more
# for sizes that 16 divides. What is left out compiles in somebody's first token, for seconds
# (tests/kernels/test_compiled_forms.py).
WARM_UP_TOKENS = (24, 64, 160, 304, 1024)
WARM_UP_PAST = (0, 4096, 65536)
# Decode rows beside a prefill: their kernels differ for one row, for numbers that 16 divides, and
# by how many parts the keys and values of a row are cut into.
WARM_UP_ROWS = (2, 12, 16, 24, 32, 48, 50)
# Rows that attend in absorbed form, in as few and as many kernel rows as there are; 64 tokens
# behind a prefix are one of some.
WARM_UP_SHORT = ((24, 4096), (128, 4096))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """Sizes that do not change. `sentinel_page` is a page of the pool nobody is given."""

    max_slots: int
    max_rows: int  # of one step: slots, or tokens with drafts
    max_tokens: int  # of one step, a lone prompt's too
    page_size: int
    table_width: int
    sentinel_page: int
    eager: bool
    warms_prefill: bool = True  # with long prefixes, which kernels of fixed order take long for
    prefill_graphs: bool = False  # a step with prefill in pieces, if the model can
    # Of a step with drafts, and of one sequence in it; 0 and 1: there are none.
    drafted_tokens: int = 0
    longest_chain: int = 1


def warm_up_steps(max_tokens: int, longest: int, max_slots: int) -> Iterator[tuple[int, int, int]]:
    """Steps of one prefill row that together need every form of a kernel: (its tokens, those
    cached before them, decode rows beside it)."""
    most = min(max_tokens - 1, longest)
    sizes = [size for size in sorted({min(size, most) for size in WARM_UP_TOKENS}) if size >= 2]
    for num in sizes:
        for past in sorted({min(past, longest - num) for past in WARM_UP_PAST}):
            yield from ((num, past, 0), (num, past, 1), (num - 1, past, 1))
    for num in sizes[:1]:
        fitting = (rows for rows in WARM_UP_ROWS if rows < max_slots and num + rows <= max_tokens)
        yield from ((num, 0, rows) for rows in fitting)
    for num, past in WARM_UP_SHORT:
        if num <= most and num + past <= longest:
            yield num, past, 0
    # The largest: what memory it takes is asked for at the start, not in somebody's first token;
    # and where it is too large for pieces, it needs the kernels that those have captured.
    yield min(max_tokens, longest), 0, 0


def buckets_up_to(max_rows: int) -> list[int]:
    """Padded sizes: powers of two, and the largest step itself."""
    sizes = [1 << power for power in range(max_rows.bit_length()) if 1 << power < max_rows]
    return [*sizes, max_rows]


class DeviceLauncher:
    """Owns everything on the device that steps share, besides weights and the pool."""

    is_async = True

    def __init__(self, model: PagedModel, kv_pool: torch.Tensor, limits: DeviceLimits) -> None:
        self._model = model
        self._kv_pool = kv_pool
        self._limits = limits
        device = kv_pool.device
        slots, vocab = limits.max_slots + 1, model.vocab_size
        # Behind the sentinel: a mask of its own for each sample behind a draft.
        sample_slots = slots + limits.max_rows

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._sentinel = limits.max_slots
        self._page_table = ints(slots, limits.table_width) + limits.sentinel_page
        self._owed_deltas: deque[NDArray[np.int32]] = deque()
        self._next_ids = ints(sample_slots)
        self._masks = ints(sample_slots, -(-vocab // 32)) - 1
        # Behind the rows of decode graphs: those of prefill rows that a step computes apart.
        self._logits = torch.zeros(limits.max_rows + limits.max_slots, vocab, device=device)
        self._buckets = buckets_up_to(limits.max_rows)
        forms = model.fold_forms(kv_pool) if isinstance(model, FoldingModel) else ()
        self.decode_inputs = DecodeInputs(
            self._buckets,
            self._page_table,
            page_size=limits.page_size,
            sentinel_slot=self._sentinel,
            sentinel_page=limits.sentinel_page,
            forms=forms,
            drafted_tokens=limits.drafted_tokens,
            longest_chain=limits.longest_chain,
        )
        group = model.rows_of_group(kv_pool) if isinstance(model, FoldingModel) else 1
        # A model that drafts goes on from its rows' results where they lie.
        self._row_order: RowOrder | None = None
        if group > 1 and not (isinstance(model, DraftingModel) and model.can_draft):
            self._row_order = RowOrder(slots, limits.table_width, limits.page_size, group)
        self._decoded = (1, 1)  # size and q_len of the decode step under way
        self._params = {
            size: torch.zeros(NUM_PARAMS, size, dtype=torch.float64, device=device)
            for size in self._buckets
        }
        self._token_ids = {size: ints(size) for size in self._buckets}
        self._counting = torch.arange(limits.max_rows, dtype=torch.int32, device=device)
        self._slot_masks = SlotMasks(sample_slots, vocab)
        self._ring = HostRing(
            device,
            limits.max_tokens + 4 * limits.table_width,
            limits.max_rows,
            -(-vocab // 32),
            NUM_PARAMS,
        )
        self._edits: EditTables | None = None
        drafter = model if isinstance(model, DraftingModel) and model.can_draft else None
        self._mixed_rows: tuple[StepRows, torch.Tensor] | None = None  # of the step under way
        self._lost: tuple[int, str | None] = (0, None)  # first rows of it without memory, and why
        self._drafting = None if drafter is None else DeviceDrafts(drafter, self._buckets)
        self._stream = DeviceStream(device)
        self._graphs = GraphSet(None if limits.eager else self._stream.cuda_stream)
        self._longest = (limits.table_width - 1) * limits.page_size
        self._pieces: PrefillPieces | None = None
        if limits.prefill_graphs and isinstance(model, PiecewiseModel):
            most = min(limits.max_tokens, self._longest)
            self._pieces = PrefillPieces(model, most, self._graphs)

    def warm_up(self) -> None:
        """Compile every kernel, and capture every graph; only sentinels are touched."""
        with torch.no_grad(), self._stream.enter():
            for size in reversed(self._buckets):
                self._reset_params(size)
                for q_len in self.decode_inputs.q_lens(size):
                    self.decode_inputs.reset(size, q_len)
                    args = (size, q_len)
                    self._graphs.add(("forward", *args), partial(self._decode, *args))
                    if self._drafting is not None:
                        self._graphs.add(("draft", *args), partial(self._draft, *args))
                for draws in (False, True):
                    self._graphs.add(("sample", size, draws), partial(self._sample, size, draws))
                self._sample_edited(size)
            if self._pieces is not None:
                for size in reversed(self._pieces.sizes):
                    with self._pieces.capturing(size):
                        num = min(size, self._limits.max_tokens, self._longest)
                        self._warm_up_step(num, 0, num_decodes=0)
            if self._limits.warms_prefill:
                self._warm_up_prefill()
        self._stream.synchronise()

    @property
    def next_input_ids(self) -> torch.Tensor:
        """int32 [max_slots + 1], on the device: last sampled ids by slot; view."""
        return self._next_ids[: self._sentinel + 1]

    def forward_now(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, V] of one step on the host; the batch's table replaces the device's."""
        with self._stream.enter():
            self._ring.advance()
            table = batch.page_table[: self._limits.max_slots].to(self._page_table.device)
            self._page_table[: table.shape[0], : table.shape[1]] = table
            if self._row_order is not None:
                self._row_order.hold(batch.page_table[: self._limits.max_slots])
            if batch.page_copies.shape[0]:
                copy_pages(self._kv_pool, batch.page_copies)
            places = torch.from_numpy(self._forward(batch)).to(self._logits.device)
            logits = self._logits[places]
        self._stream.synchronise()
        return logits.cpu()

    def launch(self, step: Step) -> Callable[[], StepResult]:
        """Start the step. Raises what the model refuses, with nothing of the step under way.

        Who hears of a failed step gives its pages to transfers, which do not wait for the stream.
        """
        try:
            return self._launch(step)
        except Exception:
            self._stream.synchronise()
            raise

    def _launch(self, step: Step) -> Callable[[], StepResult]:
        with self._stream.enter():
            self._ring.advance()
            clock = self._stream.clock()
            self._update_tables(step)
            logit_rows = self._forward(step.forward)
            clock.mark()
            before_s = time.perf_counter()
            if step.sampling.rows:
                step.sampling.mask_ready.wait()
            waited_ms = (time.perf_counter() - before_s) * 1e3
            sampled_later = self._sample_later(step.sampling, logit_rows)
            drafts_later = self._draft_later(step)
            clock.mark()
        num_lost, lost_error = self._lost

        def finish() -> StepResult:
            clock.wait()
            return StepResult(
                step_id=step.forward.step_id,
                sampled=_with_drafts(sampled_later(), drafts_later()),
                forward_ms=clock.ms_before(1),
                mask_wait_ms=waited_ms,
                sample_ms=clock.ms_before(2),
                num_lost=num_lost,
                lost_error=lost_error,
            )

        return finish

    def _update_tables(self, step: Step) -> None:
        # They are told once, of requests without a row in this step too: what a step that fails
        # here (memory is short) did not write is due with the next one, in order.
        if len(step.page_deltas):
            self._owed_deltas.append(step.page_deltas)
        while self._owed_deltas:
            deltas = self._owed_deltas[0]
            slot, index, page = self._ring.upload(deltas.T.astype(np.int64))
            self._page_table[slot, index] = page.int()
            if self._row_order is not None:
                self._row_order.note(deltas)
            self._owed_deltas.popleft()
        if step.forward.page_copies.shape[0]:
            copy_pages(self._kv_pool, step.forward.page_copies)

    def _forward(self, batch: ForwardBatch) -> Places:
        """Compute logits of the sampled rows; where each lies in the logits buffer."""
        lens = batch.row_indptr.diff()
        is_longer = lens != 1
        self._mixed_rows, self._lost = None, (0, None)
        if not bool(is_longer.any()):
            for load in batch.loads:  # a graph waits for nothing inside
                load.wait_all()
            return self._decode_batch(batch).numpy().astype(np.int64)
        num_prefill = int(is_longer.nonzero()[-1]) + 1
        try:
            return self._forward_mixed(batch, num_prefill)
        except torch.OutOfMemoryError as error:
            if num_prefill == lens.shape[0]:
                raise
            self._lost = (num_prefill, f"{type(error).__name__}: {error}")
        # Here the error's frames are gone, and what they held.
        logger.error("step %d goes on without its prefill rows: %s", batch.step_id, self._lost[1])
        return self._decode_alone(batch, num_prefill)

    def _decode_alone(self, batch: ForwardBatch, num_prefill: int) -> Places:
        """The rows of one token of a step whose prefill rows are lost; they may have begun."""
        self._mixed_rows = None  # with the lost step's tensors
        for load in batch.loads:
            load.wait_all()
        decoded = self._decode_batch(part_rows(batch, num_prefill)[1])
        return places_apart(batch.sample_rows, num_prefill, self._limits.max_rows, decoded)

    def _forward_mixed(self, batch: ForwardBatch, num_prefill: int) -> Places:
        # In eager runs too, though apart is twice the launches there: they give a graph's bits.
        if self._drafting is None and are_better_apart(batch, num_prefill):
            prefill, decode = part_rows(batch, num_prefill)
            decoded = self._decode_batch(decode)
            logits, first = self._mixed(prefill, num_prefill), self._limits.max_rows
            self._logits[first : first + logits.shape[0]] = logits
            return places_apart(batch.sample_rows, num_prefill, first, decoded)
        logits = self._mixed(batch, num_prefill)
        self._logits[: logits.shape[0]] = logits
        return np.arange(logits.shape[0])

    def _decode_batch(self, batch: ForwardBatch) -> torch.Tensor:
        """Rows of one token; int32 [S], where logits of the sampled ones come to lie: at i those of
        row i, in the order that suits the rows."""
        if self._row_order is not None:
            batch = self._row_order.apply(batch)
        num_rows = batch.row_slots.shape[0]
        size = self._bucket(num_rows)
        q_len = self.decode_inputs.fill(batch, size, self._ring)
        self._decoded = (size, q_len)
        self._graphs.run(("forward", size, q_len), partial(self._decode, size, q_len))
        return batch.sample_rows

    def _reset_params(self, size: int) -> None:
        """Samples of padding alone."""
        self._params[size].zero_()
        self._params[size][SLOT] = self._sentinel
        self._params[size][TOP_P] = 1.0

    def _decode(self, size: int, q_len: int) -> None:
        """The captured forward: `size` rows of one token, from the bucket's own buffer."""
        inputs = self.decode_inputs
        ids = self._resolve(inputs.ids(size), inputs.slots(size))
        sampled = self._counting[:size]
        rows = inputs.rows(size, q_len)
        self._logits[:size] = self._model.forward(ids, rows, self._kv_pool, sampled)
        if self._drafting is not None:
            self._drafting.keep_hidden(size)

    def _mixed(self, batch: ForwardBatch, num_prefill: int) -> torch.Tensor:
        """A step with prefill rows: the same model, sizes as they come."""
        parts = (
            batch.input_ids,
            batch.positions,
            batch.slot_mapping,
            batch.row_indptr,
            batch.row_slots,
            batch.seq_lens,
            batch.sample_rows,
            batch.row_slots.repeat_interleave(batch.row_indptr.diff()),
        )
        packed = self._ring.upload_ints(torch.cat(parts))
        ids, positions, mapping, indptr, slots, lens, sampled, token_slots = (
            packed.split_with_sizes([part.shape[0] for part in parts])
        )
        rows = StepRows(
            positions=positions,
            slot_mapping=mapping,
            row_indptr=indptr,
            row_slots=slots,
            seq_lens=lens,
            page_table=self._page_table,
            page_size=self._limits.page_size,
            num_prefill_rows=num_prefill,
            num_prefill_tokens=int(batch.row_indptr[num_prefill]),
            prefill_on_host=(
                batch.row_slots[:num_prefill],
                batch.row_indptr[: num_prefill + 1],
                batch.seq_lens[:num_prefill],
            ),
            loads=batch.loads,
        )
        self._mixed_rows = (rows, sampled)
        ids = self._resolve(ids, token_slots)
        size = None if self._pieces is None else self._pieces.size_for(ids.shape[0])
        if self._pieces is None or size is None:
            return self._model.forward(ids, rows, self._kv_pool, sampled)
        return self._pieces.forward(ids, rows, self._kv_pool, sampled, size)

    def _resolve(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """-1 becomes the id last sampled in the slot; no id leaves the vocabulary."""
        return feed_ids(ids, slots, self._next_ids, self._model.vocab_size)

    def _sample_later(self, batch: SampleBatch, logit_rows: Places) -> Later:
        """Start sampling; what gives the tokens when they are there. Requires: the masks are."""
        rows = list(batch.rows)
        if not rows:
            return lambda: None
        size, num = self._bucket(len(rows)), len(rows)
        places = sample_slots(batch, self._sentinel)
        slots, masks = self._slot_masks.changed(batch, places)
        if len(slots):
            self._masks[self._ring.upload(slots)] = self._ring.upload_masks(masks)
        params = self._ring.params(size)
        fill_params(params.numpy(), batch, places, logit_rows, self._sentinel)
        self._params[size].copy_(params, non_blocking=True)
        if self._edits is not None or any(has_edits(row) for row in rows):
            self._hold_edits(batch, places)
        if any(has_edits(row) for row in rows):
            self._sample_edited(size)
        else:
            draws = not is_greedy(rows)
            self._graphs.run(("sample", size, draws), partial(self._sample, size, draws))
        held = self._ring.token_ids(size)
        held.copy_(self._token_ids[size], non_blocking=True)
        logprobs = LogprobsLater(self._logits, rows, logit_rows, self._token_ids[size])

        def finish() -> Sampled:
            token_ids = held[:num].numpy().copy()
            return Sampled(token_ids=token_ids, logprobs=logprobs.gather(token_ids.tolist()))

        return finish

    def _sample(self, size: int, draws: bool) -> None:
        """The captured sampler."""
        sample_rows(
            self._logits,
            self._params[size],
            self._masks,
            self._next_ids,
            self._token_ids[size],
            draws=draws,
        )

    def _draft(self, size: int, q_len: int) -> None:
        """The captured drafting of a decode step: each row's sampled token is what follows it."""
        assert self._drafting is not None
        next_ids = self._token_ids[size].clamp_min(0)
        rows = self.decode_inputs.rows(size, q_len)
        self._drafting.run_decode(size, next_ids, rows, self._kv_pool, self._counting[:size])

    def _draft_later(self, step: Step) -> Callable[[], NDArray[np.int32] | None]:
        """Let the model guess behind what was sampled; also where nothing was, for its KV."""
        drafting, num = self._drafting, len(step.sampling.rows)
        if drafting is None:
            return lambda: None
        size = self._bucket(max(num, 1))
        num_lost, _ = self._lost
        if num_lost > 0:
            decode = part_rows(step.forward, num_lost)[1]
            return self._draft_among_others(drafting, decode, num)
        if self._mixed_rows is None and num == step.forward.row_slots.shape[0]:
            key = ("draft", *self._decoded)
            self._graphs.run(key, partial(self._draft, *self._decoded))
        elif self._mixed_rows is None:
            return self._draft_among_others(drafting, step.forward, num)
        else:
            assert step.forward.next_ids is not None, "a model that drafts is told what follows"
            rows, sampled = self._mixed_rows
            next_ids = self._ring.upload_ints(step.forward.next_ids)
            last = rows.row_indptr[sampled.long() + 1].long() - 1
            next_ids[last] = self._token_ids[size][:num].clamp_min(0)
            drafting.run_mixed(size, next_ids, rows, self._kv_pool, sampled)
        held = self._ring.draft_ids(size)
        held.copy_(drafting.draft_ids[size], non_blocking=True)
        return lambda: held[:num].numpy().copy()

    def _draft_among_others(
        self, drafting: DeviceDrafts, batch: ForwardBatch, num: int
    ) -> Callable[[], NDArray[np.int32] | None]:
        """After a step of rows of one token, of which some end a chunk and are not sampled, or of
        whose `num` samples the first are of lost rows: the forward's rows are drafted for."""
        first = num - batch.sample_rows.shape[0]
        assert batch.next_ids is not None, "a model that drafts is told what follows"
        num_rows = batch.row_slots.shape[0]
        (size, q_len), num_sampled = self._decoded, self._bucket(max(num, 1))
        next_ids = torch.zeros_like(self._token_ids[size])
        next_ids[:num_rows] = self._ring.upload_ints(batch.next_ids)
        places = self._ring.upload_ints(batch.sample_rows).long()
        next_ids[places] = self._token_ids[num_sampled][first:num]
        rows, every = self.decode_inputs.rows(size, q_len), self._counting[:size]
        drafting.run_decode(size, next_ids.clamp_min(0), rows, self._kv_pool, every)
        held = self._ring.draft_ids(max(num, 1))[:num]
        held[:first] = -1
        held[first:].copy_(drafting.draft_ids[size][places], non_blocking=True)
        return lambda: held.numpy().copy()

    def _sample_edited(self, size: int) -> None:
        """With penalties or a bias: a request in many, so not captured."""
        sample_edited_rows(
            self._logits,
            self._params[size],
            self._masks,
            self._edit_tables(),
            self._next_ids,
            self._token_ids[size],
        )

    def _edit_tables(self) -> EditTables:
        """8 bytes a slot and token of the vocabulary, once somebody needs them."""
        if self._edits is None:
            num_slots, vocab = self._masks.shape[0], self._model.vocab_size
            self._edits = EditTables(num_slots, vocab, self._logits.device)
        return self._edits

    def _hold_edits(self, batch: SampleBatch, slots: Places) -> None:
        tables = self._edit_tables()
        for slot, row in tables.stale(batch, slots):
            ids, counts = (np.empty(0, dtype=np.int64),) * 2
            if row.penalties is not None:
                ids, counts = row.penalties.state()
            sent = self._ring.upload(np.stack([ids, 2 * counts + 1]))
            bias = torch.from_numpy(row.bias).to(self._logits.device)
            tables.hold(slot, row, sent[0], sent[1].int(), self._ring.upload(row.bias_ids), bias)

    def _warm_up_prefill(self) -> None:
        """Steps with a prefill row on the sentinels, of each kind for which kernels differ."""
        limits = self._limits
        for num, past, num_decodes in warm_up_steps(
            limits.max_tokens, self._longest, limits.max_slots
        ):
            self._warm_up_step(num, past, num_decodes=num_decodes)

    def _warm_up_step(self, num: int, past: int, *, num_decodes: int) -> None:
        """A prefill row of `num` tokens behind `past`, and so many decode rows."""
        first = self._limits.sentinel_page * self._limits.page_size
        where = torch.arange(num, dtype=torch.int32)
        places = first + where % self._limits.page_size
        decodes = torch.zeros(num_decodes, dtype=torch.int32)
        rows = 1 + num_decodes
        self._mixed(
            ForwardBatch(
                step_id=-1,
                input_ids=torch.zeros(num + num_decodes, dtype=torch.int32),
                positions=torch.cat((past + where, decodes)),
                slot_mapping=torch.cat((places, first + decodes)),
                row_indptr=torch.tensor([0, *range(num, num + rows)], dtype=torch.int32),
                row_slots=torch.full((rows,), self._sentinel, dtype=torch.int32),
                seq_lens=torch.cat((torch.tensor([past + num], dtype=torch.int32), 1 + decodes)),
                sample_rows=torch.arange(rows, dtype=torch.int32),
                page_table=torch.empty(0),
                page_copies=torch.empty(0, 3),
            ),
            1,
        )

    def _bucket(self, num_rows: int) -> int:
        return next(size for size in self._buckets if size >= num_rows)


def _with_drafts(sampled: Sampled | None, drafts: NDArray[np.int32] | None) -> Sampled | None:
    return sampled if sampled is None or drafts is None else replace(sampled, drafts=drafts)
