# SPDX-License-Identifier: Apache-2.0
"""Where one request is in its grammar: which tokens may come next, and taking one.

Does not know: other rows, logits, how the grammar was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class GrammarMatcher:
    """The grammar state of one request. Belongs to the loop's thread."""

    def __init__(self, compiled: Any, stop_ids: Iterable[int], vocab_size: int) -> None:
        """`compiled`: a CompileJob's result; `stop_ids`: the ids that end a complete grammar."""
        import xgrammar  # loaded by the compiler by now

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._stop_words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        for token_id in stop_ids:
            self._stop_words.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))

    @property
    def is_over(self) -> bool:
        """The stop token of a complete grammar was taken: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Take a token; False if the grammar does not allow it here (the state is unchanged)."""
        return bool(self._matcher.accept_token(token_id))

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these, in order, the grammar would take; the state is unchanged."""
        num = 0
        while num < len(token_ids) and not self.is_over and self.accept(token_ids[num]):
            num += 1
        self.rollback(num)
        return num

    def rollback(self, num_tokens: int) -> None:
        """Take back the last so many tokens."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fill(self, bitmask: NDArray[np.int32], row: int, *, forbid_stop: bool = False) -> None:
        """Write the allowed tokens into `bitmask[row]`, int32 [ceil(vocab / 32)].

        `forbid_stop` leaves the stop ids out, unless nothing else may come.
        Requires: not `is_over`.
        """
        self._matcher.fill_next_token_bitmask(bitmask, row)
        if forbid_stop:
            without = bitmask[row] & ~self._stop_words
            if without.any():
                bitmask[row] = without
