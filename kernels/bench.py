# SPDX-License-Identifier: Apache-2.0
"""Times the kernels of a family on the cases of `verify`, the kernel alone.

Does not know: what a family computes. Small cases: for floors and large shapes see benchmarks/.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.cases import Case
from kernels.errors import NoKernelFoundError
from kernels.registry import REGISTRY, KernelSpec
from kernels.selection import override
from kernels.verify import all_cases


@dataclass(frozen=True, slots=True)
class Timing:
    """Median microseconds of a case on a kernel; None where it refuses the call, or `raised`."""

    family: str
    kernel: str
    case: str
    us: float | None
    raised: str | None = None


def time_family(family: str, repeats: int) -> Iterator[Timing]:
    """Yield the time of every case on every kernel of the family, the reference included."""
    for case in all_cases().get(family, []):
        for spec in REGISTRY.specs(family):
            try:
                timing = Timing(family, spec.name, case.name, _median_us(spec, case, repeats))
            except Exception as error:  # a plugin's may be any
                said = f"{type(error).__name__}: {error}"
                timing = Timing(family, spec.name, case.name, None, said)
            yield timing


def _median_us(spec: KernelSpec, case: Case, repeats: int) -> float | None:
    samples: list[float] = []
    try:
        with _stopwatch(spec, samples), override(spec.family, spec.name):
            for _ in range(repeats + 1):  # the first one compiles, packs, allocates
                case.run()
    except NoKernelFoundError:
        return None
    return statistics.median(samples[1:])


@contextmanager
def _stopwatch(spec: KernelSpec, samples: list[float]) -> Iterator[None]:
    """The kernel with its time taken, in its place in the registry."""

    def timed(*arguments: Any, **options: Any) -> Any:
        _wait()  # the arguments may still be on their way
        start = time.perf_counter()
        result = spec.fn(*arguments, **options)
        _wait()
        samples.append((time.perf_counter() - start) * 1e6)
        return result

    _swap(spec, timed)
    try:
        yield
    finally:
        _swap(spec, spec.fn)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _swap(spec: KernelSpec, fn: Callable[..., Any]) -> None:
    REGISTRY.remove(spec.family, spec.name)
    REGISTRY.add(replace(spec, fn=fn))
