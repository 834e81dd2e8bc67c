# SPDX-License-Identifier: Apache-2.0
"""Drives seeded agent sessions against a server and measures what a client sees.

A session is a system prompt that all share, a private context, then turns that each add a little.
Works against Moorage's session API and against any OpenAI-compatible URL. Does not know: the
appliance; it is a client and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

# Words that byte-pair vocabularies hold whole, so a count of words is close to one of tokens.
_TEXT = """the of and to in is that for it as was with be by on not he his but at are this have
from or had an they which one you were all her she there would their we him been has when who will
no more if out so up said what its about than into them can only other time new some could these
two may first then do any like my now over such our man me even most made after also did many off
before must well back through years much where your way down should because long each just state
those people too how little good world make very year still see work life being under day between
never same another while last might us great old"""
WORDS = re.findall(r"[a-z]+", _TEXT)
APIS = ("session", "chat", "completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchParams:
    """What is driven. Lengths are in words, which are close to tokens."""

    base_url: str
    api: str = "session"
    model: str = "default"
    api_key: str = ""
    sessions: int = 1
    turns: int = 4
    system: int = 200
    context: int = 1000
    new: int = 80
    output: int = 64
    seed: int = 0
    timeout_s: float = 300.0


@dataclass(slots=True)
class TurnSample:
    """One turn as its client saw it."""

    index: int
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_chunks: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: str = ""

    def on_text(self, text: str) -> None:
        now_s = time.perf_counter()
        self.first_s = self.first_s or now_s
        self.last_s = now_s
        self.num_chunks += 1
        self.text += text

    def on_usage(self, usage: dict[str, Any]) -> None:
        self.input_tokens = usage.get("input_tokens") or usage.get("prompt_tokens") or 0
        self.output_tokens = usage.get("output_tokens") or usage.get("completion_tokens") or 0
        details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens") or 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def decode_tok_s(self) -> float:
        """Tokens after the first, over the time they took; 0 where there was only one."""
        tokens = self.output_tokens or self.num_chunks
        took_s = self.last_s - self.first_s
        return (tokens - 1) / took_s if took_s > 0 and tokens > 1 else 0.0


@dataclass(slots=True)
class SessionDriver:
    """One agent session against one of the APIs; keeps the history where the server does not."""

    client: httpx.AsyncClient
    params: BenchParams
    number: int
    samples: list[TurnSample] = field(default_factory=list)
    session_id: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    prompt: str = ""

    async def run(self) -> None:
        params = self.params
        system = words(random.Random(params.seed), params.system)
        private = random.Random(f"{params.seed}/{self.number}")
        if params.api == "session":
            reply = await self._post(
                "/v1/sessions", {"model": params.model, "instructions": system}
            )
            self.session_id = reply["id"]
        self.messages = [{"role": "system", "content": system}]
        self.prompt = system
        for index in range(params.turns):
            text = words(private, params.context if index == 0 else params.new)
            self.samples.append(await self._turn(index, text))
        if params.api == "session":
            await self.client.delete(f"/v1/sessions/{self.session_id}")

    async def _turn(self, index: int, text: str) -> TurnSample:
        path, body = self._request(text)
        sample = TurnSample(index, time.perf_counter())
        async for event in stream_events(self.client, path, body):
            self._on_event(sample, event)
        if not sample.num_chunks:
            raise RuntimeError(f"{path}: the stream of turn {index} held no text")
        self.messages.append({"role": "assistant", "content": sample.text})
        self.prompt += sample.text
        return sample

    def _request(self, text: str) -> tuple[str, dict[str, Any]]:
        params = self.params
        seed = params.seed + self.number
        if params.api == "session":
            return f"/v1/sessions/{self.session_id}/turns", {
                "input": [{"type": "message", "role": "user", "content": text}],
                "stream": True,
                "max_output_tokens": params.output,
                "temperature": 0.0,
                "ignore_eos": True,
                "seed": seed,
            }
        common = {
            "model": params.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": params.output,
            "min_tokens": params.output,
            "ignore_eos": True,
            "temperature": 0.0,
            "seed": seed,
        }
        if params.api == "chat":
            self.messages.append({"role": "user", "content": text})
            return "/v1/chat/completions", {**common, "messages": self.messages}
        self.prompt += " " + text
        return "/v1/completions", {**common, "prompt": self.prompt}

    def _on_event(self, sample: TurnSample, event: dict[str, Any]) -> None:
        if self.params.api == "session":
            kind = event.get("type")
            if kind == "response.output_text.delta":
                sample.on_text(event["delta"])
            elif kind in ("turn.failed", "turn.cancelled"):
                raise RuntimeError(f"{kind}: {event.get('error')}")
            elif kind in ("turn.completed", "turn.incomplete"):
                sample.on_usage(event["usage"])
            return
        if event.get("error"):
            raise RuntimeError(f"error in the stream: {event['error']}")
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                sample.on_text(text)
        if event.get("usage"):
            sample.on_usage(event["usage"])

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self.client.post(path, json=body)
        if reply.status_code >= 400:
            raise RuntimeError(f"{path}: {reply.status_code}: {reply.text[:300]}")
        return dict(reply.json())


def words(source: random.Random, count: int) -> str:
    """Return `count` seeded words."""
    return " ".join(source.choice(WORDS) for _ in range(count))


async def stream_events(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of every SSE data line."""
    async with client.stream("POST", path, json=body) as reply:
        if reply.status_code >= 400:
            text = (await reply.aread()).decode(errors="replace")
            raise RuntimeError(f"{path}: {reply.status_code}: {text[:300]}")
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


