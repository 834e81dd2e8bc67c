# SPDX-License-Identifier: Apache-2.0
"""Folds the tokens that a sequence has in one decode step into rows of several query tokens.

A sequence with drafts comes as rows of one token each (batch_builder.py), and each row reads the
sequence's KV again. Attention alone takes them together: rows of `q_len` queries, filled up in
front with queries that are no token's, so that rows of fewer tokens share a graph. All else, and
every write of KV, keeps to the tokens there are. Does not know: devices, attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.batch import ForwardBatch
from engine.models.model import FoldedRows
from kernels.ops.mla_decode_form import FoldForm

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """Runs of rows of one token each that follow one another in one sequence."""

    lens: Ints  # [N] tokens of each
    ends: Ints  # [N] tokens of KV behind its last
    slots: Ints  # [N]


def chains_of(batch: ForwardBatch) -> Chains:
    """Of a step whose rows have one token each."""
    slots = batch.row_slots.numpy().astype(np.int64)
    ends = batch.seq_lens.numpy().astype(np.int64)
    goes_on = (slots[1:] == slots[:-1]) & (ends[1:] == ends[:-1] + 1)
    last = np.append(np.flatnonzero(~goes_on), len(slots) - 1)
    return Chains(lens=np.diff(last, prepend=-1), ends=ends[last], slots=slots[last])


def usable_forms(
    forms: Sequence[FoldForm], num_tokens: int, longest_chain: int
) -> tuple[FoldForm, ...]:
    """Those that a step of so many tokens may gain by: otherwise a shorter one holds all of its
    chains, or costs no more for any."""
    most = min(num_tokens, longest_chain)
    kept = [FoldForm(1, 1.0)]
    for form in forms:
        if most > kept[-1].q_len and not any(_costs_no_more(each, form) for each in kept):
            kept.append(form)
    return tuple(kept[1:])


def _costs_no_more(shorter: FoldForm, form: FoldForm) -> bool:
    """Whether the shorter one costs no more whatever the chains: of many heads each token fills
    tiles of its own, and folding more of them spares nothing."""
    num = form.q_len // shorter.q_len  # of its passes do for one of the form's
    divides = shorter.q_len * num == form.q_len
    return divides and num * shorter.cost <= form.cost and shorter.fixed <= form.fixed


def choose_q_len(chains: Chains, forms: Sequence[FoldForm]) -> int:
    """The one that costs least, passes over keys and values most of all; 1: rows as they are."""
    best, least = 1, float(chains.lens @ chains.ends)
    for form in forms:
        passes = -(-chains.lens // form.q_len)
        cost = form.cost * float(passes @ chains.ends) + form.fixed
        if cost < least:
            best, least = form.q_len, cost
    return best


def fill_folded(chains: Chains, q_len: int, sentinel_slot: int, out: NDArray[Any]) -> int:
    """Write the columns of a step's folded rows; return how many rows hold tokens.

    Behind them come rows without KV, one at least for each padding token, which takes its last
    query.

    Args:
        out: [3, size]: the place of each token among the queries [size * q_len]; then of each row
            its slot and its tokens of KV. `size` is at least the number of tokens.
    """
    lens = chains.lens
    num_tokens, size = int(lens.sum()), out.shape[1]
    passes = -(-lens // q_len)
    num_rows = int(passes.sum())
    behind = passes.cumsum()  # rows up to each chain's last
    places, slots, seq_lens = out
    # The last token of a chain is the last query of its last row, those before it stand in front.
    to_end = np.repeat(lens.cumsum(), lens) - np.arange(num_tokens)
    places[:num_tokens] = np.repeat(behind * q_len, lens) - to_end
    num_padding = size - num_tokens
    places[num_tokens:] = (num_rows + np.arange(num_padding) + 1) * q_len - 1
    slots[:num_rows] = np.repeat(chains.slots, passes)
    slots[num_rows:] = sentinel_slot
    rows_to_end = np.repeat(behind, passes) - np.arange(num_rows) - 1
    seq_lens[:num_rows] = np.repeat(chains.ends, passes) - rows_to_end * q_len
    seq_lens[num_rows:] = 0
    return num_rows


def folded_rows(batch: ForwardBatch, forms: Sequence[FoldForm]) -> FoldedRows | None:
    """The rows of a step on the CPU, without padding; None where it is best as it is."""
    if not forms or batch.row_slots.shape[0] < 2:
        return None
    chains = chains_of(batch)
    q_len = choose_q_len(chains, forms)
    if q_len == 1:
        return None
    columns = np.zeros((3, batch.row_slots.shape[0]), dtype=np.int64)
    num_rows = fill_folded(chains, q_len, 0, columns)
    places, slots, seq_lens = torch.from_numpy(columns).int()
    return FoldedRows(
        q_len=q_len, places=places, row_slots=slots[:num_rows], seq_lens=seq_lens[:num_rows]
    )
