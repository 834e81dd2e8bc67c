# SPDX-License-Identifier: Apache-2.0
"""Quotas refuse the session or token too many, and nothing before."""

from __future__ import annotations

import pytest

from sessions.config import SessionsConfig
from sessions.errors import QuotaExceeded, SettingError
from sessions.quota import check_quota, effective_quota, validate_quota
from sessions.store import TenantQuota, TenantUsage


def test_without_limits_anything_goes() -> None:
    quota = effective_quota(SessionsConfig(), None)
    check_quota(quota, TenantUsage(num_sessions=10**6, num_tokens=10**9), new_sessions=9)


def test_a_tenant_s_own_limits_go_before_those_of_all() -> None:
    config = SessionsConfig(max_sessions_per_tenant=3, max_tokens_per_tenant=1000)
    assert effective_quota(config, None) == TenantQuota(max_sessions=3, max_tokens=1000)
    own = TenantQuota(max_sessions=7)
    assert effective_quota(config, own) == TenantQuota(max_sessions=7, max_tokens=1000)
    none = TenantQuota(max_sessions=0, max_tokens=0)
    assert effective_quota(config, none) == none
    with pytest.raises(SettingError, match="max_tokens"):
        validate_quota(TenantQuota(max_tokens=-1))


def test_the_session_too_many_is_refused() -> None:
    quota = TenantQuota(max_sessions=3)
    check_quota(quota, TenantUsage(num_sessions=2), new_sessions=1)
    check_quota(quota, TenantUsage(num_sessions=3))
    with pytest.raises(QuotaExceeded, match="2 of 3 sessions"):
        check_quota(quota, TenantUsage(num_sessions=2), new_sessions=2)


def test_a_full_token_quota_refuses_more() -> None:
    quota = TenantQuota(max_tokens=1_000)
    check_quota(quota, TenantUsage(num_tokens=999))
    with pytest.raises(QuotaExceeded, match="1000 of 1000 tokens"):
        check_quota(quota, TenantUsage(num_tokens=1_000))
