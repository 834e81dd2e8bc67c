# SPDX-License-Identifier: Apache-2.0
"""A driver's batch of copies, done by memmove; it may refuse."""

from __future__ import annotations

import ctypes

from kvtiers.batch_copy import Addresses, CopyRefusedError


class MemmoveBatch:
    """Memory of this process is "pinned" to it unless `knows_memory` is False.

    Args:
        codes: what the calls say, 0 once they are used up. A call that refuses has copied half of
            its batch, and wrong bytes at that.
    """

    name = "memmove"

    def __init__(self, *codes: int, knows_memory: bool = True) -> None:
        self.codes = list(codes)
        self.knows_memory = knows_memory
        self.calls: list[tuple[int, int, int]] = []  # (copies, bytes each, stream)

    def is_pinned(self, address: int) -> bool:
        return self.knows_memory

    def __call__(self, targets: Addresses, sources: Addresses, num_bytes: int, stream: int) -> None:
        assert len(targets) == len(sources)
        self.calls.append((len(targets), num_bytes, stream))
        code = self.codes.pop(0) if self.codes else 0
        if code:
            for target in targets.tolist()[: len(targets) // 2 + 1]:
                ctypes.memset(target, 0xEE, num_bytes)
            raise CopyRefusedError(self.name, code)
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, num_bytes)
