# SPDX-License-Identifier: Apache-2.0
"""A coding-agent session against a running Moorage, over its HTTP API alone.

A scripted agent works on a copy of a real repository with four real tools. It runs tool turns,
two parallel calls, a fork, a cancel in mid-stream, a kill -9 of the engine process and one of the
API process, and checks after every turn that the session lost nothing. Exit 0: all of it held.

    python examples/agent_session.py --repo . --state RUN/state.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema_rs

Json = dict[str, Any]
OUTPUT_CHARS = 700  # a tool result the 135M model's 8K context can carry many times
INSTRUCTIONS = "You are a careful coding agent. Use the tools to look at the repository."


# --- the tools, executed for real in the copied repository ------------------------------------


def list_dir(repo: pathlib.Path, path: str) -> str:
    return "\n".join(sorted(p.name + "/" * p.is_dir() for p in (repo / path).iterdir()))


def read_file(repo: pathlib.Path, path: str) -> str:
    return (repo / path).read_text()


def search(repo: pathlib.Path, pattern: str) -> str:
    hits = []
    for file in sorted(repo.rglob("*.py")):
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            if pattern in line:
                hits.append(f"{file.relative_to(repo)}:{number}: {line.strip()[:80]}")
    return "\n".join(hits[:8]) or "no match"


def run_tests(repo: pathlib.Path, target: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", target]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=120)
    return f"exit {done.returncode}\n{done.stdout[-300:]}"


TOOLS: dict[str, Callable[..., str]] = {
    "list_dir": list_dir,
    "read_file": read_file,
    "search": search,
    "run_tests": run_tests,
}


def tool_specs(repo: pathlib.Path) -> list[Json]:
    """Arguments are bounded by enum or pattern: a small model would ramble in a free string."""
    folders = sorted(p.name for p in repo.iterdir() if p.is_dir() and p.name[0].isalpha())[:8]
    files = ["README.md", "pyproject.toml", "Makefile", "engine/api.py"]
    tests = ["tests/sessions/test_ids.py", "tests/kvtiers/test_keys.py"]

    def spec(name: str, description: str, argument: str, schema: Json) -> Json:
        parameters = {
            "type": "object",
            "properties": {argument: schema},
            "required": [argument],
            "additionalProperties": False,
        }
        return {
            "type": "function",
            "name": name,
            "description": description,
            "parameters": parameters,
        }

    return [
        spec("list_dir", "List a folder", "path", {"type": "string", "enum": folders}),
        spec("read_file", "Read a file", "path", {"type": "string", "enum": files}),
        spec("search", "Find text in the Python files", "pattern",
             {"type": "string", "pattern": "^[a-z_]{4,12}$"}),
        spec("run_tests", "Run one test file", "target",
             {"type": "string", "enum": [t for t in tests if (repo / t).exists()]}),
    ]  # fmt: skip


# --- a thin client: typed events, reconnect where the stream broke ----------------------------


@dataclasses.dataclass
class TurnResult:
    """What the client saw of one turn."""

    turn_id: str
    terminal: str
    items: list[Json]
    usage: Json
    cache: Json
    ttft_s: float
    decode_tok_s: float
    final: Json


class Client:
    def __init__(self, base_url: str) -> None:
        self.http = httpx.Client(base_url=base_url, timeout=60.0)

    def post(self, path: str, body: Json) -> Json:
        response = self.http.post(path, json=body)
        if response.status_code >= 400:
            raise SystemExit(f"{path}: {response.status_code} {response.text}")
        return dict(response.json())

    def get(self, path: str) -> Json:
        return dict(self.http.get(path).raise_for_status().json())

    def events(self, session_id: str, body: Json, key: str) -> Iterator[Json]:
        """Stream a turn. A broken connection is resumed by sequence number, or, where nothing
        came yet, resubmitted under the same idempotency key."""
        turn_id, seen, tries = "", -1, 0
        while True:
            try:
                for event in self._stream(session_id, body, key, turn_id, seen):
                    turn_id, seen = event["turn_id"], event["sequence_number"]
                    yield event
                    if event["type"] in TERMINAL:
                        return
            except httpx.TransportError:
                pass
            tries += 1
            if tries > 40:
                raise SystemExit("the turn's stream could not be resumed")
            time.sleep(0.25)

    def _stream(
        self, session_id: str, body: Json, key: str, turn_id: str, seen: int
    ) -> Iterator[Json]:
        base = f"/v1/sessions/{session_id}/turns"
        if turn_id:
            request = self.http.stream("GET", f"{base}/{turn_id}/events?starting_after={seen}")
        else:
            headers = {"Idempotency-Key": key}
            request = self.http.stream("POST", base, json=body | {"stream": True}, headers=headers)
        with request as response:
            if response.status_code >= 400:
                response.read()
                raise SystemExit(f"turn: {response.status_code} {response.text}")
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])


TERMINAL = ("turn.completed", "turn.incomplete", "turn.cancelled", "turn.failed")


class Agent:
    """One session and the client's own record of it."""

    def __init__(self, client: Client, session_id: str, repo: pathlib.Path, specs: list[Json]):
        self.client = client
        self.session_id = session_id
        self.repo = repo
        self.schemas = {s["name"]: jsonschema_rs.validator_for(s["parameters"]) for s in specs}
        self.transcript: list[Json] = []
        self.known_tokens = 0  # of the session after its last turn
        self.rows: list[list[str]] = []
        self.num_turns = 0

    def turn(self, label: str, items: list[Json], *, recompute: bool = False, cancel_after: int = 0,
             **options: Any) -> TurnResult:  # fmt: skip
        self.num_turns += 1
        key = f"{self.session_id}-{self.num_turns}"
        started = time.perf_counter()
        num_deltas, cache, turn_id = 0, {}, ""
        final: Json = {}
        for event in self.client.events(self.session_id, {"input": items, **options}, key):
            turn_id = event["turn_id"]
            if event["type"] == "turn.cache":
                cache = event
            if event["type"].endswith(".delta"):
                num_deltas += 1
                if num_deltas == cancel_after:
                    self.client.post(f"/v1/sessions/{self.session_id}/turns/{turn_id}/cancel", {})
            if event["type"] in TERMINAL:
                final = event
        wall_s = time.perf_counter() - started
        # A call's first bytes are held until its name is known, so the first delta is no TTFT.
        usage, ttft_s = final["turn"]["usage"], final["turn"]["timings"]["first_token_ms"] / 1000
        rate = (usage["output_tokens"] - 1) / (wall_s - ttft_s)
        result = TurnResult(turn_id, final["type"], final["turn"]["output"], usage, cache,
                            ttft_s, rate, final)  # fmt: skip
        self._check(label, result, recompute)
        self.transcript += [bare(i) for i in items] + [bare(i) for i in result.items]
        self.known_tokens = self.client.get(f"/v1/sessions/{self.session_id}")["num_tokens"]
        return result

    def _check(self, label: str, result: TurnResult, recompute: bool) -> None:
        cached = result.usage["x_cache"]
        hit = sum(cached.values())
        new = result.usage["input_tokens"] - hit
        note = ""
        if recompute:
            note = f"recomputed {max(0, self.known_tokens - 1 - hit)} after the engine kill"
        elif self.known_tokens and hit < self.known_tokens - 1:
            raise SystemExit(f"{label}: reused {hit} of {self.known_tokens} earlier tokens")
        if result.terminal == "turn.failed":
            raise SystemExit(f"{label}: {result.final}")
        for call in calls_of(result):
            problems = list(self.schemas[call["name"]].iter_errors(json.loads(call["arguments"])))
            if problems:
                raise SystemExit(f"{label}: {call} violates its schema: {problems[0]}")
        names = ", ".join(f"{c['name']}({c['arguments']})" for c in calls_of(result))
        self.rows.append([
            label, str(result.usage["input_tokens"]),
            "/".join(str(cached.get(t, 0)) for t in ("l1", "l2", "l3")), str(new),
            str(result.usage["output_tokens"]), f"{result.ttft_s * 1000:.0f}",
            f"{result.decode_tok_s:.0f}", note or names or result.terminal.removeprefix("turn."),
        ])  # fmt: skip

    def results_of(self, result: TurnResult) -> list[Json]:
        """Run the calls of a turn; their outputs are the next turn's input."""
        outputs = []
        for call in calls_of(result):
            output = TOOLS[call["name"]](self.repo, **json.loads(call["arguments"]))
            outputs.append({
                "type": "function_call_output",
                "call_id": call["call_id"],
                "output": output[:OUTPUT_CHARS],
            })  # fmt: skip
        return outputs


