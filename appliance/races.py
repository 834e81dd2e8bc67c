# SPDX-License-Identifier: Apache-2.0
"""Work on a stored session that is begun anew when another writer came first.

Does not know: what the work is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from sessions.errors import VersionConflict

T = TypeVar("T")
MAX_RACES = 8


async def racing(work: Callable[[], Awaitable[T]]) -> T:
    """Return what `work` gives; a lost race starts it again, with what is stored then.

    Raises: VersionConflict once it has lost `MAX_RACES` times and once more.
    """
    for _ in range(MAX_RACES):
        try:
            return await work()
        except VersionConflict:
            continue
    return await work()
