# SPDX-License-Identifier: Apache-2.0
"""What every model offers the runner, and what it is given: options at load, rows at each step.

Does not know: architectures, files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from kernels.llama_stack import PagedRows
from kernels.ops.mla_decode_form import FoldForm
from kvtiers.layered_load import LayeredLoad, wait_for_layer
from kvtiers.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How weights are kept: in their stored low-bit form where a kernel takes it, or in `dtype`."""

    dtype: torch.dtype
    keep_packed: bool
    max_positions: int  # rows of the rope table
    max_rows: int = 1  # rows of a step
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    drafts: bool = False  # load the layer that guesses the token behind the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRows:
    """The tokens of a decode step once more, for attention: N rows of `q_len` queries each, those
    of one sequence in one row. Places that no token has are padding. All int32."""

    q_len: int
    places: torch.Tensor  # [T] of each token among the N * q_len queries
    row_slots: torch.Tensor  # [N]
    seq_lens: torch.Tensor  # [N] tokens of KV up to the row's last query; 0: padding


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows(PagedRows):
    """The rows of one step: the first `num_prefill_rows` hold the first `num_prefill_tokens`
    tokens, each row behind them has exactly one."""

    num_prefill_rows: int
    num_prefill_tokens: int
    # Slots, indptr and lengths of the prefill rows once more, on the host: a kernel that needs
    # them there must not wait for the device. None: those above are on the host.
    prefill_on_host: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    samples_all: bool = False  # each row has one token, and all are sampled in order
    # Pages the rows read that are still on their way, layer by layer.
    loads: tuple[LayeredLoad, ...] = ()
    # Given by who asked a FoldingModel: attention goes by these. Only without prefill rows.
    folded: FoldedRows | None = None

    def wait_for_layer(self, layer: int) -> None:
        """To be called before a layer of the pool is read; at once where nothing is on its way."""
        wait_for_layer(self.loads, layer)


@runtime_checkable
class DraftingModel(Protocol):
    """A model with a layer of its own that guesses one token further."""

    @property
    def can_draft(self) -> bool:
        """That layer was loaded."""
        ...

    @property
    def last_hidden(self) -> torch.Tensor:
        """[T, hidden]: what `forward` ended with for each token of its last step; its own memory,
        valid until the next call."""
        ...

    def draft(
        self,
        next_ids: torch.Tensor,
        hidden: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Write that layer's KV for the step that `forward` ran last; return int32 [S]: the token
        guessed behind the one that each sampled row's last token is followed by.

        Args:
            next_ids: int32 [T], the token that follows each of the step's.
            hidden: `last_hidden` of that step.
        """
        ...


@runtime_checkable
class FoldingModel(Protocol):
    """A model whose attention may take several tokens of a sequence as one row, and read what rows
    share once."""

    def fold_forms(self, kv_pool: torch.Tensor) -> tuple[FoldForm, ...]:
        """How many, in this pool; none: rows stay as they are."""
        ...

    def rows_of_group(self, kv_pool: torch.Tensor) -> int:
        """How many rows in turn read together what they share, in this pool; 1: none."""
        ...


RunPiece = Callable[[int, Callable[[], None]], None]


@runtime_checkable
class PiecewiseModel(Protocol):
    """A model that can do what each layer does to each token alone in pieces of a padded size."""

    def prepare_pieces(self, most: int) -> None:
        """Allocate the buffers of the pieces, for up to so many tokens. Before any capture."""
        ...

    def forward_in_pieces(
        self,
        input_ids: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sample_rows: torch.Tensor,
        num_padded: int,
        run: RunPiece,
    ) -> torch.Tensor:
        """As `forward`; pieces run over `num_padded` tokens, of which the step's come first.

        Args:
            run: called with the number of each piece, ascending from 0, and the piece itself,
                which it calls, or replays what it captured of it: a piece of one number and
                padded size launches the same kernels on the same memory each time.
        """
        ...


class PagedModel(Protocol):
    """A decoder over paged KV."""

    @property
    def num_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def step_bytes_per_token(self) -> int:
        """What a prefill step holds at once for each of its tokens, about; bytes."""
        ...

    def kv_layout(self, page_size: int, dtype: str) -> KvLayout:
        """The bytes of one page of this model's KV; dtype float32 | bfloat16 | fp8."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Write the step's KV and return logits fp32 [S, vocab_size] (a new tensor).

        Args:
            input_ids: int32 [T], inside the vocabulary.
            kv_pool: a tensor of `kv_layout(...).pool_shape(num_pages)`.
            sample_rows: int32 [S], rows whose last token's logits are wanted.
        """
        ...
