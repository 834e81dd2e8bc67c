# SPDX-License-Identifier: Apache-2.0
"""SwiGLU in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel


@register_kernel("silu_and_mul", "reference", priority=Priority.REFERENCE)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """fp32 inside, rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
