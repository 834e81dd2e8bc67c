# SPDX-License-Identifier: Apache-2.0
"""Drafts on a GPU: graphs against eager runs, and no token changed where rounding is fixed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.execution.model_runner import build_model_runner
from kernels.fixed_order import use_usual_order
from kernels.selection import set_override
from tests.fakes.tiny_deepseek import GPU_SHAPE, write_tiny_deepseek

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# Few words, so that a model that knows none says many of them again.
FEW = {20: 20.0, 40: 20.0, 60: 20.0}


@pytest.fixture(autouse=True)
def usual_order() -> Iterator[None]:
    yield
    use_usual_order()
    set_override("mla_decode_form", None)


def _served(tmp_path: Path, name: str, **settings: Any) -> tuple[list[int], float, float]:
    """One request alone: (its tokens, drafts, those of them that were right)."""
    pytest.importorskip("_scheduler")
    from tests.fakes.live_engine import LiveEngine, make_request, run, serve

    write_tiny_deepseek(tmp_path, **GPU_SHAPE, num_nextn_predict_layers=1)
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        device="cuda",
        max_slots=6,
        token_budget=256,
        kv_pool_tokens=32768,
        **settings,
    )
    ids: list[int] = []
    counts: list[float] = []

    async def work(client: Any) -> None:
        prompt = [7 + place % 11 for place in range(300)]
        for number, bias in enumerate((FEW, {})):
            sampling = {"ignore_eos": True, "logit_bias": bias}
            answer = await run(client, make_request(f"r{number}", prompt, 120, sampling=sampling))
            assert answer.finished is not None and answer.finished.error_code is None
            ids.extend(answer.ids)
        stats = await client.stats()
        counts.extend(stats[key] for key in ("draft_tokens", "draft_tokens_accepted"))

    runner = build_model_runner(config)
    engine = LiveEngine(
        str(tmp_path / name),
        runner,
        max_slots=6,
        token_budget=256,
        speculation=config.speculation,
    )
    serve(engine, work)
    return ids, counts[0], counts[1]


@pytest.mark.parametrize("form", ["rows", "folded"])
@pytest.mark.parametrize("speculation", ["ngram", "mtp"])
def test_graphs_draft_what_eager_runs_draft(tmp_path: Path, speculation: str, form: str) -> None:
    settings = {"kernels": f"mla_decode_form={form}", "speculation": speculation}
    graphs = _served(tmp_path, "graphs", **settings)
    eager = _served(tmp_path, "eager", eager=True, **settings)
    assert graphs[0] == eager[0]
    assert graphs[1] > 0 and eager[1] > 0


@pytest.mark.parametrize("speculation", ["ngram", "mtp"])
def test_drafts_change_no_token_of_a_deterministic_engine(tmp_path: Path, speculation: str) -> None:
    settings = {"deterministic": True, "dtype": "bfloat16"}
    without = _served(tmp_path, "none", **settings)
    drafted = _served(tmp_path, "drafted", speculation=speculation, **settings)
    assert drafted[0] == without[0]
    assert drafted[1] > 0
