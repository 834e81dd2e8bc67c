# SPDX-License-Identifier: Apache-2.0
"""Builds the model and its KV pool, and runs one step of it (the ModelRunner of batch.py).

Does not know: requests, scheduling, sampling. One worker thread may call `forward`.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import time

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.batch import ForwardBatch
from engine.execution.device_runner import DeviceModelRunner
from engine.execution.folding import folded_rows
from engine.execution.memory import free_device_bytes, free_host_bytes
from engine.execution.model_loading import (
    LoadedModel,
    has_compiled_decoder,
    kernels_asked_for,
    load_model,
)
from engine.execution.one_token_steps import OneTokenSteps
from engine.models.model import DraftingModel, FoldingModel, PagedModel, StepRows
from kernels.errors import KernelInputError, NoKernelFoundError
from kernels.late_compiles import report_late_compiles
from kernels.ops.page_copy import copy_pages
from kernels.selection import set_override
from kvtiers.config import DevicePoolConfig
from kvtiers.device_pool import DevicePool, count_pages
from kvtiers.layout import KvLayout

logger = logging.getLogger(__name__)

# The rest is for activations, expanded prefixes of a prefill, and graphs.
GPU_POOL_SHARE = 0.85
_WARM_UP_TOKENS = 32  # beyond what kernels take for a decode step


class PagedModelRunner:
    """A model over one pool. `next_input_ids` int32 [max_slots] is the sampler's to write."""

    def __init__(
        self,
        model: PagedModel,
        pool: DevicePool,
        *,
        max_slots: int,
        max_context_len: int,
        model_fingerprint: str,
    ) -> None:
        self._model = model
        self._pool = pool
        self.vocab_size = model.vocab_size
        self.max_context_len = max_context_len
        self.page_size = pool.layout.page_size
        self.num_pages = pool.num_pages
        self.model_fingerprint = model_fingerprint
        self.next_input_ids = torch.zeros(max_slots, dtype=torch.int32)
        self._forms = model.fold_forms(pool.kv) if isinstance(model, FoldingModel) else ()

    @property
    def kv_pool(self) -> torch.Tensor:
        """The pool's tensor, of `layout.pool_shape(num_pages)`."""
        return self._pool.kv

    @property
    def layout(self) -> KvLayout:
        return self._pool.layout

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the step's KV and return logits fp32 [S, vocab_size]; a new tensor each step.

        Raises:
            KernelInputError: shapes disagree or an id is outside the vocabulary.
        """
        # Not inference_mode: the sampler edits the logits in place, outside of it.
        with torch.no_grad():
            if batch.page_copies.shape[0]:
                copy_pages(self._pool.kv, batch.page_copies)
            rows = self._rows(batch)
            return self._model.forward(
                self._resolved_ids(batch), rows, self._pool.kv, batch.sample_rows
            )

    @property
    def can_draft(self) -> bool:
        """The model guesses one token further."""
        return isinstance(self._model, DraftingModel) and self._model.can_draft

    def draft(self, batch: ForwardBatch, next_ids: torch.Tensor) -> torch.Tensor:
        """int32 [S]: guesses behind the sampled tokens. Requires: `forward` ran this batch last.

        Args:
            next_ids: int32 [T], as `DraftingModel` takes it.
        """
        assert isinstance(self._model, DraftingModel)
        with torch.no_grad():
            rows = self._rows(batch)
            hidden = self._model.last_hidden
            return self._model.draft(next_ids, hidden, rows, self._pool.kv, batch.sample_rows)

    def _rows(self, batch: ForwardBatch) -> StepRows:
        num_prefill_rows = count_prefill_rows(batch.row_indptr)
        return StepRows(
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            row_indptr=batch.row_indptr,
            row_slots=batch.row_slots,
            seq_lens=batch.seq_lens,
            page_table=batch.page_table,
            page_size=self.page_size,
            num_prefill_rows=num_prefill_rows,
            num_prefill_tokens=int(batch.row_indptr[num_prefill_rows]),
            loads=batch.loads,
            folded=None if num_prefill_rows else folded_rows(batch, self._forms),
        )

    def warm_up(self) -> None:
        """Run a small and a large step, so that weights are repacked before the first request."""
        num_positions = min(_WARM_UP_TOKENS, self.page_size, self.max_context_len)
        for num_tokens in (1, num_positions):
            positions = torch.arange(num_tokens, dtype=torch.int32)
            one = torch.tensor([num_tokens], dtype=torch.int32)
            zero = torch.zeros(1, dtype=torch.int32)
            rows = StepRows(
                positions=positions,
                slot_mapping=positions,  # page 0
                row_indptr=torch.cat((zero, one)),
                row_slots=zero,
                seq_lens=one,
                page_table=zero[None],
                page_size=self.page_size,
                num_prefill_rows=int(num_tokens > 1),
                num_prefill_tokens=num_tokens if num_tokens > 1 else 0,
            )
            with torch.no_grad():
                self._model.forward(torch.zeros_like(positions), rows, self._pool.kv, zero)
        self._pool.kv[0].zero_()

    def _resolved_ids(self, batch: ForwardBatch) -> torch.Tensor:
        """input_ids with every -1 replaced by the id last sampled in the row's slot."""
        if batch.input_ids.shape[0] == 0:
            return batch.input_ids
        lowest, highest = batch.input_ids.aminmax()
        if int(highest) >= self.vocab_size:
            raise KernelInputError("input_ids", int(highest), f"below {self.vocab_size}")
        if int(lowest) >= 0:
            return batch.input_ids
        is_pending = batch.input_ids < 0
        row_lens = batch.row_indptr.diff()
        token_slots = batch.row_slots.repeat_interleave(row_lens).long()
        return torch.where(is_pending, self.next_input_ids[token_slots], batch.input_ids)


