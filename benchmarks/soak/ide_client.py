# SPDX-License-Identifier: Apache-2.0
"""A client as an IDE plugin is one: sessions, streamed turns, reconnects; it notes what it saw.

Whatever breaks its connection, it comes back with what it knows: the number of the last event, or
the Idempotency-Key where it never learned the turn's id. What is not as the session API promises
is a `Difference`. Does not know: who kills what, what the right answer is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

Json = dict[str, Any]

TERMINAL = {
    "turn.completed": "completed",
    "turn.incomplete": "incomplete",
    "turn.cancelled": "cancelled",
    "turn.failed": "failed",
}
SENT = "a request is sent"
FAILURES = {"engine_restarted", "engine_unavailable", "api_restarted"}  # that a kill explains
COME_BACK = {*FAILURES, "draining", "capacity", "store_unavailable"}  # of a refusal, with 503
SILENCE_S = 20.0  # a stream has a heartbeat every second
CALL_S = 60.0
PATIENCE_S = 150.0  # for a call or a turn, restarts of all processes included


class Difference(Exception):
    """What a client saw is not what the session API promises."""


@dataclass(slots=True)
class Told:
    """The events of one turn, put together over all connections."""

    key: str
    turn_id: str = ""
    events: list[Json] = field(default_factory=list)
    num_connections: int = 0

    @property
    def end(self) -> Json | None:
        """The terminal event, once it has come."""
        return self.events[-1] if self.events and self.events[-1]["type"] in TERMINAL else None

    def take(self, event: Json, number: int) -> None:
        """Take an event that must have this number: a new one, or one that is told again."""
        if event["sequence_number"] != number:
            raise Difference(f"{self.turn_id}: event {number} is followed up by {event}")
        if number <= len(self.events):
            if event != self.events[number - 1]:
                raise Difference(f"told twice, otherwise: {event}, {self.events[number - 1]}")
            return
        if self.end is not None:
            raise Difference(f"an event behind the end: {event}")
        self.turn_id = self.turn_id or event["turn_id"]
        if event["turn_id"] != self.turn_id:
            raise Difference(f"{self.turn_id} is answered by an event of {event['turn_id']}")
        self.events.append(event)

    def text_by_item(self) -> dict[str, str]:
        """What the deltas spell, by item."""
        spelled: dict[str, str] = {}
        for event in self.events:
            if event["type"].endswith(".delta"):
                item_id = event["item_id"]
                spelled[item_id] = spelled.get(item_id, "") + event["delta"]
        return spelled


@dataclass(slots=True)
class Session:
    """One session as its only client knows it: the turns it must have, and those it may not."""

    id: str
    committed: list[Json] = field(default_factory=list)  # terminal turns, in order
    uncommitted: dict[str, str] = field(default_factory=dict)  # id -> status
    bodies: dict[str, Json] = field(default_factory=dict)  # what was asked, by turn


def text_of(item: Json) -> str:
    """The text, or the arguments, of an output item."""
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


def check_end(told: Told) -> Json:
    """Compare a turn's deltas with its terminal event; return the turn."""
    end = told.end
    assert end is not None
    turn = dict(end["turn"])
    status = TERMINAL[end["type"]]
    if turn["status"] != status or turn["id"] != told.turn_id or end["items"] != turn["output"]:
        raise Difference(f"the end contradicts itself: {end}")
    types = [event["type"] for event in told.events]
    for once in ("turn.created", "turn.in_progress"):
        if types.count(once) > 1:
            raise Difference(f"{told.turn_id}: {once} came {types.count(once)} times")
    if status == "failed":
        if end["error"]["code"] not in FAILURES:
            raise Difference(f"{told.turn_id} failed as {end['error']}")
        return turn
    spelled = told.text_by_item()
    items = {item["id"]: text_of(item) for item in turn["output"]}
    if status in ("cancelled", "incomplete"):  # calls that were cut are not kept
        spelled = {item_id: text for item_id, text in spelled.items() if item_id in items}
    if spelled != {item_id: text for item_id, text in items.items() if text}:
        raise Difference(f"{told.turn_id}: deltas spell {spelled}, the items are {items}")
    done = [e["item"] for e in told.events if e["type"] == "response.output_item.done"]
    if [item for item in done if item["id"] in items] != turn["output"]:
        raise Difference(f"{told.turn_id}: items done are {done}, at the end {turn['output']}")
    return turn


