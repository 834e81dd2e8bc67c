# SPDX-License-Identifier: Apache-2.0
"""Real models whose steps read pages as they come: no layer is read before it is there.

What has not come yet is NaN, and each layer comes late.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.client import EngineClient
from engine.config import EngineConfig, TiersConfig
from engine.execution.batch import ModelRunner
from engine.execution.model_runner import build_model_runner
from engine.loop.server import EngineServer
from engine.transport import pack_ids
from kvtiers.device_memory import HostMemory, Incoming
from kvtiers.layered_load import Fence, LayeredLoad
from tests.engine.test_tiers import settled
from tests.fakes.device_runner import device_runner
from tests.fakes.live_engine import LiveEngine, make_request, run, serve
from tests.fakes.tiny_deepseek import write_tiny_deepseek
from tests.fakes.tiny_model import write_tiny_model

PAGE, SLOTS, PAGES = 16, 2, 40
L2_BYTES = 32 << 20


class LateMemory(HostMemory):
    """Pages are NaN until they come, layer by layer, each some milliseconds after it is wanted."""

    def write_layers(self, pages: Incoming, load: LayeredLoad) -> None:
        drawn = list(pages)
        self._pages[[page for page, _ in drawn]] = 0xFF
        late = LayeredLoad(load.num_layers)

        def arrived(num_layers: int, fence: Fence | None) -> None:
            load.arrived(num_layers, fence)
            time.sleep(0.004)

        late.arrived = arrived  # type: ignore[method-assign]
        super().write_layers(drawn, late)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_runner(config: EngineConfig, kind: str) -> ModelRunner:
    if kind == "host":
        return build_model_runner(config)
    return device_runner(config)


@pytest.mark.parametrize(
    ("model", "kind", "speculation"),
    [
        ("deepseek", "host", "none"),
        ("deepseek", "host", "mtp"),
        ("deepseek", "device", "none"),
        ("deepseek", "device", "mtp"),
        ("llama", "host", "none"),
    ],
)
@pytest.mark.parametrize("num_new", [1, 5])
def test_the_tokens_are_those_of_an_engine_without_tiers(
    tmp_path: Path, model: str, kind: str, speculation: str, num_new: int
) -> None:
    """`num_new` 1: a step of rows of one token, which may be a captured graph."""
    if model == "llama":
        directory = write_tiny_model(tmp_path / "model")
    else:
        directory = write_tiny_deepseek(
            tmp_path / "model", num_nextn_predict_layers=int(speculation == "mtp")
        )
    config = EngineConfig(
        model=str(directory),
        load_format="dummy" if model == "deepseek" else "auto",
        dtype="float32",
        num_threads=1,
        page_size=PAGE,
        kv_pool_tokens=PAGE * PAGES,
        max_slots=SLOTS,
        max_context_len=256,
        speculation=speculation,
    )
    prompt = [3 + (i * 7919) % 200 for i in range(6 * PAGE)]
    later = [*prompt, *range(50, 50 + num_new)]
    request = make_request("later", later, 8, sampling={"ignore_eos": True})
    answers: list[tuple[list[int], float]] = []

    async def alone(client: EngineClient) -> None:
        before = await client.stats()
        ids = (await run(client, request)).ids
        stats = await client.stats()
        name = "draft_tokens_accepted"  # guesses come of the model's last layer
        answers.append((ids, stats[name] - before[name]))

    async def work(client: EngineClient) -> None:
        await run(client, make_request("first", prompt, 1))
        await settled(client)
        await client.move_prefix(pack_ids(prompt), "l2")
        await settled(client)
        await alone(client)
        stats = await settled(client)
        assert stats["load_back_layered_pages"] == 6 and stats["load_back_lost"] == 0
        assert stats["requests_error"] == 0

    def prepare(server: EngineServer) -> None:
        plane = server._tiers._plane
        assert plane is not None
        memory = plane.transfers._device
        assert isinstance(memory, HostMemory)
        late = LateMemory(torch.empty(0, dtype=torch.uint8))
        late._pages = memory._pages
        plane.transfers._device = late

    runner = make_runner(config, kind)
    options = dict(max_slots=SLOTS, token_budget=64, speculation=speculation)
    serve(LiveEngine(str(tmp_path / "a"), runner, tiers=TiersConfig(l2_bytes=0), **options), alone)  # type: ignore[arg-type]
    tiers = TiersConfig(l2_bytes=L2_BYTES, overlap_loads="on")
    serve(
        LiveEngine(str(tmp_path / "b"), runner, tiers=tiers, prepare=prepare, **options),  # type: ignore[arg-type]
        work,
    )
    assert len(answers[0][0]) == 8 and answers[0] == answers[1]
