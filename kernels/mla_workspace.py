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


@dataclass(slots=True, kw_only=True)
class MlaWorkspace:
    """Scratch for up to `max_rows` rows of exactly `q_len` query tokens each.

    `plan` int32 (layout: triton/mla_plan.py); `partial_out` fp32 [num_parts + max_rows, padded
    rows, latent_dim]; `partial_lse` fp32 [num_parts + max_rows, padded rows]. Padded rows are
    q_len * num_heads rounded up to a multiple of 64.
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
) -> MlaWorkspace:
    """Allocate a workspace; `num_processors` defaults to the device's multiprocessors.

    Raises:
        KernelInputError: if a size is not positive.
    """
    for name, size in (("max_rows", max_rows), ("num_heads", num_heads), ("q_len", q_len)):
        if size < 1:
            raise KernelInputError(name, size, "at least 1")
    device = torch.device(device)
    if num_processors is None:
        num_processors = 1
        if device.type != "cpu":
            num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    num_blocks = -(-num_heads * q_len // TILE_ROWS)
    num_parts = max(1, num_processors // num_blocks)
    rows = num_blocks * TILE_ROWS
    slots = num_parts + max_rows
    return MlaWorkspace(
        max_rows=max_rows,
        num_heads=num_heads,
        q_len=q_len,
        latent_dim=latent_dim,
        num_parts=num_parts,
        plan=torch.zeros(num_parts * 8 + 3 * max_rows + 1, dtype=torch.int32, device=device),
        partial_out=torch.empty(slots, rows, latent_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(slots, rows, dtype=torch.float32, device=device),
        may_start_early=may_start_early,
    )
