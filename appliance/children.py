# SPDX-License-Identifier: Apache-2.0
"""The Mooncake processes of this machine: one owner of memory and disk, and a master where none is
given.

They are never needed to serve: where one cannot run, the store is down, says why, and serving
goes on. Does not know: what is stored, the store's client. The engine learns where they listen
from a file in its run directory (`kvtiers.mooncake_endpoints` reads it).

Restart rules, measured with 0.3.13: a master that died comes back alone (the owner mounts again
in 2 s, objects on disk are back). An owner that died takes the master with it: started again
within the master's time-to-live alone, all it had, disk included, would be forgotten once that
ran out. A master that is not ours cannot be restarted: its time-to-live is waited for.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from appliance.process_spawn import describe_exit, spawn_command

logger = logging.getLogger(__name__)

ENDPOINTS_FILE = "mooncake.json"
LOOPBACK = "127.0.0.1"
# How long a master remembers an owner that died, and a page its writer left half written.
CLIENT_TTL_S = 5
ABANDONED_PUT_S = 5
LEASE_MS = 3000
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 15.0
STEADY_S = 30.0  # alive for so long: the next death counts as the first
READY_S = 10.0
STOP_S = 3.0
OWNER_THREADS = 2
# A bucket is written when it is full: of one object, so that the last pages of a session are on
# disk within a heartbeat too, and not only when others have filled theirs up.
BUCKET_KEYS = 1
# Through which pages come back from disk. The default takes 1.3 GB of memory and 2 s at start.
DISK_BUFFER_BYTES = 128 << 20
# Parts of its quota at which the owner deletes the oldest files, and down to which. By default 0.9
# and 0.8: that leaves too little behind what the engine keeps there (kvtiers.mooncake_pages).
DISK_EVICTS_AT = "0.97"
DISK_EVICTS_DOWN_TO = "0.95"


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """What runs on this machine."""

    master: str = ""
    """host:port of a master that runs elsewhere; empty: one of our own, on the loopback."""
    metrics: str = ""
    """host:port of that master's metrics; empty: it is not asked."""
    protocol: str = "tcp"
    """tcp | rdma."""
    device: str = ""
    """RDMA device names, comma separated."""
    segment_bytes: int = 4 << 30
    ssd_dir: str = ""
    """Directory of the disk tier; empty: none."""
    ssd_quota_bytes: int = 0


