# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium without a driver: the DevTools protocol over two pipes.

Source: https://chromedevtools.github.io/devtools-protocol (Target, Runtime, Page, Log domains).
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_S = 60.0
# No sandbox: tests run as root in containers, and the page is our own.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)
# Resolves once the expression is truthy, to its value; what it throws meanwhile is "not yet".
UNTIL = """new Promise((done) => {
  const look = () => { let found; try { found = (%s); } catch { found = null; }
    if (found) done(found); else setTimeout(look, 20); };
  look();
})"""


def browser_or_skip() -> str:
    """The browser's command; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    return found


class BrowserPage:
    """One tab, as a context manager. `complaints`: errors of scripts, refusals of requests."""

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 800) -> None:
        self.complaints: list[str] = []
        self._next_id = 0
        self._rest = b""
        self._size = (width, height)
        to_browser, self._write_fd = os.pipe()
        self._read_fd, from_browser = os.pipe()
        os.dup2(to_browser, to_browser, inheritable=True)
        # The protocol's descriptors are 3 and 4; the shell puts ours there.
        redirect = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, browser_or_skip(), *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._tab = ""

    def __enter__(self) -> BrowserPage:
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attach = {"targetId": target, "flatten": True}
        self._tab = self._call("Target.attachToTarget", attach)["sessionId"]
        width, height = self._size
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", shape)
        for domain in ("Runtime", "Page", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def go(self, url: str) -> None:
        self._call("Page.navigate", {"url": url})

    def run(self, script: str) -> Any:
        """The value of an expression; of a promise, what it resolves to."""
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
        found = self._call("Runtime.evaluate", asked)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is truthy; its value. A navigation meanwhile asks again."""
        while True:
            try:
                return self.run(UNTIL % expression)
            except NavigatedError:
                continue

    def click(self, selector: str) -> None:
        """Wait for an element that can be clicked, and click it as a script does."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.until(f"{found} && !{found}.disabled && ({found}.click(), true)")

    def text(self, selector: str = "main") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def _call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": params or {}}
        if self._tab:
            message["sessionId"] = self._tab
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") != self._next_id:
                self._note(reply)
            elif "error" in reply:
                raise NavigatedError(f"{method}: {reply['error']}")
            else:
                return dict(reply["result"])

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while b"\0" not in self._rest:
            left_s = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._read_fd], [], [], left_s)
            data = os.read(self._read_fd, 1 << 16) if ready else b""
            assert data, "the browser says nothing; the page: " + "; ".join(self.complaints)
            self._rest += data
        line, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(str(details.get("exception", details).get("description")))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


class NavigatedError(Exception):
    """The page went elsewhere while something was asked of it."""
