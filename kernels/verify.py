# SPDX-License-Identifier: Apache-2.0
"""Compares registered kernels with the reference on the cases of their family.

Does not know: what a family computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.cases import Case, attention_cases, linear_cases, small_cases
from kernels.decoder_cases import decoder_cases
from kernels.errors import NoKernelFoundError
from kernels.layer_cases import layer_cases
from kernels.registry import REGISTRY
from kernels.selection import override
from kernels.tolerances import tolerance_of


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one case on one kernel. `error` is None where the kernel refuses the call."""

    family: str
    kernel: str
    case: str
    error: float | None
    allowed: float

    @property
    def passes(self) -> bool:
        """Whether the kernel refused the call or is within the tolerance."""
        return self.error is None or self.error <= self.allowed


def all_cases() -> dict[str, list[Case]]:
    """Return the cases of every family that has some, by family."""
    return {
        "linear": linear_cases(),
        "paged_attention": attention_cases(),
        "llama_forward": decoder_cases(),
        **layer_cases(),
        **small_cases(),
    }


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the worst row's |actual - expected| / |expected|; inf where one has a NaN alone."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if torch.equal(actual, expected):
        return 0.0
    a, b = actual.double(), expected.double()
    rows = b.shape[0] if b.dim() > 1 else 1
    # Equal infinities and NaN in the same places are no difference.
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, a - b).reshape(rows, -1).norm(dim=1)
    size = torch.where(b.isfinite(), b, 0.0).reshape(rows, -1).norm(dim=1)
    ratio = difference / size.clamp_min(1e-30)
    return float("inf") if bool(ratio.isnan().any()) else float(ratio.max())


def kernels_to_verify(family: str) -> list[str]:
    """Return the names of a family's kernels beside the reference."""
    return [spec.name for spec in REGISTRY.specs(family) if spec.name != "reference"]


def verify_case(family: str, kernel: str, case: Case) -> Verdict:
    """Run one case on one kernel and on the reference.

    A fused kernel's reference is composed of ops, all of which run as references too.
    """
    allowed = tolerance_of(family, case.variant).relative
    try:
        with override(family, kernel):
            actual = case.run()
    except NoKernelFoundError:
        return Verdict(family, kernel, case.name, None, allowed)
    return Verdict(
        family, kernel, case.name, error_of(actual, reference_result(family, case)), allowed
    )


def reference_result(family: str, case: Case) -> torch.Tensor:
    """Return what the reference makes of a case."""
    parts = ("linear", "paged_attention") if family == "llama_forward" else ()
    names = [family, *parts]
    return _run_overridden(names, case)


def _run_overridden(families: list[str], case: Case) -> torch.Tensor:
    if not families:
        return case.run()
    with override(families[0], "reference"):
        return _run_overridden(families[1:], case)


def verify_family(family: str) -> Iterator[Verdict]:
    """Yield the verdict of every case on every kernel of the family, plugins' too."""
    REGISTRY.load_plugins()
    for case in all_cases().get(family, []):
        for kernel in kernels_to_verify(family):
            yield verify_case(family, kernel, case)
