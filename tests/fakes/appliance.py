# SPDX-License-Identifier: Apache-2.0
"""An API process in a thread of the test: the real app on a real socket, a fake engine behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from appliance.api_main import DrainingServer
from appliance.app import create_app
from appliance.config import config_from_table
from appliance.services import Services, build_services
from engine import api
from engine.text.assets import TextAssets, load_text_assets
from tests.fakes.engine import FakeEngine, GrammarCheck

Json = dict[str, Any]
TERMINAL = ("turn.completed", "turn.incomplete", "turn.cancelled", "turn.failed")


@functools.cache
def default_assets() -> TextAssets:
    """The text side of the default model, loaded once for all tests."""
    return load_text_assets("default")


def ids_of(text: str) -> list[int]:
    """Token ids of text the fake engine shall sample."""
    return default_assets().tokenizer.encode(text)


def says(*texts: str) -> Callable[[api.GenerateRequest], Sequence[int]]:
    """A script that answers with these texts in turn, the last one for ever.

    A prefill, which may come whenever it likes, takes none of them away.
    """
    answers = list(texts)
    counter = iter(range(1 << 30))

    def script(request: api.GenerateRequest) -> Sequence[int]:
        if request.request_id.startswith("prefill_"):
            return ids_of(answers[0])
        return ids_of(answers[min(next(counter), len(answers) - 1)])

    return script


class RunningApp:
    """The app under a real HTTP server; `restart` is what a crash and a new process look like."""

    def __init__(
        self,
        root: Path,
        script: Callable[[api.GenerateRequest], Sequence[int]] | None = None,
        *,
        settings: Json | None = None,
        grammar_check: GrammarCheck = lambda spec: None,
        max_context_len: int = 8192,
        with_engine: bool = True,
        assets: TextAssets | None = None,
        **engine_options: Any,
    ) -> None:
        server = {"state_dir": str(root / "s"), "port": 0, "drain_s": 0.0}
        table: Json = {"server": server}
        for section, values in (settings or {}).items():
            table.setdefault(section, {}).update(values)
        self.config = config_from_table(table)
        self.config.server.run_dir.mkdir(parents=True, exist_ok=True)
        self.engine = FakeEngine(
            self.config.engine.socket_path,
            script or says("Hello there."),
            grammar_check=grammar_check,
            max_context_len=max_context_len,
            **engine_options,
        )
        self._with_engine = with_engine
        self._assets = assets
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.services: Services
        self._server: uvicorn.Server
        self._thread: threading.Thread

    def __enter__(self) -> RunningApp:
        if self._with_engine:
            self.engine.start()
        self.start()
        self.http = httpx.Client(base_url=self.url, timeout=60.0)
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.close()
        self.stop()
        self._listener.close()
        self.engine.stop()

    def start(self) -> None:
        self.services = build_services(self.config, self._assets or default_assets())
        self.asgi = create_app(self.services)
        config = uvicorn.Config(self.asgi, ws="none", log_config=None, timeout_graceful_shutdown=1)
        self._server = DrainingServer(config, self.asgi.state.context)
        listener = self._listener.dup()
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started or (self._with_engine and not self.services.client.is_ready):
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError("the app did not start")
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the app does not end"

    def restart(self) -> None:
        """Running turns are left as a crash leaves them: pending in the store, their engine
        requests going on."""
        self.stop()
        self.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop the app runs on."""
        return self.services.client._tasks[0].get_loop()

    # What tests say often -----------------------------------------------------------------

    def post(self, path: str, body: Json | None = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json={} if body is None else body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def session(self, **fields: Any) -> str:
        """Create a session and return its id."""
        reply = self.post("/v1/sessions", {"model": "default", **fields})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["id"])

    def turn(self, session_id: str, text: str | list[Json] = "Hi", **fields: Any) -> Json:
        """Run a turn to its end and return it."""
        reply = self.post(f"/v1/sessions/{session_id}/turns", {"input": text, **fields})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def stream(self, session_id: str, text: str | list[Json] = "Hi", **fields: Any) -> list[Json]:
        """Run a turn and return its events."""
        headers = fields.pop("headers", None)
        body = {"input": text, "stream": True, **fields}
        path = f"/v1/sessions/{session_id}/turns"
        with self.http.stream("POST", path, json=body, headers=headers) as reply:
            assert reply.status_code == 200, reply.read()
            return list(sse_events(reply))

    @contextlib.contextmanager
    def caller(
        self, path: str, body: Json, headers: dict[str, str] | None = None
    ) -> Iterator[None]:
        """Somebody who waits for a whole answer, and hangs up where the block ends."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        with contextlib.closing(http.client.HTTPConnection(self.url.partition("//")[2])) as asked:
            asked.request("POST", path, json.dumps(body), sent)
            yield

    def num_readers(self, session_id: str, turn_id: str) -> int:
        """How many read a turn's events, or wait for its end."""
        events = self.services.journals.find(session_id, turn_id)
        return 0 if events is None else events.num_readers

    def error(self, reply: httpx.Response) -> tuple[int, str, str | None]:
        """(status, code, param) of an error answer."""
        error = reply.json()["error"]
        return reply.status_code, error["code"], error["param"]


def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for a state."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "it never comes to that"
        time.sleep(0.02)


def sse_events(reply: httpx.Response) -> Iterator[Json]:
    """The JSON of every event of a stream, as it comes."""
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])
