# SPDX-License-Identifier: Apache-2.0
"""The kernels that exist: one spec per implementation, by family.

Does not know: how one is chosen (selection.py), what a kernel computes (ops/, reference/).
A plugin is an entry point of the group "moorage.kernels": a callable without arguments that calls
`register_kernel` with `Priority.PLUGIN`.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, TypeVar

from kernels.errors import KernelConflictError, KernelInputError
from kernels.platform import Capability
from kernels.signature import CallSignature

logger = logging.getLogger(__name__)

PLUGIN_GROUP = "moorage.kernels"

Fn = TypeVar("Fn", bound=Callable[..., Any])


class Priority(enum.IntEnum):
    """Bands, low to high. Within a band the later registration wins, so a plugin can refine one."""

    TRIAL = -10  # not yet run on the device it is for: chosen by an override alone
    REFERENCE = 0  # plain torch: the ground truth
    PORTABLE = 10  # compiled, any CPU or GPU
    PERFORMANT = 20  # needs a feature level that most machines have
    SPECIALIZED = 30  # needs one chip's units, or takes one shape class only
    PLUGIN = 40


def accept_all(signature: CallSignature) -> str | None:
    """Refuse nothing."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """One implementation. `formats` names, per argument, what it takes; an argument that it does
    not name may have any format. `refuses` returns why a call's traits do not suit it, or None."""

    family: str
    name: str
    fn: Callable[..., Any]
    priority: Priority
    device: str = "any"
    features: frozenset[str] = frozenset()
    min_sm: tuple[int, int] = (0, 0)
    formats: Mapping[str, frozenset[str]] = field(default_factory=dict)
    refuses: Callable[[CallSignature], str | None] = accept_all

    def reason_against(self, signature: CallSignature, capability: Capability) -> str | None:
        """Return why this kernel cannot run the call, or None where it can."""
        if self.device not in ("any", signature.device):
            return f"runs on {self.device}, the call is on {signature.device}"
        lack = capability.lacks(self.features, self.min_sm)
        if lack is not None:
            return lack
        for argument, given in signature.formats:
            allowed = self.formats.get(argument)
            if allowed is not None and given not in allowed:
                return f"{argument} is {given}, it takes {'/'.join(sorted(allowed))}"
        try:
            return self.refuses(signature)
        except Exception as error:
            if self.priority is not Priority.PLUGIN:
                raise
            # Others run the call: a plugin must not take the server down.
            return f"its check of the call raised {type(error).__name__}: {error}"


class Registry:
    """Specs by family in order of registration. Thread-safe; `generation` grows on every change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, dict[str, KernelSpec]] = {}
        self._plugins_loaded = False
        self.generation = 0

    def add(self, spec: KernelSpec) -> None:
        """Add one spec.

        Raises:
            KernelConflictError: if the family has a kernel of that name.
        """
        with self._lock:
            family = self._families.setdefault(spec.family, {})
            if spec.name in family:
                raise KernelConflictError(
                    f"{spec.family}: kernel {spec.name!r} is registered twice"
                )
            family[spec.name] = spec
            self.generation += 1

    def remove(self, family: str, name: str) -> None:
        """Take one spec out again (a plugin that is unloaded, a test that ends)."""
        with self._lock:
            del self._families[family][name]
            if not self._families[family]:
                del self._families[family]
            self.generation += 1

    def families(self) -> list[str]:
        """Return the family names, sorted."""
        with self._lock:
            return sorted(self._families)

    def specs(self, family: str) -> list[KernelSpec]:
        """Return a family's specs, best first."""
        with self._lock:
            specs = list(self._families.get(family, {}).values())
        ranked = sorted(enumerate(specs), key=lambda item: (item[1].priority, item[0]))
        return [spec for _, spec in reversed(ranked)]

    def load_plugins(self) -> None:
        """Call every installed entry point of the group, once per process.

        A plugin that raises is logged and left out, with all that it had registered by then: it
        must not take the server down.
        """
        with self._lock:
            if self._plugins_loaded:
                return
            self._plugins_loaded = True
        for point in entry_points(group=PLUGIN_GROUP):
            before = self._names()
            try:
                point.load()()
            except (Exception, SystemExit):
                for family, name in self._names() - before:
                    self.remove(family, name)
                logger.warning("kernel plugin %s failed to load", point.name, exc_info=True)

    def _names(self) -> set[tuple[str, str]]:
        """Every kernel, by family and name."""
        with self._lock:
            return {(family, name) for family, specs in self._families.items() for name in specs}


REGISTRY = Registry()


def register_kernel(
    family: str,
    name: str,
    *,
    priority: Priority,
    device: str = "any",
    features: frozenset[str] | set[str] = frozenset(),
    min_sm: tuple[int, int] = (0, 0),
    formats: Mapping[str, set[str] | frozenset[str]] | None = None,
    refuses: Callable[[CallSignature], str | None] = accept_all,
) -> Callable[[Fn], Fn]:
    """Register the decorated function as one implementation of a family.

    Args:
        family: the op, e.g. "paged_attention".
        name: unique in the family, e.g. "cpu_amx".
        priority: the band; the highest band that accepts a call runs it.
        device: torch device type, or "any".
        features: CPU features it needs (kernels.platform.CPU_FEATURES).
        min_sm: least CUDA compute capability.
        formats: accepted formats per argument name.
        refuses: returns why a call's traits do not suit, or None.

    Raises:
        KernelConflictError: if the family has a kernel of that name.
        KernelInputError: if the priority is none of the bands.
    """
    if type(priority) is not Priority:
        bands = ", ".join(f"Priority.{band.name}" for band in Priority)
        raise KernelInputError("priority", repr(priority), bands)

    def decorate(fn: Fn) -> Fn:
        accepted = {argument: frozenset(names) for argument, names in (formats or {}).items()}
        REGISTRY.add(
            KernelSpec(
                family=family,
                name=name,
                fn=fn,
                priority=priority,
                device=device,
                features=frozenset(features),
                min_sm=min_sm,
                formats=accepted,
                refuses=refuses,
            )
        )
        return fn

    return decorate
