# SPDX-License-Identifier: Apache-2.0
"""Surfaces that users build on: a change here is a decision, so it shows in a diff of this file."""

from __future__ import annotations

import json

from click.testing import CliRunner

from appliance.cli import main as cli

MAX_FIELDS = 80  # three tiers and two stores under them have sizes and places of their own

FIELDS = [
    "server.host",
    "server.port",
    "server.api_keys",
    "server.cors_origins",
    "server.state_dir",
    "server.run_dir",
    "server.heartbeat_s",
    "server.replay_minutes",
    "server.max_body_mb",
    "server.drain_s",
    "server.max_restarts",
    "server.hang_s",
    "server.model_name",
    "server.model_aliases",
    "server.alias_all",
    "server.log_level",
    "sessions.store",
    "sessions.sqlite_path",
    "sessions.sqlite_max_bytes",
    "sessions.redis_url",
    "sessions.redis_key_prefix",
    "sessions.store_timeout_ms",
    "sessions.log_cache_bytes",
    "sessions.expires_after_ms",
    "sessions.expired_retention_ms",
    "sessions.idempotency_retention_ms",
    "sessions.max_sessions_per_tenant",
    "sessions.max_tokens_per_tenant",
    "engine.model",
    "engine.load_format",
    "engine.dtype",
    "engine.kv_dtype",
    "engine.weights",
    "engine.device",
    "engine.num_threads",
    "engine.page_size",
    "engine.kv_pool_tokens",
    "engine.max_slots",
    "engine.token_budget",
    "engine.lone_token_budget",
    "engine.max_context_len",
    "engine.eager",
    "engine.prefill_graphs",
    "engine.deterministic",
    "engine.kernels",
    "engine.speculation",
    "engine.max_draft_tokens",
    "engine.step_trace",
    "engine.run_dir",
    "engine.drain_s",
    "engine.grammar.compile_threads",
    "engine.grammar.budget_ms",
    "engine.grammar.cache_bytes",
    "engine.scheduler.max_waiting",
    "engine.scheduler.keep_outputs_s",
    "engine.scheduler.keep_outputs_bytes",
    "engine.tiers.l2_bytes",
    "engine.tiers.l3",
    "engine.tiers.l3_dir",
    "engine.tiers.l3_quota_bytes",
    "engine.tiers.l3_wait_ms",
    "engine.tiers.overlap_loads",
    "engine.tiers.mooncake_master",
    "engine.tiers.mooncake_metrics",
    "engine.tiers.mooncake_protocol",
    "engine.tiers.mooncake_device",
    "engine.tiers.mooncake_segment_bytes",
    "engine.tiers.mooncake_ssd_dir",
    "engine.tiers.mooncake_ssd_quota_bytes",
    "engine.tiers.record_inputs",
]


def leaves(node: dict[str, object], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in node.items():
        path = f"{prefix}{name}"
        nested = isinstance(value, dict) and value
        found += leaves(value, f"{path}.") if nested else [path]  # type: ignore[arg-type]
    return found


def test_configuration_fields_are_the_agreed_ones_and_few() -> None:
    result = CliRunner().invoke(cli, ["config", "show"])
    assert result.exit_code == 0
    fields = leaves(json.loads(result.output))
    assert fields == FIELDS
    assert len(fields) <= MAX_FIELDS
