# SPDX-License-Identifier: Apache-2.0
"""Runs the appliance's processes: starts, watches, restarts and drains them.

It binds the listening socket and keeps it open, so that a crash of the API process loses no
connection attempt: they wait in the backlog until the next API process accepts them. Does not
know: HTTP routes, the engine's protocol, what a session is. Imports nothing heavy.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from appliance.children import MooncakeChildren, MooncakeSettings
from appliance.config import ApplianceConfig, write_resolved
from appliance.process_spawn import (
    SUPERVISED_SIGNALS,
    Pulse,
    RestartPolicy,
    describe_exit,
    keep_memory,
    spawn,
)

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 1024
POLL_S = 0.1
EXIT_REFUSED = 1  # configuration or model is wrong
KILL_AFTER_S = 5.0
UNREAD_DRAIN_S = 1.0
ORPHANS_S = 15.0  # beyond their drains, for the children of a supervisor that died
STATE_FILE = "state.json"
CONFIG_FILE = "config.json"
ENGINE_CONFIG_FILE = "engine.json"
ADMIN_KEY_FILE = "admin.key"


class StartError(RuntimeError):
    """The appliance cannot start; the message is the one line that says why."""


@dataclass(slots=True)
class Child:
    """One supervised process and when it may be started again."""

    name: str
    module: str
    args: list[str]
    policy: RestartPolicy
    pass_fds: tuple[int, ...] = ()
    pulse: Pulse | None = None
    process: subprocess.Popen[bytes] | None = None
    restart_at_s: float | None = None
    restarts: int = 0
    hangs: int = 0

    def start(self) -> None:
        if self.pulse is not None:
            self.pulse.reset()
        self.process = spawn(self.module, self.args, pass_fds=self.pass_fds)
        self.restart_at_s = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None


def bind_listener(host: str, port: int) -> socket.socket:
    """Bind and listen on host:port.

    Raises: StartError naming the address and the reason, such as a port in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"server.port: cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def lock_run_dir(run_dir: Path, *, wait_s: float = 0.0) -> IO[str]:
    """Take the run directory for this appliance.

    The lock lasts while the file is open here or in a child that it was passed to. Processes of an
    appliance that died are waited for: what they finish is theirs.

    Raises: StartError if another appliance runs there, or what it left does not end in `wait_s`.
    """
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = (run_dir / "lock").open("w")
    deadline_s = time.monotonic() + wait_s
    is_told = False
    while not _try_lock(lock):
        if read_state(run_dir) is not None:
            lock.close()
            raise StartError(f"server.run_dir: another appliance runs in {run_dir}")
        if time.monotonic() >= deadline_s:
            lock.close()
            raise StartError(f"server.run_dir: another appliance in {run_dir} has not ended yet")
        if not is_told:
            logger.warning("an appliance that died in %s still ends; waiting for it", run_dir)
            is_told = True
        time.sleep(POLL_S)
    return lock


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@dataclass(slots=True)
class Supervisor:
    """One appliance. `run` blocks until it was asked to stop or a process keeps dying.

    engine_module: what `python -m` runs as the engine, with the arguments of engine.process.
    """

    config: ApplianceConfig
    engine_module: str = "engine.process"
    _listener: socket.socket | None = None
    _lock_fd: int = -1
    _children: list[Child] = field(default_factory=list)
    _mooncake: MooncakeChildren | None = None
    _ready: bool = False
    _started_s: float = 0.0

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT (returns 0), or until a process cannot be kept up (1).

        Raises: StartError before anything was started.
        """
        server = self.config.server
        drain_s = max(server.drain_s, self.config.engine.drain_s)
        lock = lock_run_dir(server.run_dir, wait_s=drain_s + ORPHANS_S)
        self._lock_fd = lock.fileno()
        try:
            self._listener = bind_listener(server.host, server.port)
            signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISED_SIGNALS)
            self._start_children()
            return self._watch()
        finally:
            self._stop_children()
            (server.run_dir / STATE_FILE).unlink(missing_ok=True)
            lock.close()

    @property
    def port(self) -> int:
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        host = self.config.server.host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def _start_children(self) -> None:
        assert self._listener is not None
        server = self.config.server
        config_path = server.run_dir / CONFIG_FILE
        write_resolved(self.config, config_path)
        key_path = server.run_dir / ADMIN_KEY_FILE
        key_path.touch(mode=0o600)
        key_path.write_text(secrets.token_urlsafe(24))
        self._started_s = time.monotonic()
        self._start_mooncake()
        fd = self._listener.fileno()
        engine_path = server.run_dir / ENGINE_CONFIG_FILE
        engine_path.write_bytes(self.config.engine.to_json())
        engine_args = ["--config-json", str(engine_path), "--log-level", server.log_level]
        # They outlive the processes: what L2 holds, and the ways to see that each lives.
        memory_fd, pulse, api_pulse = keep_memory(), Pulse(), Pulse()
        engine_args += ["--l2-fd", str(memory_fd), "--heartbeat-fd", str(pulse.fd)]
        api_args = ["--config", str(config_path), "--fd", str(fd)]
        api_args += ["--heartbeat-fd", str(api_pulse.fd)]
        # Both at once: the API process loads its tokenizer while the engine loads its weights.
        for name, module, args, fds, watched in (
            ("engine", self.engine_module, engine_args, (memory_fd, pulse.fd), pulse),
            ("api", "appliance.api_main", api_args, (fd, api_pulse.fd), api_pulse),
        ):
            kept = (*fds, self._lock_fd)  # nobody else starts here before they have ended
            child = Child(name, module, args, RestartPolicy(server.max_restarts), kept, watched)
            self._children.append(child)
            child.start()
        self._write_state()

    def _start_mooncake(self) -> None:
        """Mooncake's processes, where pages are kept there; serving does without them as well."""
        tiers = self.config.engine.tiers
        if tiers.l3 != "mooncake":
            return
        settings = MooncakeSettings(
            master=tiers.mooncake_master,
            metrics=tiers.mooncake_metrics,
            protocol=tiers.mooncake_protocol,
            device=tiers.mooncake_device,
            segment_bytes=tiers.mooncake_segment_bytes,
            ssd_dir=tiers.mooncake_ssd_dir,
            ssd_quota_bytes=tiers.mooncake_ssd_quota_bytes,
        )
        self._mooncake = MooncakeChildren(settings, Path(self.config.engine.run_dir))
        self._mooncake.start()

    def _watch(self) -> int:
        while True:
            received = signal.sigtimedwait(SUPERVISED_SIGNALS, POLL_S)
            if received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT):
                logger.info("stopping: got %s", signal.Signals(received.si_signo).name)
                return 0
            for child in self._children:
                if not self._keep_up(child):
                    return 1
            if self._mooncake is not None and self._mooncake.watch():
                self._write_state()
            if not self._ready and self._answers_ready():
                self._ready = True
                took_s = time.monotonic() - self._started_s
                self._write_state()
                print(f"moorage ready in {took_s:.1f} s: {self.url}", flush=True)

    def _keep_up(self, child: Child) -> bool:
        """Restart a dead child when its time has come; False: it died too often."""
        now_s = time.monotonic()
        self._end_if_hung(child, now_s)
        if child.process is not None and child.process.poll() is not None:
            how = describe_exit(child.process.returncode)
            is_refusal = child.process.returncode == EXIT_REFUSED and not self._ready
            child.process = None
            if is_refusal:  # it said why; starting it again would only say it again
                logger.error("%s process refused to start", child.name)
                return False
            delay_s = child.policy.next_delay_s(now_s)
            if delay_s is None:
                logger.error("%s process ended (%s) too often; giving up", child.name, how)
                return False
            logger.warning("%s process ended (%s); restart in %.2f s", child.name, how, delay_s)
            child.restart_at_s = now_s + delay_s
        if child.restart_at_s is not None and now_s >= child.restart_at_s:
            child.start()
            child.restarts += 1
            self._write_state()
        return True

    def _end_if_hung(self, child: Child, now_s: float) -> None:
        """Kill a child that lives and does nothing; it is restarted as any that died."""
        limit_s = self.config.server.hang_s
        if child.process is None or child.pulse is None or not limit_s:
            return
        silent_s = child.pulse.silent_s(now_s)
        if silent_s > limit_s and child.process.poll() is None:
            logger.error("%s process hangs: no sign of life for %.1f s", child.name, silent_s)
            child.hangs += 1
            child.process.kill()
            child.process.wait()

    def _answers_ready(self) -> bool:
        host = self.config.server.host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        connection = http.client.HTTPConnection(host, self.port, timeout=1.0)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _write_state(self) -> None:
        mooncake = self._mooncake
        state = {
            "url": self.url,
            "port": self.port,
            "ready": self._ready,
            "pids": {
                "supervisor": os.getpid(),
                **{c.name: c.pid for c in self._children},
                **(mooncake.pids if mooncake is not None else {}),
            },
            "restarts": {
                **{child.name: child.restarts for child in self._children},
                **(mooncake.restarts if mooncake is not None else {}),
            },
            "hangs": {child.name: child.hangs for child in self._children},
        }
        path = self.config.server.run_dir / STATE_FILE
        temporary = path.with_suffix(".new")
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(state, indent=1) + "\n")
        temporary.replace(path)

    def _stop_children(self) -> None:
        """Drain: no new connections, the API process finishes its turns, then the engine ends."""
        if self._listener is not None:
            self._listener.close()
        # Once the API process is gone nobody reads what the engine samples: it drains no longer.
        drains_s = (self.config.server.drain_s, min(self.config.engine.drain_s, UNREAD_DRAIN_S))
        for child, drain_s in zip(reversed(self._children), drains_s, strict=False):
            if child.process is not None:
                _stop(child.name, child.process, drain_s)
        if self._mooncake is not None:  # last: the engine hands over what it promised
            self._mooncake.stop()


def _stop(name: str, process: subprocess.Popen[bytes], drain_s: float) -> None:
    """Ask a process to end, ask again once it has drained long enough, then kill it."""
    for patience_s in (drain_s, KILL_AFTER_S):
        process.terminate()
        try:
            process.wait(patience_s)
            return
        except subprocess.TimeoutExpired:
            continue
    logger.warning("%s process did not stop in %.0f s; killed", name, drain_s + KILL_AFTER_S)
    process.kill()
    process.wait()


def read_admin_key(run_dir: Path) -> str:
    """Return the key that lets the CLI of this user act for every tenant; "" where none is."""
    try:
        return (run_dir / ADMIN_KEY_FILE).read_text()
    except OSError:
        return ""


def read_state(run_dir: Path) -> dict[str, object] | None:
    """Return what the running appliance wrote about itself, or None where none runs."""
    try:
        state = json.loads((run_dir / STATE_FILE).read_text())
        os.kill(int(state["pids"]["supervisor"]), 0)
    except (OSError, ValueError, KeyError):
        return None
    return dict(state)
