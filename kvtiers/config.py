# SPDX-License-Identifier: Apache-2.0
"""Settings of the tiers, checked once. Imports no runtime.

Does not know: where the values come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtiers.errors import TierConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePoolConfig:
    """How large the L1 pool is. Raises TierConfigError naming the field."""

    pool_tokens: int = 0
    """KV capacity; 0: `free_share` of free memory, up to `max_auto_bytes`; tokens."""
    free_share: float = 0.5
    """Part of the memory free at start that an automatic pool may take."""
    max_auto_bytes: int = 4 << 30
    """Bound of an automatic pool; bytes."""

    def __post_init__(self) -> None:
        if self.pool_tokens < 0:
            raise TierConfigError("pool_tokens", self.pool_tokens, "0 or more")
        if not 0.0 < self.free_share <= 1.0:
            raise TierConfigError("free_share", self.free_share, "above 0, up to 1")
        if self.max_auto_bytes < 1:
            raise TierConfigError("max_auto_bytes", self.max_auto_bytes, "1 or more")