@dataclass(slots=True)
class _Process:
    """One of the two and when it may start (again)."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    start_at_s: float | None = None
    deaths_in_row: int = 0
    starts: int = 0

    def note_death(self, now_s: float) -> float:
        """How long to wait before it is started again."""
        if now_s - self.started_s > STEADY_S:
            self.deaths_in_row = 0
        self.deaths_in_row += 1
        return float(min(FIRST_BACKOFF_S * 2 ** (self.deaths_in_row - 1), MAX_BACKOFF_S))


@dataclass(slots=True)
class MooncakeChildren:
    """Starts both, looks after them in `watch`, stops them. All on the main thread."""

    settings: MooncakeSettings
    run_dir: Path
    programs: Path = Path(sys.executable).parent
    """Where `mooncake_master` and `mooncake_client` are: the wheel puts them beside Python."""
    now_s: Callable[[], float] = time.monotonic
    _master: _Process = field(default_factory=lambda: _Process("mooncake_master"))
    _owner: _Process = field(default_factory=lambda: _Process("mooncake_client"))
    _ports: dict[str, int] = field(default_factory=dict)
    _host: str = LOOPBACK

    def start(self) -> None:
        """Choose ports, say where they are, start. Never raises for a process that cannot run."""
        if self.settings.master:
            self._host = local_address_towards(self.settings.master)
        self.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.settings.ssd_dir:
            Path(self.settings.ssd_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._choose_ports("master", "metrics", "owner")
        now_s = self.now_s()
        self._master.start_at_s = None if self.settings.master else now_s
        self._owner.start_at_s = now_s
        self.watch()

    def watch(self) -> bool:
        """Notice deaths and start what is due; called every fraction of a second.

        Returns whether other processes run now than before.
        """
        now_s = self.now_s()
        before = self.pids
        if self._has_died(self._owner, now_s):
            self._restart_owner(now_s)
        if self._has_died(self._master, now_s):
            self._restart_master(now_s)
        if self._is_due(self._master, now_s):
            self._launch(self._master, self._master_command(), {}, now_s)
        # An owner that finds no master ends at once: it waits for the master to listen.
        if self._is_due(self._owner, now_s) and self._has_master(now_s):
            self._launch(self._owner, self._owner_command(), self._owner_env(), now_s)
        return self.pids != before

    def stop(self) -> None:
        """End both, the owner first, and take back where they were."""
        (self.run_dir / ENDPOINTS_FILE).unlink(missing_ok=True)
        for child in (self._owner, self._master):
            child.start_at_s = None
            _end(child)

    @property
    def pids(self) -> dict[str, int]:
        """Those that run now, by name."""
        running = (self._master, self._owner)
        return {child.name: child.process.pid for child in running if child.process is not None}

    @property
    def restarts(self) -> dict[str, int]:
        ours = (self._owner,) if self.settings.master else (self._master, self._owner)
        return {child.name: max(0, child.starts - 1) for child in ours}

    @property
    def master_address(self) -> str:
        return self.settings.master or f"{LOOPBACK}:{self._ports['master']}"

    @property
    def owner_address(self) -> str:
        return f"{self._host}:{self._ports['owner']}"

    @property
    def _metrics_address(self) -> str:
        return f"{LOOPBACK}:{self._ports.get('metrics', 0)}"

    def _has_died(self, child: _Process, now_s: float) -> bool:
        if child.process is None or child.process.poll() is None:
            return False
        how = describe_exit(child.process.returncode)
        child.process = None
        child.start_at_s = now_s + child.note_death(now_s)
        logger.warning(
            "%s ended (%s); restart in %.1f s", child.name, how, child.start_at_s - now_s
        )
        return True

    def _restart_owner(self, now_s: float) -> None:
        if self._owner.deaths_in_row > 1:  # perhaps somebody took its port meanwhile
            self._choose_ports("owner")
        if self.settings.master:
            if self.settings.ssd_dir:
                self._owner.start_at_s = now_s + CLIENT_TTL_S + 1
        elif self._master.process is not None:
            _kill(self._master)
            self._master.start_at_s = self._owner.start_at_s

    def _restart_master(self, now_s: float) -> None:
        if self._master.deaths_in_row > 1:
            self._choose_ports("master", "metrics")
            if self._owner.process is not None:  # it only knows the old port
                _kill(self._owner)
                self._owner.start_at_s = now_s

    def _is_due(self, child: _Process, now_s: float) -> bool:
        return child.process is None and child.start_at_s is not None and now_s >= child.start_at_s

    def _has_master(self, now_s: float) -> bool:
        if _listens(self.master_address):
            return True
        self._owner.start_at_s = now_s + FIRST_BACKOFF_S
        return False

    def _launch(
        self, child: _Process, command: list[str], env: dict[str, str], now_s: float
    ) -> None:
        try:
            child.process = spawn_command(command, more_env=env, death_signal=signal.SIGKILL)
        except OSError as error:
            if child.deaths_in_row == 0:
                logger.warning("%s cannot be started: %s", child.name, error.strerror)
            child.start_at_s = now_s + child.note_death(now_s)
            child.started_s = now_s
            return
        child.starts += 1
        child.started_s, child.start_at_s = now_s, None
        self._write_endpoints()

    def _choose_ports(self, *names: str) -> None:
        for name in names:
            self._ports[name] = free_port(self._host)
        self._write_endpoints()

    def _write_endpoints(self) -> None:
        settings = self.settings
        disk_bytes = settings.ssd_quota_bytes if settings.ssd_dir else 0
        values = {
            "owner": f"{self._host}:{self._ports.get('owner', 0)}",
            "master": settings.master or f"{LOOPBACK}:{self._ports['master']}",
            "metrics": settings.metrics if settings.master else self._metrics_address,
            "capacity_bytes": settings.segment_bytes + disk_bytes,
            "disk_bytes": disk_bytes,
            "has_disk": bool(settings.ssd_dir),
            "starts": self._owner.starts,
        }
        path = self.run_dir / ENDPOINTS_FILE
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(values))
        temporary.replace(path)

    def _master_command(self) -> list[str]:
        command = [
            str(self.programs / "mooncake_master"),
            f"--rpc_address={LOOPBACK}",
            f"--rpc_port={self._ports['master']}",
            f"--metrics_host={LOOPBACK}",
            f"--metrics_port={self._ports['metrics']}",
            f"--default_kv_lease_ttl={LEASE_MS}",
            f"--client_ttl={CLIENT_TTL_S}",
            f"--put_start_discard_timeout_sec={ABANDONED_PUT_S}",
            "--logtostderr=true",
            "--minloglevel=2",
        ]
        if self.settings.ssd_dir:  # what is evicted from memory is on disk by then
            evicts = ("--eviction_high_watermark_ratio=0.85", "--eviction_ratio=0.1")
            return [*command, *evicts, "--enable_offload=true"]
        # The engine keeps what is there at 0.8 (kvtiers.mooncake_pages): the last resort.
        return [*command, "--eviction_high_watermark_ratio=0.95", "--eviction_ratio=0.05"]

    def _owner_command(self) -> list[str]:
        settings = self.settings
        command = [
            str(self.programs / "mooncake_client"),
            f"--host={self._host}",
            f"--port={self._ports['owner']}",
            f"--master_server_address={self.master_address}",
            "--metadata_server=P2PHANDSHAKE",
            f"--protocol={settings.protocol}",
            f"--device_names={settings.device}",
            f"--global_segment_size={settings.segment_bytes}",
            f"--threads={OWNER_THREADS}",
            "--logtostderr=true",
            "--minloglevel=2",
        ]
        return [*command, "--enable_offload=true"] if settings.ssd_dir else command

    def _owner_env(self) -> dict[str, str]:
        env = {"MC_RPC_TIMEOUT_MS": "1000", "MC_TRANSFER_TIMEOUT": "5"}
        if self.settings.ssd_dir:
            quota = str(self.settings.ssd_quota_bytes)
            env |= {
                "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": self.settings.ssd_dir,
                "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": str(BUCKET_KEYS),
                "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
                "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(DISK_BUFFER_BYTES),
                "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": quota,
                "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": quota,
                "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "lru",
                "MOONCAKE_OFFLOAD_DISK_EVICTION_HIGH_WATERMARK_RATIO": DISK_EVICTS_AT,
                "MOONCAKE_OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO": DISK_EVICTS_DOWN_TO,
            }
        return {name: os.environ.get(name, value) for name, value in env.items()}


def free_port(host: str) -> int:
    """A port nobody listens on now; another process may take it before it is used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def local_address_towards(address: str) -> str:
    """The address of this machine that packets to `address` leave from."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except (OSError, ValueError):
            return LOOPBACK
        return str(probe.getsockname()[0])


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 0.2).close()
    except (OSError, ValueError):
        return False
    return True


def _kill(child: _Process) -> None:
    """At once: whoever watches has others to look after, and there is nothing to save."""
    if child.process is not None:
        child.process.kill()
        child.process.wait()
        child.process = None


def _end(child: _Process) -> None:
    process, child.process = child.process, None
    if process is None:
        return
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
