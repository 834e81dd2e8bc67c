# SPDX-License-Identifier: Apache-2.0
"""A GPU's runner whose device is the CPU: graphs are called, not captured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.execution.device_runner import DeviceModelRunner
from engine.execution.model_loading import load_model
from kvtiers.device_pool import DevicePool


def tiny_config(
    directory: Path, *, page_size: int, num_pages: int, max_slots: int = 4, **changes: Any
) -> EngineConfig:
    """Of the tiny model in a directory, with weights made up, in fp32 on one thread."""
    config = EngineConfig(
        model=str(directory),
        load_format="dummy",
        dtype="float32",
        device="cpu",
        num_threads=1,
        page_size=page_size,
        kv_pool_tokens=page_size * num_pages,
        max_slots=max_slots,
        max_context_len=512,
    )
    return replace(config, **changes)


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