def build_model_runner(config: EngineConfig) -> PagedModelRunner | DeviceModelRunner:
    """Load the model a configuration names and give it a KV pool.

    Raises:
        ModelError: the model is missing, damaged or not supported.
        ConfigError: a setting does not fit the model.
        PoolTooSmallError: memory does not hold one request of `max_context_len` tokens.
    """
    started = time.monotonic()
    use_threads(config.num_threads or len(os.sched_getaffinity(0)))
    loaded = load_model(config)
    override_kernels(config.kernels)  # over those of a fixed order, too
    layout = loaded.model.kv_layout(config.page_size, loaded.kv_dtype)
    build = _host_runner if loaded.device.type == "cpu" else _device_runner
    runner = build(config, loaded, layout)
    try:
        runner.warm_up()
    except NoKernelFoundError as error:
        if not config.kernels:
            raise
        allowed = "kernels that take this model's calls"
        why = "; ".join(line.strip() for line in str(error).splitlines()[1:])
        raise ConfigError("engine.kernels", config.kernels, allowed, why) from error
    if loaded.device.type == "cuda":
        report_late_compiles()
    logger.info(
        "model ready: %s device=%s dtype=%s weights=%s kv_pages=%d page_size=%d load_s=%.2f",
        loaded.source_name,
        loaded.device,
        loaded.dtype_name,
        loaded.weights_name,
        runner.num_pages,
        config.page_size,
        time.monotonic() - started,
    )
    return runner


def override_kernels(setting: str) -> None:
    """Make `family=name,family=name` so, for the whole process. Raises: ConfigError."""
    for family, name in kernels_asked_for(setting):
        set_override(family, name)


def _host_runner(config: EngineConfig, loaded: LoadedModel, layout: KvLayout) -> PagedModelRunner:
    num_pages = count_pages(
        DevicePoolConfig(pool_tokens=config.kv_pool_tokens),
        layout,
        free_bytes=free_host_bytes(),
        max_context_len=loaded.max_context_len,
    )
    return PagedModelRunner(
        OneTokenSteps(loaded.model) if config.deterministic else loaded.model,
        DevicePool(layout, num_pages, loaded.device),
        max_slots=config.max_slots,
        max_context_len=loaded.max_context_len,
        model_fingerprint=_fingerprint(loaded, layout),
    )


def _device_runner(
    config: EngineConfig, loaded: LoadedModel, layout: KvLayout
) -> DeviceModelRunner:
    """The pool takes what weights left free, less what steps need at their largest."""
    is_capturable = loaded.dtype_name == "bfloat16" and not config.deterministic
    if not is_capturable and not config.eager:
        reason = "deterministic" if config.deterministic else loaded.dtype_name
        logger.warning("engine.eager is taken as set: %s runs without graphs", reason)
    usual = config.tokens_per_step(loaded.device.type)
    # What is larger is one prompt's step, and no larger than a context.
    lone = min(config.tokens_per_lone_step(loaded.device.type), loaded.max_context_len)
    max_tokens = max(usual, lone)
    num_pages = count_pages(
        DevicePoolConfig(
            pool_tokens=config.kv_pool_tokens,
            free_share=GPU_POOL_SHARE,
            max_auto_bytes=1 << 50,
        ),
        layout,
        free_bytes=free_device_bytes(loaded.device),
        # The share that is left free is for a usual step.
        kept_bytes=(max_tokens - usual) * loaded.model.step_bytes_per_token,
        max_context_len=loaded.max_context_len,
    )
    return DeviceModelRunner(
        loaded.model,
        DevicePool(layout, num_pages + 1, loaded.device),
        max_slots=config.max_slots,
        max_rows=config.rows_per_step,
        max_tokens=max_tokens,
        max_context_len=loaded.max_context_len,
        model_fingerprint=_fingerprint(loaded, layout),
        eager=config.eager or not is_capturable,
        warms_prefill=not config.deterministic,  # one form of each kernel serves every step
        prefill_graphs=config.prefill_graphs and is_capturable,
        drafted_tokens=config.drafted_tokens,
        longest_chain=config.longest_chain,
    )


def count_prefill_rows(row_indptr: torch.Tensor) -> int:
    """How many rows come before those that have one token each, to the end of the step."""
    is_longer = row_indptr.diff() != 1
    return int(is_longer.nonzero()[-1]) + 1 if bool(is_longer.any()) else 0


def use_threads(num_threads: int) -> None:
    """Set the compute threads of torch and, where it is there, of the compiled extension."""
    torch.set_num_threads(num_threads)
    if has_compiled_decoder():
        kernels_cpu = importlib.import_module("kernels.cpu")
        kernels_cpu.set_num_threads(num_threads)


def _fingerprint(loaded: LoadedModel, layout: KvLayout) -> str:
    """Changes with anything that changes the KV a token gets."""
    parts = (loaded.weights_fingerprint, loaded.weights_name, layout.fingerprint())
    return hashlib.sha256(";".join(parts).encode()).hexdigest()[:32]
