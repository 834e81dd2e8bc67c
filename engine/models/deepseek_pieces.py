# SPDX-License-Identifier: Apache-2.0
"""What the layers of a step do to each token alone, in pieces that may be captured: between two
attentions lie one output projection, one feed-forward part, and the next layer's projections.

A piece takes its inputs from buffers that stay where they are and leaves its results there, and
runs over a padded number of tokens. Padding is harmless: its ids and the values of its attention
are zeros again in each step, its latents go nowhere, and no token's result depends on another's.
Attention itself is not captured: its launches follow from the rows' lengths.

Does not know: graphs, pages, who attends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.mla import mla_project
from engine.layers.moe import feed_forward
from engine.models.deepseek_config import DeepseekConfig
from engine.models.deepseek_loader import DeepseekLayer, DeepseekStack
from kernels.ops.linear import linear_add
from kernels.ops.step_ids import embed_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    ids: torch.Tensor  # int32 [most]
    residual: torch.Tensor  # [most, hidden]
    projected: torch.Tensor  # [most, H * D + C + R]: queries, then latents with their rope part
    values: torch.Tensor  # [most, H * V]


class DeepseekPieces:
    """For up to `most` tokens. One step at a time."""

    def __init__(
        self, config: DeepseekConfig, stack: DeepseekStack, dtype: torch.dtype, most: int
    ) -> None:
        self._stack = stack
        self._dtype = dtype
        self._eps = config.rms_eps
        self._rope_dim = config.rope_dim
        self._heads = (config.num_heads, config.head_dim)
        self._q_width = config.num_heads * config.head_dim
        device = stack.embedding.device

        def room(width: int) -> torch.Tensor:
            return torch.zeros(most, width, dtype=dtype, device=device)

        self._buffers = _Buffers(
            ids=torch.zeros(most, dtype=torch.int32, device=device),
            residual=room(config.hidden),
            projected=room(self._q_width + config.latent_dim + config.rope_dim),
            values=room(config.num_heads * config.v_dim),
        )

    def begin(self, ids: torch.Tensor, num_padded: int) -> None:
        """A step's tokens, and padding behind them."""
        num, held = ids.shape[0], self._buffers
        held.ids[:num].copy_(ids)
        held.ids[num:num_padded].zero_()
        held.values[num:num_padded].zero_()

    def queries(self, num: int) -> torch.Tensor:
        """[num, H, D], a view: what the layer's projection left."""
        return self._buffers.projected[:num, : self._q_width].view(num, *self._heads)

    def latents(self, num: int) -> torch.Tensor:
        """[num, C + R], a view, likewise."""
        return self._buffers.projected[:num, self._q_width :]

    def values(self, num: int) -> torch.Tensor:
        """[num, H * V], a view: where the layer's attention writes."""
        return self._buffers.values[:num]

    def residual(self, num: int) -> torch.Tensor:
        """[num, hidden], a view: behind the last piece, what all layers left."""
        return self._buffers.residual[:num]

    def run(self, number: int, num_padded: int) -> None:
        """Piece 0 embeds; piece i ends layer i - 1; each but the last begins layer i."""
        layers, held = self._stack.layers, self._buffers
        residual = held.residual[:num_padded]
        if number == 0:
            new = embed_rows(self._stack.embedding, held.ids[:num_padded], self._dtype)
        else:
            new = self._end_layer(layers[number - 1], residual, held.values[:num_padded])
        residual.copy_(new)
        if number < len(layers):
            self._begin_layer(layers[number], new, num_padded)

    def _end_layer(
        self, layer: DeepseekLayer, residual: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        residual = linear_add(values, layer.attention.out, residual)
        return feed_forward(residual, (layer.post_norm, self._eps), layer.feed_forward)

    def _begin_layer(self, layer: DeepseekLayer, residual: torch.Tensor, num_padded: int) -> None:
        norm = (layer.input_norm, self._eps)
        q_THD, kv_TC = mla_project(residual, norm, layer.attention, self._rope_dim)
        self.queries(num_padded).copy_(q_THD)
        self.latents(num_padded).copy_(kv_TC)
