# SPDX-License-Identifier: Apache-2.0
"""What one coding agent does all day, at random but seeded: turns, tool gaps, forks, side requests.

It drives `ide_client` and keeps what it saw for a last look. Does not know: who kills what.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.soak.ide_client import (
    COME_BACK,
    FAILURES,
    Connection,
    Difference,
    Json,
    Session,
    Told,
    sse_events,
)

MAX_SESSION_TOKENS = 900
TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": f"{name} a path",
        "parameters": {
            "type": "object",
            "properties": {"path": {"enum": ["src/a.py", "src/b.py"]}, "deep": {"type": "boolean"}},
            "required": ["path", "deep"],
            "additionalProperties": False,
        },
    }
    for name in ("read", "list")
]
FORMAT = {"type": "json_schema", "name": "answer", "schema": TOOLS[0]["parameters"]}
WORDS = ("def", "return", "import", "path", "café", "\N{SNOWMAN}", "x = 1", "{}", "\n", "tests")


@dataclass(slots=True)
class Seen:
    """What all clients saw, for the figures and for the last look."""

    sessions: list[Session] = field(default_factory=list)
    side: list[tuple[str, Json, str]] = field(default_factory=list)  # path, body, answer
    told: list[tuple[Session, Told, Json]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    aim: str = ""  # the event that somebody waits for
    hit: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, what: str) -> None:
        if what == self.aim:
            self.hit.set()

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number


class Agent:
    """One client; `is_over` ends it behind what it is at."""

    def __init__(self, number: int, seed: int, url: str, seen: Seen, is_over: asyncio.Event):
        self.rng = random.Random(f"{seed}/{number}")
        self.number = number
        self.seen = seen
        self.is_over = is_over
        self.connection = Connection(url, random.Random(f"{seed}/{number}/link"))
        self.connection.hear = seen.hear
        self.num_asked = 0
        self.with_tools = number % 3 == 2
        self.session: Session | None = None

    async def run(self) -> None:
        try:
            while not self.is_over.is_set():
                await self._act()
        finally:
            self.seen.count("retried_calls", self.connection.num_retries)
            await self.connection.close()

    async def _act(self) -> None:
        dice = self.rng.random()
        if self.session is None:
            self.session = await self._open()
        session = self.session
        if dice < 0.60:
            await self._turn(session)
        elif dice < 0.68:
            await self._plain_turn(session)
        elif dice < 0.74:
            await self._side_request()
        elif dice < 0.82:
            await self._gap(session)
        elif dice < 0.88:
            await self._park(session)
        elif dice < 0.93:
            await self._two_at_once(session)
        else:
            await self._fork(session)
        if self.rng.random() < 0.3:
            await self.connection.check_history(session)
        state = await self.connection.get(f"/v1/sessions/{session.id}")
        if state["num_tokens"] > MAX_SESSION_TOKENS:
            self.session = None

    # Sessions -----------------------------------------------------------------------------

    async def _open(self) -> Session:
        body: Json = {"model": "default", "on_conflict": "queue"}
        if self.with_tools:
            body["tools"] = TOOLS
        if self.rng.random() < 0.5:  # a head that many share
            body["instructions"] = "You edit code. " * self.rng.choice([2, 8])
        made = await self.connection.post("/v1/sessions", body)
        return self._known(Session(made["id"]))

    def _known(self, session: Session) -> Session:
        self.seen.sessions.append(session)
        self.seen.count("sessions")
        return session

    async def _fork(self, session: Session) -> None:
        """Go on in a copy, and leave the other as it is."""
        turns = session.committed
        at = self.rng.randrange(len(turns)) if turns and self.rng.random() < 0.3 else None
        where = {"at": turns[at]["id"]} if at is not None else {}
        path = f"/v1/sessions/{session.id}/fork"
        status, made = await self.connection.call("POST", path, {**where, "n": 2})
        if status != 200:
            raise Difference(f"fork {where}: {status} {made}")
        self.seen.count("forks")
        forks = []
        for fork in made["data"]:
            kept = turns if at is None else turns[: at + 1]
            as_here = [{**turn, "session_id": fork["id"]} for turn in kept]
            forks.append(self._known(Session(fork["id"], as_here, bodies=session.bodies)))
        for fork_session in forks:
            await self.connection.check_history(fork_session)
        self.session = self.rng.choice(forks)

    async def _park(self, session: Session) -> None:
        await self.connection.post(f"/v1/sessions/{session.id}/suspend")
        self.seen.count("suspends")
        await self._pause()
        if self.rng.random() < 0.5:
            await self.connection.post(f"/v1/sessions/{session.id}/resume")

    async def _gap(self, session: Session) -> None:
        """A tool runs; the plugin says so, and that it comes back."""
        path = f"/v1/sessions/{session.id}/signals"
        eta_ms = self.rng.choice([50, 400, 90_000])
        await self.connection.post(path, {"type": "tool.started", "eta_ms": eta_ms})
        await self._pause()
        await self.connection.post(path, {"type": "tool.returning"})

    async def _pause(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 0.6))

    # Turns --------------------------------------------------------------------------------

    async def _ask(self, session: Session) -> Json:
        state = await self.connection.get(f"/v1/sessions/{session.id}")
        items: list[Json] = [
            {
                "type": "function_call_output",
                "call_id": call["call_id"],
                "output": self._words(self.rng.randrange(1, 12)),
            }
            for call in state["open_calls"]
        ]
        if not items or self.rng.random() < 0.3:
            items.append({"type": "message", "role": "user", "content": self._words()})
        body: Json = {"input": items, "temperature": 0.0}
        body["max_output_tokens"] = self.rng.choice([8, 40, 40, 120, 250])
        if self.with_tools:
            body["max_output_tokens"] = 250
            body["tool_choice"] = self.rng.choice(["required", "none"])
        elif self.rng.random() < 0.12:
            body["response_format"] = FORMAT
            body["max_output_tokens"] = 250
        elif self.rng.random() < 0.5:
            body["ignore_eos"] = True
        elif self.rng.random() < 0.3:
            body["stop"] = ["e", "\n"]
        if self.rng.random() < 0.03:
            body["deadline_ms"] = self.rng.choice([100, 1500])
        return body

    def _words(self, number: int = 0) -> str:
        number = number or self.rng.choice([2, 5, 12, 30])
        return " ".join(self.rng.choice(WORDS) for _ in range(number))

    def _next_key(self) -> str:
        self.num_asked += 1
        return f"{self.number}-{self.num_asked}"

    async def _turn(self, session: Session, is_alone: bool = True) -> None:
        body = await self._ask(session)
        cancel_at = self.rng.choice([1, 2, 5, 9, 20]) if self.rng.random() < 0.15 else 0
        for _ in range(4):
            told = await self.connection.turn(session.id, self._next_key(), body, cancel_at)
            self._note(session, told, body)
            if told.events[-1]["turn"]["status"] != "failed":
                break
        if is_alone and self.rng.random() < 0.15:
            await self.connection.check_key(session.id, told, body)

    def _note(self, session: Session, told: Told, body: Json) -> None:
        turn = told.events[-1]["turn"]
        self.seen.count(turn["status"])
        self.seen.count("connections", told.num_connections)
        self.seen.told.append((session, told, body))
        self._keep(session, turn, body)

    def _keep(self, session: Session, turn: Json, body: Json) -> None:
        session.bodies[turn["id"]] = body
        if turn["committed"]:
            session.committed.append(turn)
        else:
            session.uncommitted[turn["id"]] = turn["status"]

    async def _plain_turn(self, session: Session) -> None:
        """A turn in one answer; the call is repeated under its key until it comes."""
        body = await self._ask(session)
        path = f"/v1/sessions/{session.id}/turns"
        headers = {"Idempotency-Key": self._next_key()}
        status, turn = await self.connection.call("POST", path, body, headers=headers)
        if status == 503 and "turn_id" in turn["error"] and turn["error"]["code"] in FAILURES:
            self.seen.count("failed")
            session.uncommitted[turn["error"]["turn_id"]] = "failed"
            return
        if status != 200 or turn["status"] not in ("completed", "incomplete"):
            raise Difference(f"POST {path}: {status} {turn}")
        self.seen.count(turn["status"])
        self._keep(session, turn, body)

    async def _two_at_once(self, session: Session) -> None:
        """The second waits for the first. Neither leaves calls open."""
        if self.with_tools:
            await self._turn(session)
            return
        first, second = await self._ask(session), await self._ask(session)
        keys = self._next_key(), self._next_key()
        both = await asyncio.gather(
            self.connection.turn(session.id, keys[0], first),
            self.connection.turn(session.id, keys[1], second),
        )
        self.seen.count("queued_pairs")
        both = sorted(both, key=lambda told: told.events[-1]["turn"]["revision"])
        for told in both:
            self._note(session, told, first if told.key == keys[0] else second)

    # Side requests ------------------------------------------------------------------------

    async def _side_request(self) -> None:
        """A dialect that knows no sessions: what breaks is asked again from the start."""
        words, limit = self._words(), self.rng.choice([10, 40, 100])
        body: Json
        if self.rng.random() < 0.5:
            path = "/v1/chat/completions"
            body = {"messages": [{"role": "user", "content": words}], "max_tokens": limit}
        else:
            path = "/v1/responses"
            body = {"input": words, "max_output_tokens": limit}
        body |= {"model": "default", "temperature": 0.0, "stream": True}
        self.seen.side.append((path, body, await self.side_answer(path, body)))
        self.seen.count("side_requests")

    async def side_answer(self, path: str, body: Json) -> str:
        """What it streams, whole."""
        for _ in range(200):
            try:
                text = await self._side_once(path, body)
                if text is not None:
                    return text
            except (httpx.TransportError, OSError):
                pass
            self.seen.count("side_repeats")
            await asyncio.sleep(self.rng.uniform(0.05, 0.5))
        raise Difference(f"{path}: never answered whole")

    async def _side_once(self, path: str, body: Json) -> str | None:
        """None: it ended with an error that passes."""
        parts: list[str] = []
        is_whole = False
        async with self.connection.stream("POST", path, body, {}) as reply:
            if reply.status_code != 200:
                answer = json.loads(await reply.aread())
                return _passing(path, answer)
            async for event in sse_events(reply):
                if "error" in event and event["error"]:
                    return _passing(path, event)
                kind = event.get("type", "")
                if kind == "response.output_text.delta":
                    parts.append(event["delta"])
                for choice in event.get("choices", ()):
                    parts.append(choice["delta"].get("content") or "")
                    is_whole = is_whole or choice["finish_reason"] is not None
                is_whole = is_whole or kind in ("response.completed", "response.incomplete")
                if kind in ("response.failed", "error"):
                    return _passing(path, event.get("response", event))
        if not is_whole:
            raise Difference(f"{path}: the stream ended properly and has no end: {parts[-3:]}")
        return "".join(parts)


def is_bound(body: Json) -> bool:
    """A grammar has a say in the answer to this."""
    return "response_format" in body or "tool_choice" in body


def _passing(path: str, answer: Any) -> None:
    """Nothing, where an error is one that a restart explains. Raises: Difference."""
    error = answer.get("error") or answer
    if not {error.get("code"), error.get("x_code")} & COME_BACK:
        raise Difference(f"{path}: {answer}")
