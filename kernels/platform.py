# SPDX-License-Identifier: Apache-2.0
"""Facts about the devices of this process: what the CPU and the GPU can do.

Does not know: kernels, models. Imports neither triton nor the compiled extension.
"""

from __future__ import annotations

import ctypes
import functools
import platform as _host
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

# Names as Linux prints them in /proc/cpuinfo; only what a kernel may ask for.
CPU_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)

_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
_SYS_ARCH_PRCTL_X86_64 = 158


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What one device offers. `sm` is the CUDA compute capability, (0, 0) on a CPU."""

    device: str
    features: frozenset[str] = field(default_factory=frozenset)
    sm: tuple[int, int] = (0, 0)

    def lacks(self, features: Iterable[str], min_sm: tuple[int, int]) -> str | None:
        """Return what is missing, or None."""
        missing = sorted(set(features) - self.features)
        if missing:
            return f"the {self.device} lacks {', '.join(missing)}"
        if self.sm < min_sm:
            return f"compute capability {self.sm} is below {min_sm}"
        return None


def _flags_of_cpuinfo(text: str) -> set[str]:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return set(value.split())
    return set()


def _amx_granted() -> bool:
    """Ask Linux for the AMX tile state: without the permission the first tile load is a SIGILL."""
    if _host.system() != "Linux" or _host.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(
        libc.syscall(_SYS_ARCH_PRCTL_X86_64, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
    )


@functools.cache
def cpu_capability() -> Capability:
    """Return what this CPU offers; AMX only where the kernel grants its tile state."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            flags = _flags_of_cpuinfo(handle.read())
    except OSError:
        flags = set()
    found = {name for name in CPU_FEATURES if name in flags}
    if "amx_tile" in found and not _amx_granted():
        found -= {"amx_tile", "amx_bf16", "amx_int8"}
    return Capability(device="cpu", features=frozenset(found))


@functools.cache
def cuda_capability() -> Capability:
    """Return what the current CUDA device offers."""
    return Capability(device="cuda", sm=torch.cuda.get_device_capability())


def capability_of(device: str) -> Capability:
    """Return the capability of a torch device type ("cpu" or "cuda")."""
    if device == "cuda":
        return cuda_capability()
    if device == "cpu":
        return cpu_capability()
    return Capability(device=device)