def calls_of(result: TurnResult) -> list[Json]:
    return [item for item in result.items if item["type"] == "function_call"]


def message(text: str) -> Json:
    return {"type": "message", "role": "user", "content": text}


def bare(item: Json) -> Json:
    """The part of an item that client and server must agree on."""
    if item["type"] == "message":
        content = item["content"]
        text = content if isinstance(content, str) else "".join(c["text"] for c in content)
        return {"type": "message", "role": item["role"], "text": text}
    fields = ("type", "call_id", "name", "arguments", "output")
    return {name: item[name] for name in fields if item.get(name) is not None}


def check_transcript(agent: Agent) -> None:
    listed: list[Json] = []
    after = ""
    while True:
        path = f"/v1/sessions/{agent.session_id}/items?limit=100{after}"
        page = agent.client.get(path)
        listed += page["data"]
        if not page.get("has_more"):
            break
        after = f"&after={page['data'][-1]['id']}"
    stored = [bare(item) for item in listed]
    if stored != agent.transcript:
        for index, (ours, theirs) in enumerate(zip(agent.transcript, stored, strict=False)):
            if ours != theirs:
                raise SystemExit(f"item {index}: client saw {ours}, server has {theirs}")
        raise SystemExit(f"client saw {len(agent.transcript)} items, server has {len(stored)}")


