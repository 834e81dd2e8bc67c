# SPDX-License-Identifier: Apache-2.0
"""Puts L2 into the memory that is nearest to the GPU, where a machine has more than one node.

A copy from the other socket's memory crosses the link between them, which is slower than PCIe 5.
Does not know: what lies in the memory. Linux alone; elsewhere, or where the kernel says no, the
memory stays where it falls, and the log says so.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

SYS = Path("/sys")
MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call
PREFERRED = 1  # where the node is full another one lends: slower, but not the end of the process
MOVE_PAGES = 2

Mbind = Callable[[int, int, int], int]  # address, bytes, node -> errno, 0: done


def nodes_of(sys: Path = SYS) -> list[int]:
    """The machine's memory nodes; [0] where nothing is said of them."""
    try:
        return _read_list((sys / "devices/system/node/has_memory").read_text())
    except (OSError, ValueError):
        return [0]


def node_of_gpu(pci_id: str, sys: Path = SYS) -> int | None:
    """The node a PCI device hangs on; None where the machine does not say."""
    try:
        node = int((sys / f"bus/pci/devices/{pci_id.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def put_near_gpu(
    address: int,
    num_bytes: int,
    pci_id: str,
    *,
    sys: Path = SYS,
    mbind: Mbind | None = None,
) -> int | None:
    """Prefer the GPU's node for a range of memory, moving what is there; the node, if it was done.

    Args:
        address: start of the range, at a page's border. Before it is pinned: pinned memory stays.
        pci_id: domain:bus:device.function, as in /sys/bus/pci/devices.
    """
    nodes = nodes_of(sys)
    if len(nodes) < 2:
        logger.info("L2 is not bound to a NUMA node: the machine has one")
        return None
    node = node_of_gpu(pci_id, sys)
    if node is None or node not in nodes:
        logger.warning("L2 is not bound to a NUMA node: nobody says which is near GPU %s", pci_id)
        return None
    error = (mbind or _mbind)(address, num_bytes, node)
    if error:
        logger.warning("L2 is not bound to NUMA node %d: mbind says errno %d", node, error)
        return None
    logger.info("L2 lies on NUMA node %d of %s, near GPU %s", node, nodes, pci_id)
    return node


def _mbind(address: int, num_bytes: int, node: int) -> int:
    number = MBIND.get(platform.machine())
    if number is None:
        return 38  # ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    arguments = (
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(PREFERRED),
        mask,
        ctypes.c_ulong(64 * len(mask) + 1),
        ctypes.c_uint(MOVE_PAGES),
    )
    return 0 if libc.syscall(*arguments) == 0 else ctypes.get_errno()


def _read_list(text: str) -> list[int]:
    """Numbers of a kernel list: "0-1,4"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
