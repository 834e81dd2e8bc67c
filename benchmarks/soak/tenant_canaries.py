# SPDX-License-Identifier: Apache-2.0
"""Tenants with secrets in their prompts, in tiers too small for all of them: not one foreign token.

The scripted model's KV is its token ids and each step reads all of its history back, so a page of
another tenant changes the answer. All tenants share a public head, some say word for word what
others say. Pages are evicted, moved, forgotten, fetched and loaded in three tiers; engines end and
others take over their L2 and their file store. Prints a JSON line an engine's life; exits 1 at the
first answer that does not follow from the tenant's own tokens, or where one tenant's tokens are
found under another's salt.

    python -m benchmarks.soak.tenant_canaries [--turns 20000] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from engine.client import EngineClient
from engine.config import TiersConfig
from engine.loop.heart import Keeper
from engine.transport import pack_ids
from kvtiers.host_region import make_region_fd
from kvtiers.objects import object_bytes
from kvtiers.stores import StoreSpec, open_store
from tests.engine.test_tiers import PAGE_SIZE, l2_bytes, prompt_of, settled, want
from tests.fakes.live_engine import Collected, LiveEngine, make_request, serve
from tests.fakes.scripted_runner import ScriptedLayout, ScriptedRunner, hashed_script

VOCAB = 300
NUM_TENANTS = 12
TURNS_A_LIFE = 1000
STREAMS = 6
HEAD = prompt_of(50, 12)
# Each tenant's secret, but for the last two, which say the same.
CANARIES = {
    f"tenant-{place}": [40 + 20 * min(place, NUM_TENANTS - 2) + i for i in range(12)]
    for place in range(NUM_TENANTS)
}


class Churn:
    """Turns of all tenants on one engine after the other."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_turns = 0
        self.num_life_turns = 0
        self.found: Counter[str] = Counter()

    async def turn(self, client: EngineClient) -> None:
        """One turn of some tenant, now and then with a move of its pages behind it."""
        rng = self.rng
        salt = rng.choice(list(CANARIES))
        prompt = [*HEAD, *CANARIES[salt], *prompt_of(rng.randrange(8), rng.randrange(1, 16))]
        self.num_turns += 1
        got = Collected()
        request = make_request(f"t{self.num_turns}", prompt, 6, salt=salt, tenant=salt)
        await asyncio.wait_for(got.read(client.generate(request)), 120)
        if got.ids != want(prompt, 6) or got.started is None:
            raise SystemExit(f"{salt} was answered with {got.ids}, not {want(prompt, 6)}")
        hit = got.started.cache
        self.found += Counter(l1=hit.l1, l2=hit.l2, l3=hit.l3, computed=hit.to_compute)
        if rng.random() < 0.2:
            ids = pack_ids(prompt[: rng.randrange(len(prompt)) + 1])
            await client.move_prefix(ids, rng.choice(["l1", "l2", "l3", "none"]), salt=salt)

    async def strangers(self, client: EngineClient) -> None:
        """What a tenant said is nowhere under a salt that never said anything."""
        for tokens in CANARIES.values():
            prompt = [*HEAD, *tokens]
            found = await client.query_prefix(prompt, salt="nobody")
            if found.to_compute != len(prompt):
                raise SystemExit(f"a stranger finds {found}")

    async def life(self, client: EngineClient) -> None:
        async def stream() -> None:
            while self.num_life_turns > 0:
                self.num_life_turns -= 1
                await self.turn(client)

        await asyncio.gather(*(stream() for _ in range(STREAMS)))
        await self.strangers(client)
        await settled(client)
        checked = await client.verify_tiers()
        if any(checked.bad.values()):
            raise SystemExit(f"damaged pages: {checked}")
        print(json.dumps({"turns": self.num_turns, **self.found}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    churn = Churn(arguments.seed)
    keeper = Keeper(l2_fd=make_region_fd())
    with tempfile.TemporaryDirectory(prefix="moorage-soak-") as folder:
        tiers = TiersConfig(l2_bytes=l2_bytes(30), l3_wait_ms=2000)
        layout = ScriptedLayout(PAGE_SIZE)
        spec = StoreSpec(
            kind="file",
            layout_fingerprint=layout.fingerprint(),
            object_bytes=object_bytes(layout.page_bytes),
            directory=str(Path(folder) / "kv"),
            quota_bytes=1 << 20,
        )
        while churn.num_turns < arguments.turns:
            churn.num_life_turns = min(TURNS_A_LIFE, arguments.turns - churn.num_turns)
            runner = ScriptedRunner(
                hashed_script(VOCAB),
                vocab_size=VOCAB,
                page_size=PAGE_SIZE,
                num_pages=24,
                max_context_len=60,
            )
            run = Path(folder) / "run"
            run.mkdir(exist_ok=True)
            store = open_store(spec)
            assert store is not None
            engine = LiveEngine(
                str(run), runner, token_budget=48, tiers=tiers, keeper=keeper, store=store
            )
            serve(engine, churn.life)
            store.close()  # as a process that ends does
    if not all(churn.found[tier] for tier in ("l1", "l2", "l3")):
        raise SystemExit(f"some tier served nothing: {churn.found}")
    print(
        json.dumps(
            {
                "soak": "tenant_canaries",
                "seed": arguments.seed,
                "turns": churn.num_turns,
                "tenants": NUM_TENANTS,
                "foreign_tokens": 0,
                **churn.found,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
