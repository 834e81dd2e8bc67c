# SPDX-License-Identifier: Apache-2.0
"""The instruction levels of the compiled extension, as the registry sees them.

Does not know: what a kernel computes. One C++ function serves all levels; each level is registered
as a kernel of its own, so that selection, explanation and override work as for any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kernels.registry import Priority, accept_all, register_kernel
from kernels.signature import CallSignature


@dataclass(frozen=True, slots=True)
class Level:
    """One level: its name in the extension, its band, the CPU features it needs."""

    name: str
    priority: Priority
    features: frozenset[str]

    @property
    def kernel_name(self) -> str:
        """The name under which kernels of this level are registered."""
        return f"cpu_{self.name}"


_AVX512 = frozenset(
    {
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512dq",
        "avx512_vnni",
        "avx512_bf16",
    }
)
LEVELS = (
    Level("portable", Priority.PORTABLE, frozenset()),
    Level("avx512", Priority.PERFORMANT, _AVX512),
    Level("amx", Priority.SPECIALIZED, _AVX512 | {"amx_tile", "amx_bf16"}),
)


def register_levels(
    family: str,
    make: Callable[[str], Callable[..., Any]],
    *,
    formats: Mapping[str, set[str]],
    refuses: Callable[[CallSignature], str | None] = accept_all,
    levels: tuple[Level, ...] = LEVELS,
) -> None:
    """Register `make(level name)` for every level of a family."""
    for level in levels:
        register_kernel(
            family,
            level.kernel_name,
            priority=level.priority,
            device="cpu",
            features=level.features,
            formats=formats,
            refuses=refuses,
        )(make(level.name))
