# SPDX-License-Identifier: Apache-2.0
"""The DeepSeek architecture (V2, V2-Lite, V3, R1, Kimi K2): latent attention, routed experts.

Does not know: files (a WeightReader), how kernels run, requests, pages.
Source: DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from functools import partial

import torch

from engine.layers.mla import mla_attend, mla_attention
from engine.layers.moe import feed_forward
from engine.models.deepseek_config import DeepseekConfig
from engine.models.deepseek_loader import DeepseekLayer, DeepseekStack, check_stack, load_stack
from engine.models.deepseek_pieces import DeepseekPieces
from engine.models.model import LoadOptions, RunPiece, StepRows
from engine.weights.reader import WeightReader
from kernels.mla_workspace import MlaWorkspace, make_mla_workspace
from kernels.ops.linear import linear, norm_linear
from kernels.ops.mla import plan_mla_decode
from kernels.ops.mla_decode_form import FoldForm, fold_forms, rows_of_group
from kernels.ops.norm import rms_norm
from kernels.ops.sampling import argmax
from kernels.ops.step_ids import embed_rows
from kernels.step_work import StepWork
from kvtiers.layout import LatentLayout


class DeepseekForCausalLM:
    """The decoder over paged latents. One step at a time: the decode scratch is shared."""

    def __init__(self, config: DeepseekConfig, stack: DeepseekStack, options: LoadOptions) -> None:
        self.config = config
        self.num_layers = config.num_layers
        self.vocab_size = config.vocab_size
        self.can_draft = stack.next_layer is not None
        self._stack = stack
        self._dtype = options.dtype
        self.last_hidden = torch.empty(0)
        self._pieces: DeepseekPieces | None = None
        self._pool_layers: tuple[torch.Tensor | None, tuple[torch.Tensor, ...]] = (None, ())
        self._options = options
        self._workspaces: dict[int, MlaWorkspace] = {}  # by q_len
        self._group = 0  # rows of one token that share a workspace's tile of queries; 0: unknown
        self._workspace(1)

    @classmethod
    def load(
        cls, config: DeepseekConfig, reader: WeightReader, options: LoadOptions
    ) -> DeepseekForCausalLM:
        """Build the model from a checkpoint.

        Raises:
            WeightMismatchError: a tensor is missing or of another shape; before any is read.
        """
        return cls(config, load_stack(config, reader, options), options)

    @staticmethod
    def check(config: DeepseekConfig, reader: WeightReader, options: LoadOptions) -> None:
        """Raise what `load` would, without reading a tensor."""
        check_stack(config, reader, options)

    def kv_layout(self, page_size: int, dtype: str) -> LatentLayout:
        return LatentLayout(
            num_layers=self.config.num_layers + self.can_draft,
            page_size=page_size,
            latent_dim=self.config.latent_dim,
            rope_dim=self.config.rope_dim,
            dtype=dtype,
        )

    @property
    def step_bytes_per_token(self) -> int:
        """See `PagedModel`. The widest is a layer's experts: rows sorted by expert, what is between
        an expert's matrices, and the parts of each token's sum."""
        config, experts = self.config, self.config.experts
        widths = [config.num_heads * (config.head_dim + config.v_dim), 3 * config.ffn]
        if experts is not None:
            num_chosen = experts.top_k + experts.num_shared
            widths.append(num_chosen * (2 * config.hidden + experts.ffn))
        # Beside it the residual before and after, its norm, and the norm once more in fp32.
        return (max(widths) + 5 * config.hidden) * self._dtype.itemsize + 4 * config.hidden

    def fold_forms(self, kv_pool: torch.Tensor) -> tuple[FoldForm, ...]:
        """See `FoldingModel`."""
        config, layer = self.config, self._layers_of(kv_pool)[0]
        return fold_forms(config.num_heads, config.latent_dim, config.rope_dim, self._dtype, layer)

    def rows_of_group(self, kv_pool: torch.Tensor) -> int:
        """See `FoldingModel`."""
        config, layer = self.config, self._layers_of(kv_pool)[0]
        return rows_of_group(
            config.num_heads, config.latent_dim, config.rope_dim, self._dtype, layer
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Write the step's latents and return logits fp32 [S, vocab_size] (a new tensor)."""
        stack = self._stack
        self._plan_decode_rows(rows, kv_pool)
        residual = embed_rows(stack.embedding, input_ids, self._dtype)
        pools, work = self._layers_of(kv_pool), StepWork()
        for index, layer in enumerate(stack.layers):
            rows.wait_for_layer(index)
            residual = self._layer(residual, layer, rows, pools[index], work)
        return self._logits(residual, rows, sample_rows)

    def prepare_pieces(self, most: int) -> None:
        """See `PiecewiseModel`."""
        self._pieces = DeepseekPieces(self.config, self._stack, self._dtype, most)

    def forward_in_pieces(
        self,
        input_ids: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sample_rows: torch.Tensor,
        num_padded: int,
        run: RunPiece,
    ) -> torch.Tensor:
        """See `PiecewiseModel`."""
        stack, pieces, num = self._stack, self._pieces, input_ids.shape[0]
        assert pieces is not None, "prepare_pieces came first"
        self._plan_decode_rows(rows, kv_pool)
        pieces.begin(input_ids, num_padded)
        pools, work = self._layers_of(kv_pool), StepWork()
        for index, layer in enumerate(stack.layers):
            run(index, partial(pieces.run, index, num_padded))
            rows.wait_for_layer(index)
            mla_attend(
                pieces.queries(num),
                pieces.latents(num),
                layer.attention,
                rows,
                pools[index],
                stack.cos_sin,
                self.config.softmax_scale,
                self._workspace(1),
                work,
                pieces.values(num),
            )
        run(len(stack.layers), partial(pieces.run, len(stack.layers), num_padded))
        return self._logits(pieces.residual(num), rows, sample_rows)

    def _plan_decode_rows(self, rows: StepRows, kv_pool: torch.Tensor) -> None:
        cut, folded = rows.num_prefill_rows, rows.folded
        if self._group == 0:  # in a run before any capture
            self._group = self.rows_of_group(kv_pool)
            if self._group > 1:
                del self._workspaces[1]  # made again, with room for what groups leave
        if folded is not None:
            workspace = self._workspace(folded.q_len)
            plan_mla_decode(workspace, folded.seq_lens, rows.page_table, folded.row_slots)
        elif cut < rows.row_slots.shape[0]:
            seq_lens, slots = rows.seq_lens[cut:], rows.row_slots[cut:]
            plan_mla_decode(self._workspace(1), seq_lens, rows.page_table, slots)

    def _workspace(self, q_len: int) -> MlaWorkspace:
        """Made when first asked for: a graph's, in the runs before its capture."""
        found = self._workspaces.get(q_len)
        if found is None:
            found = self._workspaces[q_len] = make_mla_workspace(
                max_rows=self._options.max_rows,
                num_heads=self.config.num_heads,
                q_len=q_len,
                device=self._options.device,
                latent_dim=self.config.latent_dim,
                group=max(1, self._group) if q_len == 1 else 1,
            )
        return found

    def _logits(
        self, residual: torch.Tensor, rows: StepRows, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        stack, eps = self._stack, self.config.rms_eps
        if self.can_draft:
            self.last_hidden = rms_norm(residual, stack.final_norm, eps)
        if not sample_rows.shape[0]:  # a chunk in the middle of a prompt
            return residual.new_empty(0, self.vocab_size, dtype=torch.float32)
        if not rows.samples_all:
            residual = residual[_last_tokens(rows, sample_rows)]
        return norm_linear(residual, stack.final_norm, eps, stack.lm_head, torch.float32)

    def draft(
        self,
        next_ids: torch.Tensor,
        hidden: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See `DraftingModel`. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2."""
        stack, eps = self._stack, self.config.rms_eps
        found = stack.next_layer
        assert found is not None, "can_draft"
        embedded = embed_rows(stack.embedding, next_ids, self._dtype)
        halves = (
            rms_norm(embedded, found.embed_norm, eps),
            rms_norm(hidden, found.hidden_norm, eps),
        )
        residual = linear(torch.cat(halves, dim=-1), found.project)
        rows.wait_for_layer(self.config.num_layers)
        pool_layer = self._layers_of(kv_pool)[self.config.num_layers]
        residual = self._layer(residual, found.layer, rows, pool_layer, StepWork())
        if not sample_rows.shape[0]:
            return sample_rows.new_empty(0, dtype=torch.int32)
        if not rows.samples_all:
            residual = residual[_last_tokens(rows, sample_rows)]
        logits = norm_linear(residual, found.final_norm, eps, stack.lm_head, torch.float32)
        return argmax(logits)

    def _layers_of(self, kv_pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """kv_pool[:, layer] of each layer; the same views while the pool is the same, so that what
        kernels derive from one is found again."""
        if self._pool_layers[0] is not kv_pool:
            self._pool_layers = (kv_pool, kv_pool.unbind(1))
        return self._pool_layers[1]

    def _layer(
        self,
        residual: torch.Tensor,
        layer: DeepseekLayer,
        rows: StepRows,
        kv_pool_layer: torch.Tensor,
        work: StepWork,
    ) -> torch.Tensor:
        eps = self.config.rms_eps
        residual = mla_attention(
            residual,
            (layer.input_norm, eps),
            layer.attention,
            rows,
            kv_pool_layer,
            self._stack.cos_sin,
            self.config.softmax_scale,
            self._workspace(1 if rows.folded is None else rows.folded.q_len),
            work,
        )
        return feed_forward(residual, (layer.post_norm, eps), layer.feed_forward)


def _last_tokens(rows: StepRows, sample_rows: torch.Tensor) -> torch.Tensor:
    """Places of the sampled rows' last tokens, int64."""
    return rows.row_indptr[sample_rows.long() + 1].long() - 1


EntryClass = DeepseekForCausalLM
