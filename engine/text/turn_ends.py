# SPDX-License-Identifier: Apache-2.0
"""The tokens that a chat template ends an assistant's turn with, and what a sampled end becomes.

A model may stop at a token that its template writes elsewhere, or never: at the role of who speaks
next, at a second kind of end. Such a token is no part of a history. Its KV was never computed, so
another one in its place costs nothing. Does not know: templates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnds:
    """Ids; None where the template writes none.

    last: of an answer that nothing follows. middle: of one that somebody has answered.
    call: of an answer whose calls have been answered.
    """

    last: int | None = None
    middle: int | None = None
    call: int | None = None

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(i for i in (self.last, self.middle, self.call) if i is not None)

    def replacements(self, eos_ids: Collection[int]) -> dict[int, int | None]:
        """By sampled end: what stands for it in a history; None: nothing does."""
        found: dict[int, int | None] = {}
        for token_id in eos_ids:
            if token_id not in (self.middle, self.call):
                found[token_id] = self.middle
        return found
