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
from kernels.latent_cases import GPU, HOST, latent_cases
from kernels.layer_cases import layer_cases
from kernels.registry import REGISTRY
from kernels.selection import override
from kernels.step_cases import step_cases
from kernels.tolerances import tolerance_of


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one case on one kernel. `error` is None where the kernel refuses the call,
    infinite where it `raised`."""

    family: str
    kernel: str
    case: str
    error: float | None
    allowed: float
    raised: str | None = None

    @property
    def passes(self) -> bool:
        """Whether the kernel refused the call or is within the tolerance."""
        return self.error is None or self.error <= self.allowed


# These choose how others run, or prepare it: what they say shows in the results of those.
NOTHING_TO_COMPARE = {
    "mla_plan": "cases of mla_decode run it",
    "mla_decode_form": "a choice of the engine's, in docs/gpu-kernels.md",
    "mla_decode_group": "likewise",
    "mla_prefill_form": "likewise",
}
# What runs as the reference of a fused family: it, and the parts it calls, all of them references.
_PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "llama_forward": (
        ("llama_forward", "reference"),
        ("linear", "reference"),
        ("paged_attention", "reference"),
    ),
    "moe_norm_route": (
        ("moe_norm_route", "composed"),
        ("rms_norm", "reference"),
        ("moe_route", "reference"),
    ),
    "mla_absorb": (("mla_absorb", "composed"), ("mla_kv_write", "reference")),
    "mla_values": (("mla_values", "composed"), ("mla_decode", "reference")),
    "mla_output": (
        ("mla_output", "composed"),
        ("mla_values", "composed"),
        ("mla_decode", "reference"),
        ("linear_add", "reference"),
    ),
}


def all_cases() -> dict[str, list[Case]]:
    """Return the cases of every family that has some, by family: those of a CPU, and where torch
    finds a GPU those of one."""
    parts = [
        {
            "linear": linear_cases(),
            "paged_attention": attention_cases(),
            "llama_forward": decoder_cases(),
        },
        layer_cases(),
        small_cases(),
        latent_cases(HOST),
        step_cases("cpu"),
    ]
    if torch.cuda.is_available():
        parts += [latent_cases(GPU), step_cases("cuda")]
    cases: dict[str, list[Case]] = {}
    for part in parts:
        for family, some in part.items():
            cases.setdefault(family, []).extend(some)
    return cases


def error_of(actual: object, expected: torch.Tensor) -> float:
    """Return the worst row's |actual - expected| / |expected|; inf where one has a NaN alone, and
    where a kernel returned something else than a tensor of that shape and dtype."""
    if not isinstance(actual, torch.Tensor):
        return float("inf")
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
    except Exception as error:  # a plugin's may be any
        said = f"{type(error).__name__}: {error}"
        return Verdict(family, kernel, case.name, float("inf"), allowed, said)
    return Verdict(
        family, kernel, case.name, error_of(actual, reference_result(family, case)), allowed
    )


def reference_result(family: str, case: Case) -> torch.Tensor:
    """Return what the reference makes of a case."""
    return _run_overridden(_PARTS.get(family, ((family, "reference"),)), case)


def _run_overridden(names: tuple[tuple[str, str], ...], case: Case) -> torch.Tensor:
    if not names:
        return case.run()
    with override(*names[0]):
        return _run_overridden(names[1:], case)


def verify_family(family: str) -> Iterator[Verdict]:
    """Yield the verdict of every case on every kernel of the family, plugins' too."""
    REGISTRY.load_plugins()
    for case in all_cases().get(family, []):
        for kernel in kernels_to_verify(family):
            yield verify_case(family, kernel, case)
