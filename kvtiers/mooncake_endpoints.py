# SPDX-License-Identifier: Apache-2.0
"""Where the Mooncake processes of this machine listen: a file their supervisor keeps.

Does not know: who starts them, the store. The file is one JSON object: `owner` and `master` are
host:port, `metrics` is the master's HTTP address or "", `capacity_bytes` is what the owner's
memory segment (and disk tier) hold, `has_disk` whether there is a disk tier, `starts` how often
the owner was started: one that is new knows no shared memory of the one before.
"""

from __future__ import annotations

import socket
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import msgspec

ENDPOINTS_FILE = "mooncake.json"
CONNECT_TIMEOUT_S = 0.5
METRICS_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeEndpoints:
    """Addresses as host:port."""

    owner: str
    master: str = ""
    metrics: str = ""
    capacity_bytes: int = 0
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
    used_bytes: int = 0
    """Of memory, and of the disk tier."""


def read_usage(metrics: str) -> MooncakeUsage:
    """Ask the master at this HTTP address; raises OSError where it does not say."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=METRICS_TIMEOUT_S) as answer:
        text = answer.read().decode("utf-8", "replace")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    try:
        return MooncakeUsage(
            num_objects=int(float(values["master_key_count"])),
            num_on_disk=int(float(values.get("file_cache_nums_", "0"))),
            used_bytes=int(float(values["master_allocated_bytes"]))
            + int(float(values.get("master_allocated_file_size_bytes", "0"))),
        )
    except (KeyError, ValueError):
        raise OSError(f"{metrics} does not say what it holds") from None
