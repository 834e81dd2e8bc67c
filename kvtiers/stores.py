# SPDX-License-Identifier: Apache-2.0
"""Opens the store a configuration asks for, with its guards around it.

Does not know: the engine's configuration; it is told what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtiers.breaker import BreakerStore
from kvtiers.deadline_store import Deadlines, DeadlineStore
from kvtiers.errors import TierConfigError
from kvtiers.file_store import FileStore
from kvtiers.mooncake_endpoints import ENDPOINTS_FILE
from kvtiers.mooncake_store import MooncakeStore
from kvtiers.store import Store

STORE_KINDS = ("file", "mooncake", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """What to open. Raises TierConfigError naming the field."""

    kind: str
    """file | mooncake | none."""
    layout_fingerprint: str
    """`KvLayout.fingerprint()` of the pages."""
    object_bytes: int
    """`objects.object_bytes(layout.page_bytes)`."""
    directory: str = ""
    """file: where it lives; a rank has a directory of its own in it."""
    quota_bytes: int = 0
    """file: what it may take on disk; bytes."""
    run_dir: str = ""
    """mooncake: where the supervisor says which ports its processes have."""
    rank: int = 0

    def __post_init__(self) -> None:
        if self.kind not in STORE_KINDS:
            raise TierConfigError("kind", self.kind, " | ".join(STORE_KINDS))
        if self.kind == "file" and not self.directory:
            raise TierConfigError("directory", "", "a directory, where kind is file")
        if self.kind == "file" and self.quota_bytes < 1:
            raise TierConfigError("quota_bytes", self.quota_bytes, "1 or more")
        if self.kind == "mooncake" and not self.run_dir:
            raise TierConfigError("run_dir", "", "a directory, where kind is mooncake")


def open_store(spec: StoreSpec) -> Store | None:
    """The store, None for kind `none`. One that cannot be had now is down, says why, and is tried
    again: nothing about a store fails a start."""
    if spec.kind == "none":
        return None
    return BreakerStore(_open_bare(spec), spec.layout_fingerprint)


def _open_bare(spec: StoreSpec) -> Store:
    if spec.kind == "mooncake":  # has deadlines of its own, around each call of the library
        endpoints = Path(spec.run_dir) / ENDPOINTS_FILE
        return MooncakeStore(endpoints, spec.layout_fingerprint, spec.object_bytes)
    directory = Path(spec.directory) / f"rank-{spec.rank}"
    store = FileStore(directory, spec.quota_bytes, spec.layout_fingerprint, opens_now=False)
    guarded = DeadlineStore(store, Deadlines())
    guarded.open()
    return guarded
