# SPDX-License-Identifier: Apache-2.0
"""The default model behind the whole engine: the reference's tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from engine import api
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.transport import pack_ids
from tests.fakes.engine_process import EngineProcess
from tests.fakes.live_engine import run

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "smollm2_golden.json"


def make_request(name: str, prompt: dict[str, Any]) -> api.GenerateRequest:
    """The reference was not stopped at the end of a turn and masked nothing."""
    return api.GenerateRequest(
        request_id=name,
        token_ids=pack_ids(prompt["prompt_ids"]),
        sampling=api.SamplingParams(
            max_new_tokens=len(prompt["greedy_ids"]),
            temperature=0.0,
            ignore_eos=True,
            mask_control_tokens=False,
        ),
    )


def test_batched_chunked_and_cached_runs_give_the_reference_tokens(tmp_path: Path) -> None:
    prompts = json.loads(GOLDEN.read_text())["prompts"][:2]
    config = EngineConfig(
        dtype="float32",
        weights="dequantized",
        run_dir=str(tmp_path),
        max_context_len=512,
        kv_pool_tokens=2048,
        page_size=16,
        max_slots=4,
        token_budget=24,  # chunks
    )

    async def main() -> None:
        client = EngineClient(config.socket_path)
        await client.start()
        await client.wait_ready(60)
        together = await asyncio.gather(
            *(run(client, make_request(f"a-{p['name']}", p)) for p in prompts)
        )
        for prompt, result in zip(prompts, together, strict=True):
            assert result.ids == prompt["greedy_ids"], prompt["name"]
        cached = await run(client, make_request("cached", prompts[-1]))
        assert cached.ids == prompts[-1]["greedy_ids"]
        assert cached.started is not None and cached.started.cache.to_compute <= 16
        await client.close()

    with EngineProcess(config):
        asyncio.run(main())