class Connection:
    """Calls of one client; each lasts until it is answered, or patience ends."""

    def __init__(self, url: str, rng: random.Random) -> None:
        timeout = httpx.Timeout(CALL_S, read=CALL_S, connect=5.0)
        self.http = httpx.AsyncClient(base_url=url, timeout=timeout)
        self.rng = rng
        self.num_retries = 0
        self.admin_key: Callable[[], str] = lambda: ""
        self.hear: Callable[[str], None] = lambda what: None  # told of events as they come

    async def close(self) -> None:
        await self.http.aclose()

    async def call(
        self, method: str, path: str, body: Json | None = None, **options: Any
    ) -> tuple[int, Json]:
        """Return status and body; a broken connection or a passing refusal is tried again."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            why = ""
            try:
                headers = {"authorization": f"Bearer {key}"} if (key := self.admin_key()) else {}
                headers |= options.get("headers", {})
                reply = await self.http.request(method, path, json=body, headers=headers)
                answer = _json_of(reply)
                code = _code_of(answer)
                # What a turn failed with stays; a turn that goes on elsewhere says so as well.
                is_final = "turn_id" in (answer.get("error") or {}) and code != "draining"
                if reply.status_code != 503 or code not in COME_BACK or is_final:
                    return reply.status_code, answer
                why = f"{code}"
            except (httpx.TransportError, OSError) as error:
                why = repr(error)
            if time.monotonic() > deadline_s:
                raise Difference(f"{method} {path}: no answer in {PATIENCE_S:g} s: {why}")
            self.num_retries += 1
            await asyncio.sleep(self.rng.uniform(0.05, 0.4))

    async def get(self, path: str) -> Json:
        return _wanted(await self.call("GET", path), f"GET {path}")

    async def post(self, path: str, body: Json | None = None) -> Json:
        return _wanted(await self.call("POST", path, body or {}), f"POST {path}")

    @contextlib.asynccontextmanager
    async def stream(
        self, method: str, path: str, body: Json | None, headers: Json
    ) -> AsyncIterator[httpx.Response]:
        timeout = httpx.Timeout(CALL_S, read=SILENCE_S, connect=5.0)
        async with self.http.stream(
            method, path, json=body, headers=headers, timeout=timeout
        ) as reply:
            yield reply

    # Turns --------------------------------------------------------------------------------

    async def turn(self, session_id: str, key: str, body: Json, cancel_at: int = 0) -> Told:
        """Run a streamed turn to its end, however often the connection breaks.

        cancel_at: ask for its end once so many events have come; 0: never.
        """
        told = Told(key)
        cancelling: asyncio.Task[Json] | None = None
        deadline_s = time.monotonic() + PATIENCE_S
        while told.end is None:
            if time.monotonic() > deadline_s:
                shown = told.events[-1:] or "no event"
                raise Difference(f"{session_id}/{told.turn_id} does not end: {shown}")
            try:
                async for _ in self._read(session_id, told, body):
                    if cancel_at and len(told.events) >= cancel_at and cancelling is None:
                        cancelling = asyncio.create_task(self._cancel(session_id, told.turn_id))
                    if self.rng.random() < 0.004:  # the plugin's window was reloaded
                        break
            except (httpx.TransportError, OSError):
                await asyncio.sleep(self.rng.uniform(0.01, 0.3))
        turn = check_end(told)
        if cancelling is not None:
            answer = await cancelling
            if answer["status"] != turn["status"]:
                raise Difference(f"cancel answered {answer}, the turn ended as {turn}")
        return told

    async def _cancel(self, session_id: str, turn_id: str) -> Json:
        """Cancel until the turn has ended; a call may return before that."""
        while True:
            turn = await self.post(f"/v1/sessions/{session_id}/turns/{turn_id}/cancel")
            if turn["status"] not in ("running", "queued"):
                return turn
            await asyncio.sleep(0.2)

    async def _read(self, session_id: str, told: Told, body: Json) -> AsyncIterator[Json]:
        """One connection's events; those that were told before are compared."""
        path = f"/v1/sessions/{session_id}/turns"
        told.num_connections += 1
        self.hear(SENT)
        number = 0
        if not told.turn_id or self.rng.random() < 0.15:
            headers = {"Idempotency-Key": told.key}
            opened = self.stream("POST", path, {**body, "stream": True}, headers)
        else:
            number = len(told.events)
            if number and self.rng.random() < 0.2:
                number = self.rng.randrange(number)
            path = f"{path}/{told.turn_id}/events?starting_after={number}"
            opened = self.stream("GET", path, None, {})
        async with opened as reply:
            if reply.status_code != 200:
                await reply.aread()
                answer = _json_of(reply)
                if reply.status_code == 503 and _code_of(answer) in COME_BACK:
                    self.num_retries += 1
                    await asyncio.sleep(self.rng.uniform(0.05, 0.4))
                    return
                raise Difference(f"{path} after {number}: {reply.status_code} {answer}")
            turn_id = reply.headers.get("x-turn-id", "")
            if told.turn_id and turn_id and turn_id != told.turn_id:
                raise Difference(f"the key of {told.turn_id} is answered by {turn_id}")
            told.turn_id = told.turn_id or turn_id
            async for event in sse_events(reply):
                if event["type"] == "stream.reconnect":
                    if event["starting_after"] != number:
                        raise Difference(f"{event} after event {number}")
                    return
                number += 1
                told.take(event, number)
                if number == len(told.events):
                    self.hear(event["type"])
                yield event

    async def check_key(self, session_id: str, told: Told, body: Json) -> None:
        """The same request under the same key is the same turn, streamed or not."""
        path = f"/v1/sessions/{session_id}/turns"
        headers = {"Idempotency-Key": told.key}
        status, answer = await self.call("POST", path, body, headers=headers)
        turn = told.events[-1]["turn"]
        if turn["status"] == "failed":
            found = (status, (answer.get("error") or {}).get("turn_id"))
            if found != (503, told.turn_id):
                raise Difference(f"the key of failed {told.turn_id}: {status} {answer}")
        elif (status, answer) != (200, turn):
            raise Difference(f"the key of {told.turn_id} is answered {status} {answer}, not {turn}")
        status, answer = await self.call("POST", path, {**body, "input": "else"}, headers=headers)
        if (status, _code_of(answer)) != (422, "idempotency_key_reused"):
            raise Difference(f"another body under {told.key}: {status} {answer}")

    async def check_history(self, session: Session) -> None:
        """Every turn whose end was seen is in the history, as it was told, and no other."""
        listed = (await self.get(f"/v1/sessions/{session.id}/turns"))["data"]
        listed = [turn for turn in listed if turn["status"] not in ("running", "queued")]
        if listed != session.committed:
            wanted = [(turn["id"], turn["status"]) for turn in session.committed]
            shown = [(turn["id"], turn["status"]) for turn in listed]
            raise Difference(f"{session.id} has the turns {shown}, seen were {wanted}")


async def sse_events(reply: httpx.Response) -> AsyncIterator[Json]:
    """The JSON of every event of a stream; a line that was cut by a kill is none."""
    lines: list[str] = []
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            lines.append(line[6:])
        elif not line and lines:
            text = lines.pop()
            if text != "[DONE]":
                yield json.loads(text)


async def until(is_so: Callable[[], Awaitable[bool]], what: str, limit_s: float = 90.0) -> None:
    """Wait for a state. Raises: Difference."""
    deadline_s = time.monotonic() + limit_s
    while not await is_so():
        if time.monotonic() > deadline_s:
            raise Difference(f"not in {limit_s:g} s: {what}")
        await asyncio.sleep(0.2)


def _json_of(reply: httpx.Response) -> Json:
    try:
        return dict(reply.json())
    except ValueError:
        raise Difference(f"{reply.request.url}: no JSON: {reply.text[:200]!r}") from None


def _code_of(answer: Json) -> str | None:
    return (answer.get("error") or {}).get("code")


def _wanted(answered: tuple[int, Json], what: str) -> Json:
    status, answer = answered
    if status != 200:
        raise Difference(f"{what}: {status} {answer}")
    return answer
