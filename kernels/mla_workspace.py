# SPDX-License-Identifier: Apache-2.0
"""Device scratch of MLA decode: the split-KV plan and the partial results.

Owns: sizes. Does not know: kernels. Allocated once at its largest size, so that CUDA graphs may
hold its addresses; one plan serves every layer of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.errors import KernelInputError

TILE_ROWS = 64
GROUPS = (1, 2, 4, 8, 16)


@dataclass(slots=True, kw_only=True)
class MlaWorkspace:
    """Scratch for up to `max_rows` rows of exactly `q_len` query tokens each.

    `plan` int32 (layout: triton/mla_plan.py); `partial_out` fp32 [num_parts + max_spans, padded
    rows, latent_dim]; `partial_lse` fp32 [num_parts + max_spans, padded rows]. Padded rows are
    q_len * num_heads rounded up to a multiple of 64. `group`: so many rows in turn read pages that
    they share once, in one tile of queries; 1: each row reads its own. `shared` int32 [groups, 2]:
    the tiles that rows of a group share, and which rows, as bits.
    """

    max_rows: int
    num_heads: int
    q_len: int
    latent_dim: int
    num_parts: int
    plan: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    plan_is_fresh: bool = True  # no kernel ran since the plan's: its result may still be in flight
    # Whether a kernel may read keys and values before the one in front has ended. It takes all but
    # a row's last q_len + 15 tokens for older than that; where a step writes more, or where they
    # come from a buffer that each layer fills, it must not.
    may_start_early: bool = True
    group: int = 1
    shared: torch.Tensor | None = None

    def num_groups(self, num_rows: int) -> int:
        """Of so many rows."""
        return -(-num_rows // self.group) if self.group > 1 else 0

    @property
    def num_blocks(self) -> int:
        """Tiles of 64 query rows that one row of the batch needs."""
        return -(-self.num_heads * self.q_len // TILE_ROWS)


def make_mla_workspace(
    *,
    max_rows: int,
    num_heads: int,
    q_len: int,
    device: torch.device | str,
    latent_dim: int = 512,
    num_processors: int | None = None,
    may_start_early: bool = True,
    group: int = 1,
) -> MlaWorkspace:
    """Allocate a workspace; `num_processors` defaults to the device's multiprocessors.

    Raises:
        KernelInputError: if a size is not positive, or a group does not fit a tile of queries.
    """
    for name, size in (("max_rows", max_rows), ("num_heads", num_heads), ("q_len", q_len)):
        if size < 1:
            raise KernelInputError(name, size, "at least 1")
    fits = q_len == 1 and group * num_heads <= TILE_ROWS
    if group not in GROUPS or (group > 1 and not fits):
        allowed = f"1; of one query token each, {TILE_ROWS} queries in all, also {GROUPS[1:]}"
        raise KernelInputError("group", group, allowed)
    device = torch.device(device)
    if num_processors is None:
        num_processors = 1
        if device.type != "cpu":
            num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    num_blocks = -(-num_heads * q_len // TILE_ROWS)
    num_parts = max(1, num_processors // num_blocks)
    rows = num_blocks * TILE_ROWS
    num_groups = -(-max_rows // group) if group > 1 else 0
    max_spans = max_rows + num_groups
    slots = num_parts + max_spans
    return MlaWorkspace(
        max_rows=max_rows,
        num_heads=num_heads,
        q_len=q_len,
        latent_dim=latent_dim,
        num_parts=num_parts,
        plan=torch.zeros(num_parts * 8 + 11 * max_spans + 1, dtype=torch.int32, device=device),
        partial_out=torch.empty(slots, rows, latent_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(slots, rows, dtype=torch.float32, device=device),
        may_start_early=may_start_early,
        group=group,
        shared=torch.zeros(num_groups, 2, dtype=torch.int32, device=device) if num_groups else None,
    )
