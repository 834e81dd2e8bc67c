# SPDX-License-Identifier: Apache-2.0
"""x @ weight.T in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.packed_weight import PackedWeight, Weight
from kernels.registry import Priority, register_kernel


@register_kernel("linear", "reference", priority=Priority.REFERENCE)
def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Dense weights in x.dtype; packed ones are dequantised to fp32 and multiplied in fp32."""
    if isinstance(weight, PackedWeight):
        return (x.float() @ weight.dequantise().T).to(x.dtype)
    return torch.nn.functional.linear(x, weight.to(x.dtype))
