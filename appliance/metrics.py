# SPDX-License-Identifier: Apache-2.0
"""Every Prometheus series of the appliance, declared once, unit in the name.

The engine's own counters are fetched when a scrape comes and appear as
`moorage_engine_<name>`. Does not know: who calls it, HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api import CacheHit, TierStatus

SECONDS_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
OVERHEAD_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
# As engine/loop/counters.py names them.
_DRAFTS = re.compile(r"draft_tokens(?P<accepted>_accepted)?\.(?P<drafter>\w+)\.(?P<place>\d+)")
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")

# Every counter would come with a second series that says when it was made.
disable_created_metrics()  # type: ignore[no-untyped-call]


class EngineStatsCollector(Collector):
    """Shows the latest engine stats as gauges; holds nothing else."""

    def __init__(self) -> None:
        self.stats: Mapping[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        for name, value in sorted(self.stats.items()):
            if _DRAFTS.fullmatch(name):
                continue
            safe = _NOT_IN_A_NAME.sub("_", name)
            yield GaugeMetricFamily(
                f"moorage_engine_{safe}", f"Engine statistic {name}.", value=value
            )


class DraftCollector(Collector):
    """Shows the engine's counts of drafts by drafter and place; holds nothing."""

    def __init__(self, engine_stats: EngineStatsCollector) -> None:
        self._engine_stats = engine_stats

    def collect(self) -> Iterator[Metric]:
        labels = ["drafter", "place"]
        verified = CounterMetricFamily(
            "moorage_draft_tokens",
            "Drafted tokens verified, by drafter (ngram, mtp) and place in their row, from 1.",
            labels=labels,
        )
        accepted = CounterMetricFamily(
            "moorage_draft_tokens_accepted",
            "Drafted tokens that the model sampled itself, likewise.",
            labels=labels,
        )
        for name, value in sorted(self._engine_stats.stats.items()):
            found = _DRAFTS.fullmatch(name)
            if found is not None:
                family = accepted if found["accepted"] else verified
                family.add_metric([found["drafter"], found["place"]], value)
        yield from (verified, accepted)


class TierCollector(Collector):
    """Shows the latest status of each KV tier; holds nothing else."""

    def __init__(self) -> None:
        self.statuses: tuple[TierStatus, ...] = ()

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "moorage_tier_up", "1 while a KV tier works in full, else 0.", labels=["tier", "kind"]
        )
        used = GaugeMetricFamily(
            "moorage_tier_used_bytes", "What a KV tier holds.", labels=["tier"]
        )
        capacity = GaugeMetricFamily(
            "moorage_tier_capacity_bytes", "What a KV tier can hold.", labels=["tier"]
        )
        pages = GaugeMetricFamily("moorage_tier_pages", "KV pages in a tier.", labels=["tier"])
        for status in self.statuses:
            up.add_metric([status.tier, status.kind], float(status.state == "up"))
            used.add_metric([status.tier], float(status.used_bytes))
            capacity.add_metric([status.tier], float(status.capacity_bytes))
            pages.add_metric([status.tier], float(status.num_pages))
        yield from (up, used, capacity, pages)


class ProcessCollector(Collector):
    """Shows what the supervisor wrote about the processes it keeps up."""

    def __init__(self, read_state: Callable[[], Mapping[str, Any] | None]) -> None:
        self._read_state = read_state

    def collect(self) -> Iterator[Metric]:
        state = self._read_state() or {}
        for key, text in (
            ("restarts", "Processes that were started again, since the appliance was started."),
            ("hangs", "Processes that lived, gave no sign of life and were killed for it."),
        ):
            family = CounterMetricFamily(f"moorage_process_{key}", text, labels=["process"])
            for process, number in sorted((state.get(key) or {}).items()):
                family.add_metric([process], float(number))
            yield family


class Metrics:
    """The series of one appliance, in a registry of their own.

    read_state: what the supervisor says of its processes; None where there is none.
    """

    def __init__(self, read_state: Callable[[], Mapping[str, Any] | None] = lambda: None) -> None:
        self.registry = CollectorRegistry()
        self.engine_stats = EngineStatsCollector()
        self.registry.register(self.engine_stats)
        self.registry.register(DraftCollector(self.engine_stats))
        self.tiers = TierCollector()
        self.registry.register(self.tiers)
        self.registry.register(ProcessCollector(read_state))
        self._declare_http()
        self._declare_turns()
        self._declare_cache()

    def _declare_http(self) -> None:
        self.http_requests = Counter(
            "moorage_http_requests_total",
            "HTTP requests answered, by route and status.",
            ["route", "status"],
            registry=self.registry,
        )
        self.stream_readers = Gauge(
            "moorage_stream_readers", "Clients reading a stream now.", registry=self.registry
        )

    def _declare_turns(self) -> None:
        self.turns = Counter(
            "moorage_turns_total",
            "Turns ended, by terminal event and its reason.",
            ["outcome", "reason"],
            registry=self.registry,
        )
        self.turns_running = Gauge(
            "moorage_turns_running", "Turns running now.", registry=self.registry
        )
        self.turn_submit_seconds = Histogram(
            "moorage_turn_submit_seconds",
            "From the request to its submission to the engine.",
            buckets=OVERHEAD_BUCKETS,
            registry=self.registry,
        )
        self.turn_first_token_seconds = Histogram(
            "moorage_turn_first_token_seconds",
            "From the request to its first token.",
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.turn_seconds = Histogram(
            "moorage_turn_seconds",
            "From the request to its terminal event.",
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.output_tokens = Counter(
            "moorage_output_tokens_total", "Tokens sampled.", registry=self.registry
        )
        self.tool_calls = Counter(
            "moorage_tool_calls_total",
            "Tool calls made by the model, by whether their arguments fit the schema.",
            ["valid"],
            registry=self.registry,
        )
        self.grammar_fallbacks = Counter(
            "moorage_grammar_fallbacks_total",
            "Turns whose schema needed a looser grammar.",
            registry=self.registry,
        )

    def _declare_cache(self) -> None:
        self.input_tokens = Counter(
            "moorage_input_tokens_total",
            "Prompt tokens, by where their KV came from (l1, l2, l3, computed).",
            ["source"],
            registry=self.registry,
        )
        self.cache_misses = Counter(
            "moorage_cache_misses_total",
            "Turns that reused less than their whole history, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.missed_tokens = Counter(
            "moorage_cache_missed_tokens_total",
            "Prompt tokens computed again though they had been computed before, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.engine_up = Gauge(
            "moorage_engine_up", "1 while the engine answers, else 0.", registry=self.registry
        )
        self.engine_restarts = Counter(
            "moorage_engine_restarts_total",
            "Engine processes that took the place of one that had died.",
            registry=self.registry,
        )

    def count_cache(self, hit: CacheHit, miss: Mapping[str, Any] | None) -> None:
        """Note where the tokens of one prompt came from."""
        for source, tokens in (
            ("l1", hit.l1),
            ("l2", hit.l2),
            ("l3", hit.l3),
            ("computed", hit.to_compute),
        ):
            self.input_tokens.labels(source).inc(tokens)
        if miss is not None:
            self.cache_misses.labels(miss["reason"]).inc()
            self.missed_tokens.labels(miss["reason"]).inc(miss["missed_tokens"])

    def render(self) -> bytes:
        """Return the scrape body in Prometheus' text format."""
        return bytes(generate_latest(self.registry))
