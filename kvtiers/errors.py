# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in the tiers room.

TierError                            code
  TierConfigError(ValueError)        invalid_tier_config: a setting, named
  PoolTooSmallError(ValueError)      pool_too_small: memory does not hold one request
  StoreCallError(ValueError)         invalid_store_call: an argument of a store's call, named
"""

from __future__ import annotations


class TierError(Exception):
    """Root of the room; `code` is stable."""

    code = "tier_error"


class TierConfigError(TierError, ValueError):
    """A setting of a tier is wrong: `field` is its path."""

    code = "invalid_tier_config"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} = {value!r}: allowed: {allowed}")


class PoolTooSmallError(TierError, ValueError):
    """The pool that memory or the configuration allows does not hold one whole request."""

    code = "pool_too_small"


class StoreCallError(TierError, ValueError):
    """A store was called wrongly: `field` names the argument."""

    code = "invalid_store_call"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} = {value!r}: allowed: {allowed}")
