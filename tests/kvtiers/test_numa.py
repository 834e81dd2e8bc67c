# SPDX-License-Identifier: Apache-2.0
"""L2 lies near its GPU where the machine says which memory that is."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from kvtiers import numa
from kvtiers.host_region import HostRegion

PCI_ID = "0000:1B:00.0"


def machine(root: Path, nodes: str, gpu_node: int | None) -> Path:
    """A /sys that says so."""
    (root / "devices/system/node").mkdir(parents=True)
    (root / "devices/system/node/has_memory").write_text(f"{nodes}\n")
    if gpu_node is not None:
        device = root / "bus/pci/devices" / PCI_ID.lower()
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{gpu_node}\n")
    return root


@pytest.mark.parametrize(
    ("nodes", "gpu_node", "expected"),
    [("0-1", 1, 1), ("0,2-3", 3, 3), ("0", 0, None), ("0-1", -1, None), ("0-1", None, None)],
)
def test_memory_is_bound_to_the_node_of_its_gpu_where_there_is_a_choice(
    tmp_path: Path, nodes: str, gpu_node: int | None, expected: int | None
) -> None:
    asked: list[tuple[int, int, int]] = []

    def mbind(address: int, num_bytes: int, node: int) -> int:
        asked.append((address, num_bytes, node))
        return 0

    sys = machine(tmp_path, nodes, gpu_node)
    assert numa.put_near_gpu(4096, 8192, PCI_ID, sys=sys, mbind=mbind) == expected
    assert asked == ([] if expected is None else [(4096, 8192, expected)])


def test_a_kernel_that_refuses_leaves_the_memory_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sys = machine(tmp_path, "0-1", 1)
    assert numa.put_near_gpu(0, 4096, PCI_ID, sys=sys, mbind=lambda *_: 1) is None
    assert "errno 1" in caplog.text


def test_a_machine_without_a_word_on_nodes_has_one(tmp_path: Path) -> None:
    assert numa.nodes_of(tmp_path) == [0]
    assert numa.node_of_gpu(PCI_ID, tmp_path) is None


def test_the_system_call_takes_a_region_and_its_bytes_stay() -> None:
    region = HostRegion(4 * mmap.PAGESIZE)
    region.memory[5] = 77
    # A sandbox may forbid the call; what it may not do is to harm the memory.
    assert numa._mbind(region.address, region.num_bytes, numa.nodes_of()[0]) in (0, 1, 38)
    assert region.memory[5] == 77
    assert numa._mbind(region.address, region.num_bytes, 1000) != 0
