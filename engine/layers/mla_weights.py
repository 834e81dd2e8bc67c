# SPDX-License-Identifier: Apache-2.0
"""The weights of one layer of multi-head latent attention. Does not know: files, tensor names.

Legend: H heads, N nope_dim, R rope_dim, V v_dim, C latent_dim, D = N + R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ops.linear import LinearWeight

# The two inner norms are built without the model's eps in the released code.
INNER_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaWeights:
    """One layer. Rows of rope parts are in rotate-half order."""

    # [q_rank + C + R, hidden], or [H * D + C + R, hidden] where queries have no low rank
    q_kv_down: LinearWeight
    q_norm: torch.Tensor | None  # [q_rank]
    q_up: LinearWeight | None  # [H * D, q_rank]
    kv_norm: torch.Tensor  # [C]
    w_uk: torch.Tensor  # [H, N, C]
    w_uv: torch.Tensor  # [H, V, C]
    out: LinearWeight  # [hidden, H * V]
