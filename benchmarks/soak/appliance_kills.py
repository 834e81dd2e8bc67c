# SPDX-License-Identifier: Apache-2.0
"""Kills the processes of a whole appliance at random moments, under clients as IDE plugins are.

    python -m benchmarks.soak.appliance_kills [--kills 10] [--seed 1] [--clients 6] [--keep DIR]

`moorage serve` with a tiny random model (fp32, greedy), pools that hold a fraction of what is
asked, L2 in the supervisor's memory, the file store below. Killed with SIGKILL: the engine, the
API process, both, the supervisor alone, the whole tree; the engine is also stopped and goes on,
and it, or all, is asked to end (SIGTERM). Most kills wait for a moment of some turn: its request
is on the way, its answer ends and is not stored yet, its end was told just now.
The clients reconnect and check what they see (`ide_client`, `ide_agent`). At the end every answer
is compared with the model itself, computed apart from the engine; every turn whose end was seen is
in its history; nothing runs, every page is in its one place, `moorage doctor` says ok, no process
is left. One JSON line a kill and one at the end; exit 1 with the seed at the first difference.
Times are the machine's own: a seed repeats the load and the kills, not their moments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from benchmarks.soak.ide_agent import Agent, Seen, is_bound
from benchmarks.soak.ide_client import SENT, Connection, Difference, Json, Session, text_of, until
from benchmarks.soak.killed_appliance import CONTEXT_LEN, Appliance, Killer
from tests.fakes.tiny_model import CONTROL, EOS_ID, write_tiny_model

T = TypeVar("T")

AIMS = (  # moments of a turn that a kill may wait for
    SENT,
    "turn.created",
    "turn.cache",
    "response.output_text.delta",
    "response.output_item.done",
    "response.output_item.done",
    "turn.completed",
)

NUM_SPOKEN = len(CONTROL) + 256  # ids behind these are holes in the vocabulary
MOST_AGAIN = 20  # of a kind, at the last look
TIE = 1e-3  # logits closer than this are equal for two ways to add up


class Model:
    """The same model, computed by another implementation."""

    def __init__(self, directory: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def check(self, session: Session, token_ids: list[int]) -> int:
        """Every sampled token is the likeliest behind what stands before it; how many."""
        if not token_ids:
            return 0
        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids])).logits[0]
        logits[:, [i for i in range(len(CONTROL)) if i != EOS_ID]] = -torch.inf
        logits[:, NUM_SPOKEN:] = -torch.inf
        num_checked = 0
        for turn in session.committed:
            start = turn["usage"]["input_tokens"]
            end = start + turn["committed_tokens"]
            self._check_text(turn, token_ids[start:end])
            body = session.bodies[turn["id"]]
            if is_bound(body):
                continue
            rows = logits[start - 1 : end - 1].clone()
            if body.get("ignore_eos"):  # then it is a control token as any other
                rows[:, EOS_ID] = -torch.inf
            for place, row in enumerate(rows, start):
                token_id = token_ids[place]
                if row[token_id] < row.max() - TIE:
                    raise Difference(
                        f"{turn['id']}: token {place - start} of {end - start} is {token_id}, "
                        f"the model's is {int(row.argmax())}"
                    )
                num_checked += 1
        return num_checked

    def _check_text(self, turn: Json, token_ids: list[int]) -> None:
        if any(item["type"] != "message" for item in turn["output"]):
            return
        spelled = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        text = "".join(part["text"] for item in turn["output"] for part in item["content"])
        if spelled != text:
            raise Difference(f"{turn['id']}: its tokens spell {spelled!r}, its items {text!r}")


class Soak:
    """One life of an appliance, many of its processes."""

    def __init__(self, folder: Path, seed: int, num_kills: int, num_clients: int) -> None:
        self.seed, self.num_kills = seed, num_kills
        self.model = write_tiny_model(folder / "model")
        config = json.loads((self.model / "config.json").read_text())
        config["max_position_embeddings"] = CONTEXT_LEN
        (self.model / "config.json").write_text(json.dumps(config))
        self.appliance = Appliance(folder, self.model)
        self.rng = random.Random(seed)
        self.seen = Seen()
        self.is_over = asyncio.Event()
        self.agents = [
            Agent(number, seed, self.appliance.url, self.seen, self.is_over)
            for number in range(num_clients)
        ]

    async def run(self) -> Json:
        """The figures. Raises: Difference."""
        self.appliance.start()
        await self.appliance.wait_ready()
        tasks = [asyncio.create_task(agent.run()) for agent in self.agents]
        kills = asyncio.create_task(self._kill())
        try:
            done, _ = await asyncio.wait([*tasks, kills], return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, kills):
                task.cancel()
            await asyncio.gather(*tasks, kills, return_exceptions=True)
        figures = await self._last_look()
        code = await self.appliance.stop()
        if code != 0 or self.appliance.processes():
            raise Difference(f"stopped with {code}, left: {self.appliance.processes()}")
        return {**self.seen.counts, **figures}

    async def _kill(self) -> None:
        killer = Killer(self.appliance, self.seed)
        kinds: dict[str, int] = {}
        for number in range(1, self.num_kills + 1):
            await asyncio.sleep(self.rng.choice([0.1, 1.0, 2.0, 5.0]) * self.rng.random())
            if self.rng.random() < 0.6:
                await self._wait_for(self.rng.choice(AIMS))
            began_s = time.monotonic()
            kind = await killer.kill()
            kinds[kind] = kinds.get(kind, 0) + 1
            line: Json = {"kill": number, "what": kind, "s": round(time.monotonic() - began_s, 1)}
            print(json.dumps(line | self.seen.counts), flush=True)
        await self.appliance.wait_ready()
        await asyncio.sleep(2.0)
        self.seen.counts |= {f"killed {kind}": number for kind, number in kinds.items()}
        self.is_over.set()

    async def _wait_for(self, what: str) -> None:
        """Some client hears of it, just now or a little ago."""
        self.seen.aim = what
        self.seen.hit.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.seen.hit.wait(), 5.0)
        await asyncio.sleep(self.rng.choice([0.0, 0.001, 0.003, 0.02]))

    async def _last_look(self) -> Json:
        connection = Connection(self.appliance.url, self.rng)
        admin = Connection(self.appliance.url, self.rng)
        admin.admin_key = self.appliance.admin_key
        try:
            num_tokens = await self._check_sessions(connection)
            num_again = await self._check_again(connection)
            await self._check_sides()
            stats = await self._check_pages(admin)
            report = await admin.get("/admin/doctor")
        finally:
            await connection.close()
            await admin.close()
        if report["status"] == "failed":
            raise Difference(f"doctor: {report}")
        names = ("l2_cached_prompt_tokens", "l3_cached_prompt_tokens")
        return {
            "tokens_compared": num_tokens,
            "grammar_turns_compared": num_again,
            "doctor": report["status"],
            "refused_starts": self.appliance.num_refused_starts,
            **{name: stats[name] for name in names},
        }

    async def _check_sessions(self, connection: Connection) -> int:
        model = Model(self.model)
        num_tokens = 0
        for session in self.seen.sessions:
            state = await connection.get(f"/v1/sessions/{session.id}")
            if state["status"] not in ("idle", "suspended", "requires_action"):
                raise Difference(f"a session is left {state['status']}: {state}")
            await connection.check_history(session)
            token_ids = (await connection.get(f"/v1/sessions/{session.id}/tokens"))["token_ids"]
            num_tokens += await asyncio.to_thread(model.check, session, token_ids)
        for session, told, body in self._some(self.seen.told):
            await connection.check_key(session.id, told, body)
        return num_tokens

    async def _check_again(self, connection: Connection) -> int:
        """What a grammar had a say in is said again, behind the same history; how many turns."""
        bound = [
            (session, place)
            for session in self.seen.sessions
            for place, turn in enumerate(session.committed)
            if place and is_bound(session.bodies[turn["id"]]) and turn["status"] != "cancelled"
        ]
        for session, place in self._some(bound):
            turn = session.committed[place]
            body = {**session.bodies[turn["id"]], "deadline_ms": 600_000}
            at = session.committed[place - 1]["id"]
            forked = await connection.post(f"/v1/sessions/{session.id}/fork", {"at": at})
            fork_id = forked["data"][0]["id"]
            again = await connection.post(f"/v1/sessions/{fork_id}/turns", body)
            said, now = ([text_of(item) for item in t["output"]] for t in (turn, again))
            if said != now and turn.get("reason") != "deadline":
                raise Difference(f"{turn['id']} said {said}, {again['id']} says {now}")
        return min(len(bound), MOST_AGAIN)

    def _some(self, cases: list[T]) -> list[T]:
        return self.rng.sample(cases, min(MOST_AGAIN, len(cases)))

    async def _check_sides(self) -> None:
        """What was answered under fire is what is answered now."""
        agent = self.agents[0]
        agent.connection = Connection(self.appliance.url, self.rng)
        try:
            for path, body, text in self.seen.side:
                if (now := await agent.side_answer(path, body)) != text:
                    raise Difference(f"{path} {body}: answered {text!r}, now {now!r}")
        finally:
            await agent.connection.close()

    async def _check_pages(self, admin: Connection) -> dict[str, Any]:
        """Nothing runs or moves: every page is in its one place, and those below are whole."""
        stats: dict[str, Any] = {}

        async def is_at_rest() -> bool:
            await admin.post("/admin/tiers/drain")
            stats.update((await admin.get("/admin/engine/stats"))["stats"])
            moving = ("transfers_in_flight", "in_flight_pages", "in_flight_l2_pages")
            return not any(stats[name] for name in (*moving, "requests_live", "owned_pages"))

        await until(is_at_rest, f"the engine comes to rest: {stats}")
        for tier, total in (("", "num_pages"), ("_l2", "num_l2_pages")):
            if stats[f"free{tier}_pages"] + stats[f"cached{tier}_pages"] != stats[total]:
                raise Difference(f"pages are astray: {stats}")
        verified = await admin.post("/admin/cache/verify")
        if any(verified["bad"].values()):
            raise Difference(f"pages are bad: {verified}")
        return stats


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--keep", type=Path, help="where the state of a broken run is copied to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moorage-soak-") as folder:
        soak = Soak(Path(folder), arguments.seed, arguments.kills, arguments.clients)
        result: Json = {"case": "appliance_kills", "seed": arguments.seed}
        began_s = time.monotonic()
        try:
            result |= asyncio.run(soak.run()) | {"kills": arguments.kills, "differences": 0}
        except Exception as error:
            why = str(error) if isinstance(error, Difference) else traceback.format_exc()
            result |= {"broken_seed": arguments.seed, "why": why, **soak.seen.counts}
            if arguments.keep is not None:
                shutil.copytree(
                    folder, arguments.keep / f"seed-{arguments.seed}", dirs_exist_ok=True,
                    ignore=lambda where, names: [n for n in names if n.startswith("engine.")],
                )  # fmt: skip
        finally:
            soak.appliance.end()
    print(json.dumps(result | {"s": round(time.monotonic() - began_s)}))
    return 1 if "why" in result else 0


if __name__ == "__main__":
    sys.exit(main())
