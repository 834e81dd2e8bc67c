# SPDX-License-Identifier: Apache-2.0
"""What all layers of a step share in MLA prefill: the plan, and the memory they use one after the
other for gathered latents, expanded keys and values, and partial results.

Does not know: kernels, launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.triton.boxes import boxes_of
from kernels.triton.mla_prefill_plan import PrefillPlan

# Expanded keys and values of one group of heads stay below this.
EXPANDED_BYTES = 2 << 30
# Larger ones are no layer's but while it attends: its experts need memory too, and a step as large
# is bound by the device whatever the host does.
KEPT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSizes:
    """Of one kernel's work: a query tile has `block_m` tokens, a KV tile `tile`."""

    num_heads: int
    nope_dim: int
    v_dim: int
    latent_dim: int
    rope_dim: int
    block_m: int
    tile: int


class PrefillScratch:
    """`latents` [num_kv, latent_dim + rope_dim]; `partial_out` fp32 [partials, heads, block_m,
    v_dim] and `partial_lse` fp32 [partials, heads, block_m]; keys and values of up to `group`
    heads."""

    def __init__(self, plan: PrefillPlan, sizes: PrefillSizes, q: torch.Tensor) -> None:
        self.plan = plan
        self.sizes = sizes
        heads, slots = sizes.num_heads, max(1, plan.num_partials)
        like: dict[str, Any] = {"dtype": q.dtype, "device": q.device}
        width = sizes.latent_dim + sizes.rope_dim
        self.latents = torch.empty(plan.num_kv, width, **like)
        shape = (slots, heads, sizes.block_m)
        self.partial_out = torch.empty(*shape, sizes.v_dim, dtype=torch.float32, device=q.device)
        self.partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        per_head = plan.num_kv * (sizes.nope_dim + sizes.v_dim) * q.element_size()
        self.group = min(heads, max(1, EXPANDED_BYTES // per_head))
        self._is_kept = per_head * self.group <= KEPT_BYTES
        self._like = like
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None
        self._of_count: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._boxes_of_count: dict[int, tuple[Any, Any, Any]] = {}

    def expanded(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for keys [num_kv, count * nope_dim] and values [num_kv, count * v_dim]."""
        found = self._of_count.get(count)
        if found is None:
            num, nope_dim, v_dim = self.plan.num_kv, self.sizes.nope_dim, self.sizes.v_dim
            if self._room is None:
                self._room = (
                    torch.empty(num * self.group * nope_dim, **self._like),
                    torch.empty(num * self.group * v_dim, **self._like),
                )
            keys, values = self._room
            found = (
                keys[: num * count * nope_dim].view(num, count * nope_dim),
                values[: num * count * v_dim].view(num, count * v_dim),
            )
            self._of_count[count] = found
        return found

    def end_layer(self) -> None:
        """Give large keys and values back until the next layer asks."""
        if not self._is_kept:
            self._room = None
            self._of_count.clear()
            self._boxes_of_count.clear()

    def boxes(self, count: int) -> tuple[Any, Any, Any]:
        """Descriptors of that room and of the latents: keys, rope parts, values; a tile each."""
        found = self._boxes_of_count.get(count)
        if found is None:
            keys, values = self.expanded(count)
            sizes, tile = self.sizes, self.sizes.tile
            found = (
                boxes_of(keys, tile, sizes.nope_dim),
                boxes_of(self.latents, tile, sizes.rope_dim),
                boxes_of(values, tile, sizes.v_dim),
            )
            self._boxes_of_count[count] = found
        return found
