# SPDX-License-Identifier: Apache-2.0
"""Drives a ModelRunner by hand: page tables, chunks and greedy steps, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from engine.execution.batch import ForwardBatch, ModelRunner

_STEP_IDS = count()


@dataclass
class Row:
    """One row's state: its slot, its pages in order, and how many tokens have KV."""

    slot: int
    pages: list[int]
    num_done: int = 0
    token_ids: list[int] = field(default_factory=list)


class PagedDriver:
    """Owns the page tables of a runner."""

    def __init__(self, runner: ModelRunner, seed: int | None = None) -> None:
        self.runner = runner
        order = torch.arange(runner.num_pages)
        if seed is not None:
            order = torch.randperm(runner.num_pages, generator=torch.Generator().manual_seed(seed))
        self.free_pages: list[int] = order.tolist()[::-1]
        num_slots = runner.next_input_ids.shape[0]
        width = -(-runner.max_context_len // runner.page_size) + 1
        self.page_table = torch.zeros(num_slots, width, dtype=torch.int32)

    def open(self, slot: int, shared: Row | None = None, shared_pages: int = 0) -> Row:
        """A row in a slot; with the first full pages of another row, or none."""
        pages = shared.pages[:shared_pages] if shared else []
        row = Row(slot=slot, pages=list(pages), num_done=shared_pages * self.runner.page_size)
        if shared:
            row.token_ids = shared.token_ids[: row.num_done]
        self._map(row)
        return row

    def step(
        self,
        new_tokens: Sequence[tuple[Row, Sequence[int]]],
        *,
        from_device: bool = False,
        copies: Sequence[tuple[int, int, int]] = (),
        sample: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run these tokens of these rows; logits [S, vocab] of the sampled rows (all by default).
        A row that comes again goes on behind itself, as drafts do.

        from_device: pass -1 and let the runner take the ids from next_input_ids.
        """
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        ends: list[int] = []
        indptr = [0]
        for row, tokens in new_tokens:
            row.token_ids += tokens
            self._grow(row, len(row.token_ids))
            where = range(row.num_done, len(row.token_ids))
            positions += where
            size = self.runner.page_size
            slots += [row.pages[p // size] * size + p % size for p in where]
            if from_device:
                self.runner.next_input_ids[row.slot] = tokens[-1]
                ids += [-1] * len(tokens)
            else:
                ids += tokens
            indptr.append(len(ids))
            row.num_done = len(row.token_ids)
            ends.append(row.num_done)
        rows = [row for row, _ in new_tokens]
        batch = ForwardBatch(
            step_id=next(_STEP_IDS),
            input_ids=_int32(ids),
            positions=_int32(positions),
            slot_mapping=_int32(slots),
            row_indptr=_int32(indptr),
            row_slots=_int32([row.slot for row in rows]),
            seq_lens=_int32(ends),
            sample_rows=_int32(list(range(len(rows))) if sample is None else list(sample)),
            page_table=self.page_table,
            page_copies=_int32(list(copies)).reshape(-1, 3),
        )
        return self.runner.forward(batch)

    def rewind(self, row: Row, num_tokens: int) -> None:
        """Forget the row's last tokens; their KV and their pages stay."""
        row.num_done -= num_tokens
        del row.token_ids[row.num_done :]

    def prefill(self, row: Row, tokens: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """All tokens, in chunks; logits [vocab] behind the last one."""
        size = chunk or len(tokens)
        logits = torch.empty(0)
        for start in range(0, len(tokens), size):
            logits = self.step([(row, list(tokens[start : start + size]))])
        return logits[0]

    def greedy(self, row: Row, logits: torch.Tensor, num_steps: int) -> list[int]:
        """The next ids by argmax, the first from `logits`."""
        ids = [int(logits.argmax())]
        while len(ids) < num_steps:
            ids.append(int(self.step([(row, ids[-1:])], from_device=True)[0].argmax()))
        return ids

    def _grow(self, row: Row, num_tokens: int) -> None:
        while len(row.pages) * self.runner.page_size < num_tokens:
            row.pages.append(self.free_pages.pop())
        self._map(row)

    def _map(self, row: Row) -> None:
        self.page_table[row.slot] = 0
        self.page_table[row.slot, : len(row.pages)] = _int32(row.pages)


def _int32(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
