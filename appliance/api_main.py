# SPDX-License-Identifier: Apache-2.0
"""`python -m appliance.api_main`: the API process, on the listening socket its parent holds.

Does not know: who restarts it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import logging
import os
import socket
import sys
from pathlib import Path

import uvicorn

from appliance import logs
from appliance.api.context import ApiContext
from appliance.app import create_app
from appliance.config import read_resolved
from appliance.services import build_services
from engine.errors import EngineError
from sessions.errors import SessionError

logger = logging.getLogger(__name__)

GRACE_S = 2
DRAIN_POLL_S = 0.05


class DrainingServer(uvicorn.Server):
    """Ends the streams that would never end by themselves before it waits for the others."""

    def __init__(
        self, config: uvicorn.Config, context: ApiContext, heartbeat_fd: int | None = None
    ) -> None:
        super().__init__(config)
        self._context = context
        self._services = context.services
        self._heartbeat_fd = heartbeat_fd

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: a sign of life for the supervisor, an eventfd of its own."""
        if self._heartbeat_fd is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._heartbeat_fd, 1)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Readers and turns have the same time to end in, not one after the other."""
        self._services.hub.close()
        draining = asyncio.create_task(self._drain(self._services.config.server.drain_s))
        await super().shutdown(sockets)
        await draining

    async def _drain(self, timeout_s: float) -> None:
        """Turns go on in the next process; what no session remembers ends with an error."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        await self._context.turns.drain(timeout_s)
        while self._services.client.num_streams and loop.time() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)
        self._services.client.end_streams("draining", "the appliance is stopping")


def settle_memory() -> None:
    """What start-up has made stays: no later collection of garbage has to walk over it."""
    with contextlib.suppress(ImportError):  # else the first request imports it, for 20 ms
        importlib.import_module("anyio._backends._asyncio")
    gc.collect()
    gc.freeze()


def main() -> int:
    """Serve until SIGTERM. Returns the exit status."""
    parser = argparse.ArgumentParser(description="The API process of Moorage.")
    parser.add_argument("--config", type=Path, required=True, help="what the supervisor wrote")
    parser.add_argument("--fd", type=int, required=True, help="the listening socket")
    parser.add_argument("--heartbeat-fd", type=int, metavar="FD", help="eventfd for signs of life")
    arguments = parser.parse_args()
    config = read_resolved(arguments.config)
    logs.configure("api", config.server.log_level)
    try:
        services = build_services(config)
    except (EngineError, SessionError, OSError) as error:
        logger.error("%s", error)
        return 1
    app = create_app(services)
    server = DrainingServer(
        uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            # Longer than turns have: their readers are told where they stand, not cut off.
            timeout_graceful_shutdown=int(config.server.drain_s) + GRACE_S,
        ),
        app.state.context,
        arguments.heartbeat_fd,
    )
    listener = socket.socket(fileno=arguments.fd)
    listener.setblocking(False)
    settle_memory()
    server.run(sockets=[listener])
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
