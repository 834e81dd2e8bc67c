# SPDX-License-Identifier: Apache-2.0
"""Drafts from a request's own tokens: what followed the last time these tokens were said.

An agent repeats what it was given (files it edits, arguments, paths), so the longest earlier
occurrence of the newest tokens tells what is likely to come. How many drafts it gives, and how long
a match it asks for, follow from how the last ones fared. Does not know: the model, sampling, steps.

Source: prompt lookup decoding (Saxena, 2023), as in transformers' `prompt_lookup_num_tokens`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MIN_MATCH = 3  # tokens of a match, after drafts that were right
MAX_MATCH = 16  # after drafts that were wrong; longer ones are not compared further
FIRST_DRAFTS = 4
_ROOM = 512

IdRow = NDArray[np.int32]
NO_DRAFTS: IdRow = np.empty(0, dtype=np.int32)


class NgramDrafter:
    """The tokens of one request, and how its drafts fared. Belongs to the loop's thread."""

    def __init__(self, token_ids: IdRow, max_drafts: int) -> None:
        """`token_ids`: prompt and output so far; copied."""
        self._len = len(token_ids)
        self._ids = np.empty(self._len + _ROOM, dtype=np.int32)
        self._ids[: self._len] = token_ids
        self._max_drafts = max_drafts
        self._num_drafts = min(FIRST_DRAFTS, max_drafts)
        self._min_match = MIN_MATCH

    def append(self, token_ids: list[int]) -> None:
        """Take in what was sampled."""
        end = self._len + len(token_ids)
        if end > len(self._ids):
            grown = np.empty(end + max(_ROOM, end // 2), dtype=np.int32)
            grown[: self._len] = self._ids[: self._len]
            self._ids = grown
        self._ids[self._len : end] = token_ids
        self._len = end

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from drafts that were verified. Requires: `num_drafts` > 0."""
        if num_accepted == num_drafts:
            self._num_drafts = min(2 * max(self._num_drafts, num_drafts), self._max_drafts)
        else:
            self._num_drafts = min(num_accepted + 1, self._max_drafts)
        self.note_guess(num_accepted > 0)
        if num_accepted:
            self._min_match = MIN_MATCH

    def note_guess(self, is_right: bool) -> None:
        """Learn from a first draft alone, whether or not it was run: a match too short costs a
        request its running ahead."""
        step = -2 if is_right else 2
        self._min_match = min(max(self._min_match + step, MIN_MATCH), MAX_MATCH)

    def propose(self) -> IdRow:
        """The tokens expected next, none where nothing like the newest ones was said before."""
        ids = self._ids[: self._len]
        place, match_len = _latest_match(ids)
        if match_len < self._min_match:
            return NO_DRAFTS
        # Behind the end of what was said the repetition repeats itself.
        following = ids[place + 1 :]
        return np.resize(following, self._num_drafts)


def _latest_match(ids: IdRow) -> tuple[int, int]:
    """Where the longest match of the newest tokens ends, the latest of equals, and its length."""
    if not len(ids):
        return 0, 0
    places = np.flatnonzero(ids[:-1] == ids[-1])
    if not len(places):
        return 0, 0
    match_len = 1
    while match_len < MAX_MATCH:
        reaching = places[places >= match_len]
        longer = reaching[ids[reaching - match_len] == ids[-1 - match_len]]
        if not len(longer):
            break
        places, match_len = longer, match_len + 1
    return int(places[-1]), match_len
