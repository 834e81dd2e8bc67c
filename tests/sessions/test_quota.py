# SPDX-License-Identifier: Apache-2.0
"""Quotas refuse the session or token too many, and nothing before."""

from __future__ import annotations

import pytest

from sessions.config import SessionsConfig
from sessions.errors import QuotaExceeded
from sessions.quota import check_quota
from sessions.store import TenantUsage


def test_without_limits_anything_goes() -> None:
    check_quota(SessionsConfig(), TenantUsage(num_sessions=10**6, num_tokens=10**9), new_sessions=9)


def test_the_session_too_many_is_refused() -> None:
    config = SessionsConfig(max_sessions_per_tenant=3)
    check_quota(config, TenantUsage(num_sessions=2), new_sessions=1)
    check_quota(config, TenantUsage(num_sessions=3))
    with pytest.raises(QuotaExceeded, match="2 of 3 sessions"):
        check_quota(config, TenantUsage(num_sessions=2), new_sessions=2)


def test_a_full_token_quota_refuses_more() -> None:
    config = SessionsConfig(max_tokens_per_tenant=1_000)
    check_quota(config, TenantUsage(num_tokens=999))
    with pytest.raises(QuotaExceeded, match="1000 of 1000 tokens"):
        check_quota(config, TenantUsage(num_tokens=1_000))
