# SPDX-License-Identifier: Apache-2.0
"""How much memory is free for KV, container limits included.

Does not know: pages, models.
"""

from __future__ import annotations

from pathlib import Path

import torch

# (limit, usage, statistics, name of the reclaimable part in those)
_CGROUPS = (
    (
        "sys/fs/cgroup/memory.max",
        "sys/fs/cgroup/memory.current",
        "sys/fs/cgroup/memory.stat",
        "inactive_file",
    ),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
        "sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes this process may still take: the least that the kernel and its cgroup allow.

    Args:
        root: the directory that holds proc and sys.

    Raises:
        OSError: /proc/meminfo cannot be read.
    """
    bounds = [_available(root / "proc/meminfo")]
    for limit_name, used_name, stat_name, reclaimable_name in _CGROUPS:
        limit, used = _number(root / limit_name), _number(root / used_name)
        if limit is not None and used is not None:
            # Files read once (the model's, say) count as used until somebody needs the memory.
            reclaimable = _stat(root / stat_name, reclaimable_name)
            bounds.append(max(0, limit - max(0, used - reclaimable)))
    return min(bounds)


def free_device_bytes(device: torch.device) -> int:
    """Bytes of a GPU that nobody holds, torch's own unused cache included."""
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"{meminfo} has no MemAvailable")


def _number(path: Path) -> int | None:
    """The number a cgroup file holds; None where there is none ("max", no such file)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    """One value of a file of "name value" lines; 0 where it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
