# SPDX-License-Identifier: Apache-2.0
"""How the CLI talks to the running appliance: HTTP, with the address and key from its state file.

Does not know: what the commands print.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from appliance.supervisor import read_admin_key, read_state

TIMEOUT_S = 30.0


class AdminError(Exception):
    """The server is not there, or refused; the message is one line for the terminal."""


class AdminClient:
    """An appliance that runs, found by its run directory."""

    def __init__(self, run_dir: Path) -> None:
        state = read_state(run_dir)
        if state is None:
            raise AdminError(f"no appliance runs in {run_dir} (start one: moorage serve)")
        self.url = str(state["url"])
        self._headers = {"Authorization": f"Bearer {read_admin_key(run_dir)}"}

    def call(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        body: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the JSON of a request. Raises: AdminError."""
        given = {key: value for key, value in (params or {}).items() if value is not None}
        try:
            with self._connect() as client:
                reply = client.request(method, path, params=given, json=body)
        except httpx.HTTPError as error:
            raise AdminError(f"{self.url}: {error}") from error
        if not reply.is_success:  # a redirect too: some argument made another path of ours
            raise AdminError(_error_line(reply))
        return dict(reply.json())

    def events(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the JSON of every event of a stream, until it ends. Raises: AdminError."""
        try:
            with self._connect() as client, client.stream("GET", path, timeout=None) as reply:
                if not reply.is_success:
                    reply.read()
                    raise AdminError(_error_line(reply))
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        yield json.loads(line[len("data: ") :])
        except httpx.HTTPError as error:
            raise AdminError(f"{self.url}: {error}") from error

    def _connect(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self._headers, timeout=TIMEOUT_S)


def _error_line(reply: httpx.Response) -> str:
    try:
        error = reply.json()["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {reply.status_code}: {reply.text[:200]}"
