# SPDX-License-Identifier: Apache-2.0
"""What text cannot fit, known from its length alone; and work on long text beside the event loop.

Does not know: tokenizers, sessions, HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from appliance.errors import ApiError

T = TypeVar("T")

LONG_TEXT_CHARS = 1 << 15  # some 5 ms of tokenising, as measured on a 2-core CPU


class ContextExceeded(ApiError):
    """What was sent does not fit behind a history; it takes `num_new` tokens, or more."""

    def __init__(self, message: str, param: str, num_new: int) -> None:
        super().__init__("context_length_exceeded", message, param)
        self.num_new = num_new


def num_chars(value: Any) -> int:
    """Return how many characters the texts in a JSON value have; no text has fewer bytes."""
    total, todo = 0, [value]
    while todo:
        part = todo.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, dict):
            todo += part.values()
        elif isinstance(part, list):
            todo += part
    return total


def check_can_fit(chars: int, room: int, max_token_bytes: int, path: str) -> None:
    """Raise ApiError where so much text needs more tokens than there is room for.

    It costs nothing, where tokenising the text only to refuse it would cost seconds.
    """
    if chars > max(room, 0) * max_token_bytes:
        raise ContextExceeded(
            f"{path}: {chars} characters are more than {max(room, 0)} tokens can spell, which is "
            "what the context has room for",
            path,
            chars // max_token_bytes,
        )


async def off_loop(chars: int, work: Callable[[], T]) -> T:
    """Return what `work` gives; in a thread where so much text would hold up the event loop."""
    return await asyncio.to_thread(work) if chars > LONG_TEXT_CHARS else work()
