# SPDX-License-Identifier: Apache-2.0
"""What the pages named in a plan are: their tokens, parent and salt, so that L2 can tell a restart.

The scheduler names pages; this keeps the way back from a name to the tokens, for the prefixes the
loop has seen lately. A name it has forgotten costs nothing but a page that a restart cannot adopt.
Does not know: tiers, when pages move.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from _scheduler import name_pages
from engine.loop.requests import Request
from kvtiers.host_pool import PageName
from kvtiers.keys import PAGE_HASH_BYTES

ROOT_HASH = bytes(PAGE_HASH_BYTES)  # parent of a prefix's first page


class PageNames:
    """At most `most` names, the oldest forgotten first. One thread."""

    def __init__(self, *, page_size: int, model_fingerprint: str, most: int) -> None:
        self._page_size = page_size
        self._fingerprint = model_fingerprint
        self._most = most
        self._names: OrderedDict[bytes, PageName] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def find(self, page_hash: bytes) -> PageName | None:
        """What a page is, if it was noted lately."""
        return self._names.get(page_hash)

    def note(
        self,
        token_ids: NDArray[np.int32],
        salt: str,
        *,
        parent: bytes = ROOT_HASH,
        start: int = 0,
    ) -> bytes:
        """Keep the names of the full pages of `token_ids`; `parent`: the page before them, which
        ends at token `start`.

        Returns the name of the last of them, or `parent` where there is none.
        """
        size = self._page_size
        num_pages = len(token_ids) // size
        if not num_pages:
            return parent
        tokens = np.ascontiguousarray(token_ids[: num_pages * size], dtype=np.int32)
        raw, page_bytes = tokens.astype("<i4", copy=False).tobytes(), 4 * size
        hashes = name_pages(
            tokens,
            page_size=size,
            model_fingerprint=self._fingerprint,
            salt=salt,
            parent=parent,
        )
        for place in range(num_pages):
            page_hash = hashes[PAGE_HASH_BYTES * place : PAGE_HASH_BYTES * (place + 1)]
            if page_hash in self._names:
                self._names.move_to_end(page_hash)
            else:
                self._names[page_hash] = PageName(
                    page_hash=page_hash,
                    parent_hash=parent,
                    token_ids=raw[place * page_bytes : (place + 1) * page_bytes],
                    salt=salt,
                    start=start + place * size,
                )
            parent = page_hash
        while len(self._names) > self._most:
            self._names.popitem(last=False)
        return parent

    def extend(self, request: Request) -> None:
        """Name the pages of a request that were not full when it was last looked at."""
        first = request.named_len
        num_full = (request.prompt_len + request.num_output) // self._page_size * self._page_size
        if num_full <= first:
            return
        tokens = np.concatenate([request.prompt_ids, request.output_ids()])[first:num_full]
        request.last_name = self.note(tokens, request.salt, parent=request.last_name, start=first)
        request.named_len = num_full
