# SPDX-License-Identifier: Apache-2.0
"""How much memory is free for KV, container limits included.

Does not know: pages, models.
"""

from __future__ import annotations

from pathlib import Path

_CGROUP_V2 = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current")
_CGROUP_V1 = (
    "sys/fs/cgroup/memory/memory.limit_in_bytes",
    "sys/fs/cgroup/memory/memory.usage_in_bytes",
)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes this process may still take: the least that the kernel and its cgroup allow.

    Args:
        root: the directory that holds proc and sys.

    Raises:
        OSError: /proc/meminfo cannot be read.
    """
    bounds = [_available(root / "proc/meminfo")]
    for limit_name, used_name in (_CGROUP_V2, _CGROUP_V1):
        limit, used = _number(root / limit_name), _number(root / used_name)
        if limit is not None and used is not None:
            bounds.append(max(0, limit - used))
    return min(bounds)


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
