# SPDX-License-Identifier: Apache-2.0
"""A model on a device, its pool, and the launcher of its steps (a ModelRunner that LaunchesSteps).

Does not know: how the model was loaded, requests, scheduling.
"""

from __future__ import annotations

import torch

from engine.execution.batch import ForwardBatch
from engine.execution.device_launcher import DeviceLauncher, DeviceLimits
from engine.models.model import PagedModel
from kvtiers.device_pool import DevicePool
from kvtiers.layout import KvLayout


class DeviceModelRunner:
    """The last page of the pool belongs to padding rows; `num_pages` leaves it out."""

    def __init__(
        self,
        model: PagedModel,
        pool: DevicePool,
        *,
        max_slots: int,
        max_rows: int,
        max_tokens: int,
        max_context_len: int,
        model_fingerprint: str,
        eager: bool,
        warms_prefill: bool = True,
        prefill_graphs: bool = False,
        drafted_tokens: int = 0,
        longest_chain: int = 1,
    ) -> None:
        self._pool = pool
        self.vocab_size = model.vocab_size
        self.max_context_len = max_context_len
        self.page_size = pool.layout.page_size
        self.num_pages = pool.num_pages - 1
        self.model_fingerprint = model_fingerprint
        limits = DeviceLimits(
            max_slots=max_slots,
            max_rows=max_rows,
            max_tokens=max_tokens,
            page_size=self.page_size,
            table_width=-(-max_context_len // self.page_size) + 1,
            sentinel_page=self.num_pages,
            eager=eager,
            warms_prefill=warms_prefill,
            prefill_graphs=prefill_graphs,
            drafted_tokens=drafted_tokens,
            longest_chain=longest_chain,
        )
        self._launcher = DeviceLauncher(model, pool.kv, limits)
        self.next_input_ids = self._launcher.next_input_ids

    @property
    def kv_pool(self) -> torch.Tensor:
        """The pool's tensor, of `layout.pool_shape(num_pages + 1)`."""
        return self._pool.kv

    @property
    def layout(self) -> KvLayout:
        return self._pool.layout

    def step_launcher(self) -> DeviceLauncher:
        return self._launcher

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """One step by itself, waited for; logits fp32 [S, vocab_size] on the host.

        Takes the batch's whole page table. Not for use beside the launcher's steps.
        """
        with torch.no_grad():
            return self._launcher.forward_now(batch)

    def warm_up(self) -> None:
        """Compile and capture before the first request."""
        self._launcher.warm_up()
