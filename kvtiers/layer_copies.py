# SPDX-License-Identifier: Apache-2.0
"""Pages into a GPU's L1 by layers: the first layers of all of them, then the next, in batches.

Does not know: whether a page is any good, who reads a layer.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from kvtiers.batch_copy import Addresses, BatchCopy, CopyRefusedError
from kvtiers.lanes import Lane
from kvtiers.layered_load import LayeredLoad, layer_groups
from kvtiers.page_pieces import Incoming, Indices, Rows, Window

logger = logging.getLogger(__name__)

# Of a page. One copy by torch takes the host 8 us (20 on a slow one) and the link as long for
# 400 KiB; in a batch it takes the host less than the link takes for a tenth of that. The first
# piece is small so that the reader can begin; smaller ones are slower for the link.
PIECE_BYTES = 400 << 10
FIRST_PIECE_BYTES = 144 << 10
CALL_BYTES = 32 << 20  # of a batch: 0.6 ms of a link of 55 GB/s
UNDER_WAY_BYTES = 192 << 20  # what the link has while the host is late: 3.6 ms
# A copy counts as so much at least: a stream holds about a thousand operations that wait.
LEAST_COPY_BYTES = 256 << 10


class LayerCopies:
    """Writes pages by layers. One thread.

    Args:
        pages: uint8 [num_pages, page_bytes] on the device.
        batch: None: torch copies, one call of its own for each piece.
        first_bytes, most_bytes: of a page, in the first batches and in those behind them.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        lane: Lane,
        batch: BatchCopy | None,
        *,
        first_bytes: int | None = None,
        most_bytes: int | None = None,
    ) -> None:
        self.pages = pages
        self.lane = lane
        self._rows = Rows(pages.data_ptr(), pages.shape[0], pages.stride(0), pages.shape[1])
        self.batch = batch
        self._first_bytes = first_bytes or FIRST_PIECE_BYTES
        self._most_bytes = most_bytes or PIECE_BYTES
        self._is_proved = False  # the batch; until then the driver may say that it has none

    @property
    def name(self) -> str:
        """What copies."""
        return "torch" if self.batch is None else self.batch.name

    def write(self, pages: Incoming, load: LayeredLoad) -> None:
        """As `DeviceMemory.write_layers` says."""
        layer_bytes = self.pages.shape[1] // load.num_layers
        most = self._most_bytes
        first = self._first_bytes if self._can_batch(pages.bodies) else most
        runs = layer_groups(load.num_layers, layer_bytes, first, most)
        pieces = [slice(run.start * layer_bytes, run.stop * layer_bytes) for run in runs]
        window = Window(UNDER_WAY_BYTES)
        try:
            drawn = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
            for targets, slots in pages.parts:
                drawn.append((np.array(targets, np.int64), np.array(slots, np.int64)))
                self._copy(*drawn[-1], pages.bodies, pieces[0], window)
            load.arrived(runs[0].stop, self.lane.fence())
            into, out_of = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
            for run, piece in zip(runs[1:], pieces[1:], strict=True):
                self._copy(into, out_of, pages.bodies, piece, window)
                load.arrived(run.stop, self.lane.fence())
        finally:  # whoever hears of a failed move gives its page to somebody else
            self.lane.finish()

    def _can_batch(self, bodies: NDArray[np.uint8]) -> bool:
        """A region is pinned whole, or not: one address stands for all."""
        return self.batch is not None and self.batch.is_pinned(bodies.ctypes.data)

    def _copy(
        self,
        pages: Indices,
        slots: Indices,
        bodies: NDArray[np.uint8],
        piece: slice,
        window: Window,
    ) -> None:
        """Queue one piece of each page, some at a time. Raises IndexError before any of them."""
        sources = Rows(bodies.ctypes.data, len(bodies), bodies.strides[0], bodies.shape[1])
        into, out_of = self._rows.addresses(pages, piece), sources.addresses(slots, piece)
        copy_bytes = max(piece.stop - piece.start, LEAST_COPY_BYTES)
        is_batch = self._can_batch(bodies)
        most = max(1, CALL_BYTES // copy_bytes)
        for at in range(0, len(pages), most):
            some = slice(at, at + most)
            num_bytes = len(pages[some]) * copy_bytes
            window.make_room(num_bytes)
            if not is_batch or not self._copy_batch(into[some], out_of[some], piece):
                self._copy_each(pages[some], slots[some], bodies, piece)
            window.note(num_bytes, self.lane.mark())

    def _copy_batch(self, into: Addresses, out_of: Addresses, piece: slice) -> bool:
        """One call; False: the driver has none such."""
        if self.batch is None:
            return False
        try:
            self.batch(into, out_of, piece.stop - piece.start, self.lane.handle)
        except CopyRefusedError as error:
            if self._is_proved or not error.is_unfit:
                raise
            logger.warning("pages are copied one by one: no batches (%s)", error)
            self.batch = None
            return False
        self._is_proved = True
        return True

    def _copy_each(
        self, pages: Indices, slots: Indices, bodies: NDArray[np.uint8], piece: slice
    ) -> None:
        """A call for each, but only one without the interpreter's lock."""
        whole = torch.from_numpy(bodies)
        targets = [self.pages[page, piece] for page in pages.tolist()]
        sources = [whole[slot, piece] for slot in slots.tolist()]
        with self.lane.entered():
            torch._foreach_copy_(targets, sources, non_blocking=True)
