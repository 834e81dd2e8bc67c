# SPDX-License-Identifier: Apache-2.0
"""How a model's router turns scores into experts, as data. Does not know: kernels, weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.errors import KernelInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRouting:
    """Top-k routing, optionally limited to the best groups of experts.

    A correction bias, where the model has one, moves the choice and never the weights.
    `group_score`: a group counts by its best expert ("max") or its best two ("top2").

    Raises:
        KernelInputError: if the numbers do not fit together.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"
    renormalise: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= 16:
            raise KernelInputError("top_k", self.top_k, "1 to 16")
        if self.num_experts % self.num_groups:
            allowed = f"a divisor of {self.num_experts} experts"
            raise KernelInputError("num_groups", self.num_groups, allowed)
        if not 1 <= self.groups_kept <= self.num_groups:
            raise KernelInputError("groups_kept", self.groups_kept, f"1 to {self.num_groups}")
        eligible = self.num_experts // self.num_groups * self.groups_kept
        if self.top_k > eligible:
            raise KernelInputError("top_k", self.top_k, f"at most {eligible} eligible experts")