async def run_bench(params: BenchParams) -> dict[str, Any]:
    """Drive all sessions at once and return the figures.

    Raises: RuntimeError with the server's answer where a turn fails, or with why there is none.
    """
    base_url = params.base_url.rstrip("/").removesuffix("/v1")  # as OpenAI's clients are given it
    headers = {"Authorization": f"Bearer {params.api_key}"} if params.api_key else {}
    limits = httpx.Limits(max_connections=params.sessions + 1)
    try:
        async with httpx.AsyncClient(
            base_url=base_url, headers=headers, timeout=params.timeout_s, limits=limits
        ) as client:
            drivers = [SessionDriver(client, params, number) for number in range(params.sessions)]
            started_s = time.perf_counter()
            await asyncio.gather(*(driver.run() for driver in drivers))
            wall_s = time.perf_counter() - started_s
    except (httpx.TransportError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise RuntimeError(f"--base-url {params.base_url}: {reason}") from error
    samples = [sample for driver in drivers for sample in driver.samples]
    return {"params": {**asdict(params), "api_key": ""}, **summarise(samples, wall_s)}


def summarise(samples: list[TurnSample], wall_s: float) -> dict[str, Any]:
    """Return the figures of a run."""
    later = [sample for sample in samples if sample.index > 0]
    cold = [sample for sample in samples if sample.index == 0]
    output_tokens = sum(sample.output_tokens or sample.num_chunks for sample in samples)
    return {
        "wall_s": round(wall_s, 3),
        "turns": len(samples),
        "input_tokens": sum(sample.input_tokens for sample in samples),
        "output_tokens": output_tokens,
        "output_tok_s": round(output_tokens / wall_s, 2) if wall_s > 0 else 0.0,
        "decode_tok_s": _spread([s.decode_tok_s for s in samples if s.decode_tok_s > 0]),
        "decode_tok_s_all": round(_concurrent_decode(samples), 2),
        "ttft_cold_s": _spread([sample.ttft_s for sample in cold]),
        "ttft_later_s": _spread([sample.ttft_s for sample in later]),
        "cached_share_later": _share(later),
        "cached_tokens": sum(sample.cached_tokens for sample in samples),
    }


def _concurrent_decode(samples: list[TurnSample]) -> float:
    """Tokens per second over the time in which at least one stream was decoding."""
    spans = sorted((s.first_s, s.last_s) for s in samples if s.last_s > s.first_s)
    busy_s, end_s = 0.0, 0.0
    for first_s, last_s in spans:
        busy_s += max(0.0, last_s - max(first_s, end_s))
        end_s = max(end_s, last_s)
    tokens = sum((s.output_tokens or s.num_chunks) - 1 for s in samples)
    return tokens / busy_s if busy_s > 0 else 0.0


def _share(samples: list[TurnSample]) -> float | None:
    total = sum(sample.input_tokens for sample in samples)
    return round(sum(s.cached_tokens for s in samples) / total, 4) if total else None


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
    }
