# SPDX-License-Identifier: Apache-2.0
"""How much a tenant may store.

Does not know: KV memory (sessions.lease_policy budgets that), nor rates of requests. The check is
made before a write, so concurrent writers may pass it by as many sessions as there are writers.
"""

from __future__ import annotations

from sessions.config import SessionsConfig
from sessions.errors import QuotaExceeded, TokenQuotaExceeded
from sessions.store import TenantUsage


def check_quota(config: SessionsConfig, usage: TenantUsage, *, new_sessions: int = 0) -> None:
    """Raise `QuotaExceeded` if the tenant may not add `new_sessions` (0: none are added), or
    `TokenQuotaExceeded` if it may not add any token at all.
    """
    limit = config.max_sessions_per_tenant
    if limit and new_sessions and usage.num_sessions + new_sessions > limit:
        raise QuotaExceeded(
            f"the tenant has {usage.num_sessions} of {limit} sessions (hint: delete some, or "
            "raise sessions.max_sessions_per_tenant)"
        )
    limit = config.max_tokens_per_tenant
    if limit and usage.num_tokens >= limit:
        raise TokenQuotaExceeded(
            f"the tenant's sessions hold {usage.num_tokens} of {limit} tokens (hint: delete or "
            "compact some, or raise sessions.max_tokens_per_tenant)"
        )
