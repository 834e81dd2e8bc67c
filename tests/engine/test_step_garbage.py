# SPDX-License-Identifier: Apache-2.0
"""What a step made goes when the step ends, not when garbage is collected: on a GPU a prefill's
scratch is a gigabyte, and collections come by the number of objects, not by their bytes."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from types import FrameType, FunctionType, TracebackType

import pytest
import torch

from engine.client import EngineClient
from engine.execution import executor
from kernels.selection import set_override
from kernels.step_work import StepWork
from tests.engine.test_next_layer import _KINDS, _config, _folding_runner
from tests.engine.test_out_of_memory import ShortOfMemory
from tests.engine.test_prefill_pieces import _ids, _runner
from tests.fakes.live_engine import LiveEngine, make_request, run, serve
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_deepseek import write_tiny_deepseek


def num_alive(kind: type) -> int:
    return sum(issubclass(type(each), kind) for each in gc.get_objects())


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("form", ["expanded", "absorbed", None])
def test_steps_leave_no_tensors_behind(tmp_path: Path, pieces: bool, form: str | None) -> None:
    runner = _runner(tmp_path, pieces=pieces)
    driver = PagedDriver(runner, seed=1)
    rows = [driver.open(slot) for slot in range(4)]

    def run_steps() -> None:
        driver.step([(rows[0], _ids(20, 1)), (rows[1], _ids(9, 2))])
        driver.step([(rows[2], _ids(12, 3)), (rows[0], [5]), (rows[1], [6])])
        driver.step([(rows[3], _ids(7, 4))])
        driver.step([(rows[0], [1]), (rows[2], [2])])

    set_override("mla_prefill_form", form)
    try:
        run_steps()  # what is kept for good comes once
        gc.collect()
        gc.disable()
        before = num_alive(torch.Tensor)
        for _ in range(3):
            run_steps()
        assert num_alive(StepWork) == 0
        assert num_alive(torch.Tensor) <= before
    finally:
        gc.enable()
        set_override("mla_prefill_form", None)


def _is_ours(found: object) -> bool:
    kind = type(found)
    of_python = (FrameType, FunctionType, TracebackType, BaseException)
    named = kind.__module__.startswith(("engine.", "kernels.", "kvtiers."))
    return named or issubclass(kind, (torch.Tensor, *of_python))


@pytest.mark.parametrize("speculation", ["none", "ngram", "mtp"])
def test_served_requests_make_no_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculation: str
) -> None:
    """Sampled, with a bias, penalised, with drafts (folded), failed, aborted: no circle is closed,
    so all that they held goes with them."""
    tiny = write_tiny_deepseek(tmp_path / "tiny", num_nextn_predict_layers=1)
    config = replace(_config(tiny, load_format="dummy"), speculation=speculation)
    monkeypatch.setattr(executor.logger, "disabled", True)  # pytest keeps errors that are logged
    short = ShortOfMemory(monkeypatch)
    garbage: list[str] = []

    async def work(client: EngineClient) -> None:
        async def ask(turn: str) -> None:
            parts = enumerate(_KINDS.items())
            requests = (
                make_request(f"{turn} {kind}", _ids(20 + 9 * place, place), 12, **extra)
                for place, (kind, extra) in parts
            )
            await asyncio.gather(*(run(client, request) for request in requests))

        await ask("first")  # imports, compiled forms
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        await ask("served")
        short.fails = lambda num_tokens: True
        await ask("short of memory")
        aborted = asyncio.create_task(run(client, make_request("gone", _ids(30, 9), 200)))
        await client.stats()
        await client.abort("gone")
        await aborted
        await client.stats()
        gc.collect()
        garbage.extend(repr(type(found)) for found in gc.garbage if _is_ours(found))

    options = {"max_slots": config.max_slots, "token_budget": 48, "speculation": speculation}
    engine = LiveEngine(str(tmp_path / "run"), _folding_runner(config), **options)  # type: ignore[arg-type]
    try:
        serve(engine, work)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert short.num_raised == 1
    assert garbage == []
