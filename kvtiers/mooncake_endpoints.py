# SPDX-License-Identifier: Apache-2.0
"""Where the Mooncake processes of this machine listen: a file their supervisor keeps.

Does not know: who starts them, the store. The file is one JSON object: `owner` and `master` are
host:port, `metrics` is the master's HTTP address or "", `capacity_bytes` is what the owner's
memory segment (and disk tier) hold, `disk_bytes` what the disk tier does, `has_disk` whether there
is one, `starts` how often the owner was started: one that is new knows no shared memory of the one
before.
"""

from __future__ import annotations

import http.client
import socket
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import msgspec

ENDPOINTS_FILE = "mooncake.json"
CONNECT_TIMEOUT_S = 0.5
METRICS_TIMEOUT_S = 1.0
LIST_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeEndpoints:
    """Addresses as host:port."""

    owner: str
    master: str = ""
    metrics: str = ""
    capacity_bytes: int = 0
    disk_bytes: int = 0
    has_disk: bool = False
    starts: int = 0


def read_endpoints(path: Path) -> MooncakeEndpoints:
    """What the file says now. Raises: OSError, where there is none or it makes no sense."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MooncakeEndpoints)
    except msgspec.MsgspecError as error:
        raise OSError(f"{path}: {error}") from None


def check_listening(address: str) -> None:
    """Raises OSError, naming the address, where nobody takes a connection within half a second.

    Asked before every set-up: the library itself would try for 4 s.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise OSError(f"nobody listens on {address}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeUsage:
    """What the master counts, over all engines."""

    num_objects: int = 0
    num_on_disk: int = 0
    memory_bytes: int = 0
    """In use; of all owners."""
    memory_capacity: int = 0
    disk_bytes: int = 0
    disk_capacity: int = 0
    num_put: int = 0
    """Objects that ever were put, since the master began."""
    num_evicted: int = 0
    """Objects, or copies of them, that the master itself let go."""


def read_usage(metrics: str) -> MooncakeUsage:
    """Ask the master at this HTTP address; raises OSError where it does not say."""
    text = _read(metrics, "metrics", METRICS_TIMEOUT_S)
    lines = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
    values = {name: value for name, _, value in lines}

    def count(name: str, otherwise: str = "0") -> int:
        return int(float(values.get(name, otherwise)))

    try:
        return MooncakeUsage(
            num_objects=count("master_key_count", ""),
            num_on_disk=count("file_cache_nums_"),
            memory_bytes=count("master_allocated_bytes", ""),
            memory_capacity=count("master_total_capacity_bytes", ""),
            disk_bytes=count("master_allocated_file_size_bytes"),
            disk_capacity=count("master_total_file_capacity_bytes"),
            num_put=count("master_put_end_requests_total")
            - count("master_put_end_failures_total")
            + count("master_batch_put_end_items_total")
            - count("master_batch_put_end_failed_items_total"),
            num_evicted=count("master_evicted_key_count"),
        )
    except (ValueError, OverflowError):
        raise OSError(f"{metrics} does not say what it holds") from None


def list_keys(metrics: str) -> set[str]:
    """The keys of all objects, those that are being written too; raises OSError."""
    return set(_read(metrics, "get_all_keys", LIST_TIMEOUT_S).split("\n")) - {""}


def _read(metrics: str, path: str, timeout_s: float) -> str:
    try:
        with urllib.request.urlopen(f"http://{metrics}/{path}", timeout=timeout_s) as answer:
            raw: bytes = answer.read()
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"{metrics}: {error}") from None
    return raw.decode("utf-8", "replace")
