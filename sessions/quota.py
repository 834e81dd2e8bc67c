# SPDX-License-Identifier: Apache-2.0
"""How much a tenant may store.

Does not know: KV memory (sessions.lease_policy budgets that), nor rates of requests. The check is
made before a write, so concurrent writers may pass it by as many sessions as there are writers.
"""

from __future__ import annotations

from sessions.config import SessionsConfig
from sessions.errors import QuotaExceeded, SettingError, TokenQuotaExceeded
from sessions.store import TenantQuota, TenantUsage


def effective_quota(config: SessionsConfig, own: TenantQuota | None) -> TenantQuota:
    """The limits of a tenant: its own, else what is configured for all; 0 is no limit."""
    own = own or TenantQuota()
    sessions, tokens = own.max_sessions, own.max_tokens
    return TenantQuota(
        max_sessions=config.max_sessions_per_tenant if sessions is None else sessions,
        max_tokens=config.max_tokens_per_tenant if tokens is None else tokens,
    )


def check_quota(quota: TenantQuota, usage: TenantUsage, *, new_sessions: int = 0) -> None:
    """Raise `QuotaExceeded` if the tenant may not add `new_sessions` (0: none are added), or
    `TokenQuotaExceeded` if it may not add any token at all.
    """
    limit = quota.max_sessions
    if limit and new_sessions and usage.num_sessions + new_sessions > limit:
        raise QuotaExceeded(
            f"the tenant has {usage.num_sessions} of {limit} sessions (hint: delete some, or "
            "raise its quota)"
        )
    limit = quota.max_tokens
    if limit and usage.num_tokens >= limit:
        raise TokenQuotaExceeded(
            f"the tenant's sessions hold {usage.num_tokens} of {limit} tokens (hint: delete or "
            "compact some, or raise its quota)"
        )


def validate_quota(quota: TenantQuota) -> None:
    """Raise `SettingError` for a negative limit."""
    for name in ("max_sessions", "max_tokens"):
        value = getattr(quota, name)
        if value is not None and value < 0:
            raise SettingError(f"{name}: expected 0 (no limit) or more, got {value}", param=name)
