# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs a call: the one home of that decision.

Does not know: what a kernel computes. Highest priority band that accepts the call wins; an override
names one kernel of a family and is obeyed or refused aloud, never silently ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kernels.errors import NoKernelFoundError
from kernels.platform import capability_of
from kernels.registry import REGISTRY, KernelSpec, Priority
from kernels.signature import CallSignature


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel of the family and why it was not taken (None: it could run the call)."""

    spec: KernelSpec
    reason_against: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer to "why this kernel": candidates best first, the chosen one if any."""

    signature: CallSignature
    chosen: KernelSpec | None
    overridden: str | None
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        call = self.signature
        formats = " ".join(f"{name}={value}" for name, value in call.formats)
        traits = " ".join(f"{name}={value}" for name, value in call.traits)
        lines = [f"{call.family} on {call.device} ({formats}) {traits}".rstrip()]
        if self.overridden is not None:
            lines.append(f"  override: {self.overridden}")
        for candidate in self.candidates:
            spec = candidate.spec
            mark = "->" if spec is self.chosen else "  "
            why = candidate.reason_against or "can run it"
            lines.append(f"  {mark} {spec.name} [{spec.priority.name}]: {why}")
        return "\n".join(lines)


_lock = threading.Lock()
_overrides: dict[str, str] = {}
_cache: dict[CallSignature, KernelSpec] = {}
_cache_generation = -1
_usual: dict[tuple[int, CallSignature], KernelSpec] = {}


def explain_selection(signature: CallSignature) -> Explanation:
    """Return every candidate of the call's family with the reason for or against it."""
    REGISTRY.load_plugins()
    capability = capability_of(signature.device)
    candidates = tuple(
        Candidate(spec, spec.reason_against(signature, capability))
        for spec in REGISTRY.specs(signature.family)
    )
    wanted = _overrides.get(signature.family)
    able = [c.spec for c in candidates if c.reason_against is None]
    if wanted is not None:
        able = [spec for spec in able if spec.name == wanted]
    return Explanation(signature, able[0] if able else None, wanted, candidates)


def select_kernel(signature: CallSignature) -> KernelSpec:
    """Return the kernel that runs the call; cached per signature.

    Raises:
        NoKernelFoundError: if none accepts it, or the overriding one refuses it.
    """
    global _cache_generation
    if _cache_generation == REGISTRY.generation:
        found = _cache.get(signature)
        if found is not None:
            return found
    explanation = explain_selection(signature)
    if explanation.chosen is None:
        raise NoKernelFoundError(f"no kernel can run this call\n{explanation}")
    with _lock:
        if _cache_generation != REGISTRY.generation:
            _cache.clear()
            _cache_generation = REGISTRY.generation
        _cache[signature] = explanation.chosen
    return explanation.chosen


def usual_kernel(signature: CallSignature) -> KernelSpec:
    """Return the kernel that would run the call if nothing were overridden; cached likewise.

    Raises:
        NoKernelFoundError: if none accepts it.
    """
    key = REGISTRY.generation, signature
    found = _usual.get(key)
    if found is None:
        explanation = explain_selection(signature)
        able = (c.spec for c in explanation.candidates if c.reason_against is None)
        found = next((spec for spec in able if spec.priority > Priority.TRIAL), None)
        if found is None:
            raise NoKernelFoundError(f"no kernel can run this call\n{explanation}")
        _usual[key] = found
    return found


def expect_kernel(family: str, name: str) -> KernelSpec:
    """Return a kernel by its name, those of plugins included.

    Raises:
        NoKernelFoundError: there is none; naming those there are.
    """
    REGISTRY.load_plugins()
    specs = {spec.name: spec for spec in REGISTRY.specs(family)}
    if name not in specs:
        raise NoKernelFoundError(f"override: {family} has no kernel {name!r}, only {[*specs]}")
    return specs[name]


def set_override(family: str, name: str | None) -> None:
    """Force one kernel for a family in the whole process; None takes the override back.

    Raises:
        NoKernelFoundError: if the family has no kernel of that name.
    """
    if name is not None:
        expect_kernel(family, name)
    with _lock:
        if name is None:
            _overrides.pop(family, None)
        else:
            _overrides[family] = name
        _cache.clear()


@contextmanager
def override(family: str, name: str) -> Iterator[None]:
    """Force one kernel for a family while the block runs (process-wide, not per thread)."""
    before = _overrides.get(family)
    set_override(family, name)
    try:
        yield
    finally:
        set_override(family, before)
