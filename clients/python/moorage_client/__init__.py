# SPDX-License-Identifier: Apache-2.0
"""Client of Moorage's session API: `Moorage`, and `AsyncMoorage` for asyncio.

Answers and bodies are plain dicts, typed in `moorage_client.types`, which is generated from the
server's OpenAPI document.
"""

from moorage_client.async_client import AsyncMoorage, AsyncTurnStream
from moorage_client.client import Moorage, TurnStream
from moorage_client.errors import ApiError, ServerAwayError

__all__ = [
    "ApiError",
    "AsyncMoorage",
    "AsyncTurnStream",
    "Moorage",
    "ServerAwayError",
    "TurnStream",
]
