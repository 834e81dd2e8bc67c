# SPDX-License-Identifier: Apache-2.0
"""Leases as a session holds them: each with its own deadline, never a counter.

Does not know: pages, nor whether the engine keeps its side; `sessions.lease_policy` grants, this
module remembers, so that leases can be asserted again after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sessions.durations import format_duration, parse_duration
from sessions.errors import SettingError
from sessions.ids import new_id
from sessions.lease_policy import LeaseGrant

MAX_TTL_MS = 3650 * 86_400_000  # less than what an engine takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A promise to keep the first `tokens_granted` tokens of a history in `tier` until a time."""

    id: str
    tier: str
    upto: str  # "head", or the item it was asked for
    state: str  # granted | clipped | queued | denied
    tokens_requested: int
    tokens_granted: int
    ttl_ms: int
    expires_at_ms: int
    renew_on_use: bool = True
    reason: str | None = None


def parse_ttl(raw: object, *, path: str) -> int:
    """How long a lease is for, in milliseconds. Raises `SettingError` naming the path."""
    ttl_ms = parse_duration(raw, path=path)
    if not 0 < ttl_ms <= MAX_TTL_MS:
        raise SettingError(
            f"{path}: {raw}; allowed: 1ms to {format_duration(MAX_TTL_MS)}", param=path
        )
    return ttl_ms


def new_lease(
    grant: LeaseGrant, *, tier: str, upto: str, ttl_ms: int, now_ms: int, renew_on_use: bool = True
) -> Lease:
    """The lease that a grant makes."""
    return Lease(
        id=new_id("lease"),
        tier=tier,
        upto=upto,
        state=grant.state,
        tokens_requested=grant.tokens_requested,
        tokens_granted=grant.tokens_granted,
        ttl_ms=ttl_ms,
        expires_at_ms=now_ms + ttl_ms,
        renew_on_use=renew_on_use,
        reason=grant.reason,
    )


def renewed(leases: Sequence[Lease], now_ms: int) -> tuple[Lease, ...]:
    """What is left of leases after a use at `now_ms`: those past their deadline are gone."""
    return tuple(
        replace(lease, expires_at_ms=now_ms + lease.ttl_ms) if lease.renew_on_use else lease
        for lease in leases
        if now_ms < lease.expires_at_ms
    )


def clipped(leases: Sequence[Lease], num_tokens: int) -> tuple[Lease, ...]:
    """Leases on a history that now has `num_tokens`: none reaches behind its end."""
    return tuple(
        replace(lease, state="clipped", tokens_granted=num_tokens, reason="history_replaced")
        if lease.tokens_granted > num_tokens
        else lease
        for lease in leases
    )


def leased_tokens(leases: Sequence[Lease], tier: str, now_ms: int) -> int:
    """Tokens that live leases keep in a tier. They all start at the head, so the longest counts."""
    live = (lease for lease in leases if lease.tier == tier and now_ms < lease.expires_at_ms)
    return max((lease.tokens_granted for lease in live), default=0)
