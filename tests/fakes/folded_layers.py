# SPDX-License-Identifier: Apache-2.0
"""Attention of decode rows with drafts in one layer, folded or a row a token, over the rows that
PrefillLayers makes: past tokens, and those of the step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu.prefill_layer import PAGE, PrefillLayers
from engine.execution.batch import ForwardBatch
from engine.execution.device_launcher import DeviceLauncher
from engine.execution.folding import Chains, fill_folded
from engine.execution.host_ring import HostRing
from engine.layers.mla import folded_output
from engine.models.model import FoldedRows, StepRows
from kernels.mla_workspace import MlaWorkspace, make_mla_workspace
from kernels.ops.mla import plan_mla_decode
from kernels.step_work import StepWork


class FoldedLayers:
    """A step of `layers.specs` (past, tokens of the step) in rows of `q_len` queries, padded to
    `size` tokens whose queries are large and whose KV goes to a page of nobody."""

    def __init__(self, layers: PrefillLayers, q_len: int, size: int) -> None:
        sizes, device = layers.sizes, layers.sizes.device
        self.layers, self.q_len, self.size = layers, q_len, size
        self._workspace: MlaWorkspace | None = None
        lens = np.array([new for _, new in layers.specs])
        ends = np.array([past + new for past, new in layers.specs])
        num_rows, self.num_tokens = len(lens), int(lens.sum())
        free = set(range(layers.pools[0].shape[0])) - set(layers.table.flatten().tolist())
        self.sentinel_page = free.pop()
        sentinel_row = torch.full_like(layers.table[:1], self.sentinel_page)
        columns = np.zeros((3, size), dtype=np.int32)
        chains = Chains(lens=lens, ends=ends, slots=np.arange(num_rows))
        self.num_folded = fill_folded(chains, q_len, num_rows, columns)
        places, slots, seq_lens = torch.from_numpy(columns).to(device)
        self.folded = FoldedRows(q_len=q_len, places=places, row_slots=slots, seq_lens=seq_lens)
        padding = size - self.num_tokens
        zeros = torch.zeros(padding, dtype=torch.int32, device=device)
        place = self.sentinel_page * PAGE
        self.rows = StepRows(
            positions=torch.cat((layers.rows.positions, zeros)),
            slot_mapping=torch.cat((layers.rows.slot_mapping, zeros + place)),
            row_indptr=torch.arange(size + 1, dtype=torch.int32, device=device),
            row_slots=torch.zeros(size, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(size, dtype=torch.int32, device=device),
            page_table=torch.cat((layers.table, sentinel_row)),
            page_size=PAGE,
            num_prefill_rows=0,
            num_prefill_tokens=0,
            folded=self.folded,
        )
        q, kv = layers.q, layers.kv
        self.q = torch.cat((q, q.new_full((padding, *q.shape[1:]), 1e3)))
        self.kv = torch.cat((kv, kv.new_full((padding, kv.shape[1]), 1e3)))
        width = sizes.num_heads * sizes.v_dim
        identity = torch.eye(width, dtype=sizes.dtype, device=device)
        self.weights = replace(layers.weights, out=identity)
        self.residual = torch.zeros(size, width, dtype=sizes.dtype, device=device)

    def workspace(self) -> MlaWorkspace:
        """One for all layers. Planned; partial results are NaN until they are written."""
        if self._workspace is not None:
            return self._workspace
        sizes = self.layers.sizes
        made = self._workspace = make_mla_workspace(
            max_rows=self.size,
            num_heads=sizes.num_heads,
            q_len=self.q_len,
            device=sizes.device,
            latent_dim=sizes.latent_dim,
        )
        made.partial_out.fill_(float("nan"))
        plan_mla_decode(made, self.folded.seq_lens, self.rows.page_table, self.folded.row_slots)
        return made

    def queries(self, value: float) -> torch.Tensor:
        """Where queries go, full of a value."""
        sizes = self.layers.sizes
        shape = (self.size * self.q_len, sizes.num_heads, sizes.latent_dim + sizes.rope_dim)
        return torch.full(shape, value, dtype=sizes.dtype, device=sizes.device)

    def run(self, layer: int = 0, *, no_tokens: float = 0.0) -> torch.Tensor:
        """Values [size, H * V]; queries that are no token's hold `no_tokens`."""
        work, layers = StepWork(), self.layers
        work.keep("folded", lambda: self.queries(no_tokens))
        return folded_output(
            self.q.clone(),
            self.kv,
            self.weights,
            self.rows,
            self.folded,
            layers.pools[layer],
            layers.cos_sin,
            layers.scale,
            self.workspace(),
            work,
            self.residual,
        )


def count_folds(launcher: DeviceLauncher) -> Counter[int]:
    """By q_len, how many decode steps from now on."""
    counts: Counter[int] = Counter()
    fill = launcher.decode_inputs.fill

    def counted(batch: ForwardBatch, size: int, ring: HostRing) -> int:
        q_len = fill(batch, size, ring)
        counts[q_len] += 1
        return q_len

    launcher.decode_inputs.fill = counted  # type: ignore[method-assign]
    return counts