def kill(state: pathlib.Path, process: str) -> None:
    pid = json.loads(state.read_text())["pids"][process]
    os.kill(pid, signal.SIGKILL)
    print(f"  kill -9 {process} (pid {pid})", file=sys.stderr)


# --- the script ---------------------------------------------------------------------------------


def run(client: Client, repo: pathlib.Path, state: pathlib.Path) -> list[Agent]:
    specs = tool_specs(repo)
    session = client.post("/v1/sessions", {
        "model": client.get("/v1/models")["data"][0]["id"],
        "instructions": INSTRUCTIONS,
        "tools": specs,
        "metadata": {"example": "agent_session"},
    })  # fmt: skip
    agent = Agent(client, session["id"], repo, specs)
    tool = {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200,
            "temperature": 0.8, "seed": 11}  # fmt: skip

    last = agent.turn("1 first look", [message("What is in this repository?")], **tool)
    last = agent.turn("2 next call", agent.results_of(last), **tool)
    last = agent.turn("3 next call", [*agent.results_of(last), message("Look deeper.")], **tool)
    last = agent.turn("4 two calls", [*agent.results_of(last), message("Compare two places.")],
                      min_tool_calls=2, **{**tool, "parallel_tool_calls": True})  # fmt: skip
    if len(calls_of(last)) < 2:
        raise SystemExit(f"turn 4: wanted two parallel calls, got {calls_of(last)}")
    branches = fork_and_part(agent, last, specs, tool)
    last = agent.turn("5 main goes on", agent.results_of(last), **tool)
    kill(state, "engine")
    last = agent.turn("6 engine killed", agent.results_of(last), recompute=True, **tool)
    last = agent.turn("7 warm again", [*agent.results_of(last), message("And now?")], **tool)
    kill(state, "api")
    last = agent.turn("8 API killed", agent.results_of(last), **tool)
    agent.turn("9 cancelled", [*agent.results_of(last), message("Write a long summary.")],
               tool_choice="none", max_output_tokens=400, temperature=0.7, seed=7,
               cancel_after=12)  # fmt: skip
    last = agent.turn("10 after cancel", [message("Run the tests.")], tool_choice={
        "type": "function", "name": "run_tests"}, max_output_tokens=200, temperature=0)  # fmt: skip
    agent.turn("11 answer", [*agent.results_of(last), message("Sum up in one line.")],
               tool_choice="none", max_output_tokens=48, temperature=0)  # fmt: skip
    return [agent, *branches]


def fork_and_part(agent: Agent, last: TurnResult, specs: list[Json], tool: Json) -> list[Agent]:
    """Two branches from turn 4: one searches, one runs tests."""
    reply = agent.client.post(f"/v1/sessions/{agent.session_id}/fork",
                              {"at": last.turn_id, "n": 2})  # fmt: skip
    branches = []
    for name, child in zip(("search", "run_tests"), reply["data"], strict=True):
        branch = Agent(agent.client, child["id"], agent.repo, specs)
        branch.transcript = list(agent.transcript)
        branch.known_tokens = agent.known_tokens
        choice = {"type": "function", "name": name}
        branch.turn(f"4 fork {name}", agent.results_of(last), **{**tool, "tool_choice": choice})
        branches.append(branch)
    if branches[0].transcript == branches[1].transcript:
        raise SystemExit("the branches did not part")
    return branches


def wait_until_ready(state: pathlib.Path, timeout_s: float = 60.0) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            url = str(json.loads(state.read_text())["url"])
            if httpx.get(f"{url}/ready").status_code == 200:
                return url
        except (OSError, ValueError, KeyError, httpx.TransportError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"no server became ready within {timeout_s:.0f} s ({state})")


def print_table(agents: list[Agent]) -> None:
    head = ["turn", "input", "cached l1/l2/l3", "new", "out", "TTFT ms", "tok/s", "what"]
    rows = [head, *(row for agent in agents for row in agent.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        print("  ".join([*cells, row[-1][:70]]))


def copy_repository(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    skip = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache", "*.so")
    return pathlib.Path(shutil.copytree(source, target / "repo", ignore=skip))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repo", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--state", type=pathlib.Path, required=True, help="the server's state.json")
    args = parser.parse_args()
    base_url = wait_until_ready(args.state)
    with tempfile.TemporaryDirectory(prefix="moorage-demo-") as folder:
        repo = copy_repository(args.repo, pathlib.Path(folder))
        agents = run(Client(base_url), repo, args.state)
        for agent in agents:
            check_transcript(agent)
    print_table(agents)
    num_calls = sum(i["type"] == "function_call" for a in agents for i in a.transcript)
    print(f"ok: {sum(a.num_turns for a in agents)} turns, every call valid ({num_calls} listed), "
          "every transcript equal to what the client saw")  # fmt: skip


if __name__ == "__main__":
    main()
