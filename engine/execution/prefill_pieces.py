# SPDX-License-Identifier: Apache-2.0
"""Steps with prefill rows, in captured pieces of a few padded sizes.

What layers do to each token alone is a graph a layer; attention is launched in between, as its
launches follow from the rows' lengths. A step that fits no size is not for this. The envelope is
the model's (`PiecewiseModel`): padding is rewritten each step and is read by nobody.

Does not know: rows, pages, what a piece is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from engine.execution.graphs import GraphSet
from engine.models.model import PiecewiseModel, StepRows

# (up to so many tokens, padded to a multiple of). A larger step is bound by the device whatever the
# host does.
PADDING = ((1024, 128), (2048, 256), (4096, 512))


def piece_sizes(max_tokens: int) -> list[int]:
    """Padded sizes for steps of up to `max_tokens`, ascending. A step as large as it may be has a
    size of its own: it is what long prompts are computed in."""
    sizes: list[int] = []
    for most, multiple in PADDING:
        first = sizes[-1] if sizes else 0
        sizes += range(first + multiple, most + 1, multiple)
    fitting = [size for size in sizes if size < max_tokens]
    return [*fitting, max_tokens] if max_tokens <= sizes[-1] else fitting


class PrefillPieces:
    """One model, one step at a time."""

    def __init__(self, model: PiecewiseModel, max_tokens: int, graphs: GraphSet) -> None:
        self._model = model
        self._graphs = graphs
        self._captures: int | None = None  # the size that is captured just now
        self.sizes = piece_sizes(max_tokens)
        model.prepare_pieces(self.sizes[-1])

    def size_for(self, num_tokens: int) -> int | None:
        """The least size that holds a step of so many tokens; None: none does."""
        if self._captures is not None:
            return self._captures
        return next((size for size in self.sizes if size >= num_tokens), None)

    def forward(
        self,
        ids: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sampled: torch.Tensor,
        size: int,
    ) -> torch.Tensor:
        """Logits fp32 [S, vocab_size]. Requires: `size` holds the step's tokens."""
        run = partial(self._run, size)
        return self._model.forward_in_pieces(ids, rows, kv_pool, sampled, size, run)

    @contextmanager
    def capturing(self, size: int) -> Iterator[None]:
        """While it lasts, a step runs in pieces of this size, each of which is captured."""
        self._captures = size
        try:
            yield
        finally:
            self._captures = None

    def _run(self, size: int, number: int, piece: Callable[[], None]) -> None:
        act = self._graphs.run if self._captures is None else self._graphs.add
        act(("piece", size, number), piece)
