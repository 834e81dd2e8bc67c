# SPDX-License-Identifier: Apache-2.0
"""A GPU's runner whose device is the CPU: graphs are called, not captured."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.execution.device_runner import DeviceModelRunner
from engine.execution.model_loading import load_model
from kvtiers.device_pool import DevicePool


def device_runner(
    config: EngineConfig, *, eager: bool = False, prefill_graphs: bool = False, max_tokens: int = 64
) -> DeviceModelRunner:
    """Warmed up; its pool has the pages of `config.kv_pool_tokens`, and the sentinel."""
    loaded = load_model(config)
    layout = loaded.model.kv_layout(config.page_size, "float32")
    num_pages = config.kv_pool_tokens // config.page_size
    runner = DeviceModelRunner(
        loaded.model,
        DevicePool(layout, num_pages + 1, torch.device("cpu")),
        max_slots=config.max_slots,
        max_rows=config.rows_per_step,
        max_tokens=max_tokens,
        max_context_len=config.max_context_len,
        model_fingerprint="tiny",
        eager=eager,
        prefill_graphs=prefill_graphs,
        drafted_tokens=config.drafted_tokens,
        longest_chain=config.longest_chain,
    )
    runner.warm_up()
    return runner
