# SPDX-License-Identifier: Apache-2.0
"""What surrounds the routes: body limit, CORS, metrics, health; and the bench client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.bench import BenchParams, run_bench
from appliance.metrics import Metrics
from engine.loop.counters import Counters
from tests.fakes.appliance import RunningApp, says, sse_events


def test_a_body_over_the_limit_is_413_declared_or_not(tmp_path: Path) -> None:
    with RunningApp(tmp_path, settings={"server": {"max_body_mb": 1}}) as app:
        big = json.dumps({"model": "default", "instructions": "x" * (1 << 20)}).encode()
        headers = {"Content-Type": "application/json"}
        reply = app.http.post("/v1/sessions", content=big, headers=headers)
        assert app.error(reply)[:2] == (413, "request_too_large")

        def chunks() -> Iterator[bytes]:
            for start in range(0, len(big), 1 << 16):
                yield big[start : start + (1 << 16)]

        reply = app.http.post("/v1/sessions", content=chunks(), headers=headers)
        assert app.error(reply)[:2] == (413, "request_too_large")
        assert app.session()


def test_browsers_may_call_from_configured_origins_alone(tmp_path: Path) -> None:
    settings = {"server": {"cors_origins": ["http://ide.local"]}}
    with RunningApp(tmp_path, settings=settings) as app:
        ask = {"Access-Control-Request-Method": "POST"}
        good = app.http.options("/v1/sessions", headers={"Origin": "http://ide.local", **ask})
        assert good.headers["access-control-allow-origin"] == "http://ide.local"
        bad = app.http.options("/v1/sessions", headers={"Origin": "http://evil.local", **ask})
        assert "access-control-allow-origin" not in bad.headers


OURS, THEIRS = "http://127.0.0.1:{port}", "http://evil.local"


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({}, True),  # no browser
        ({"Origin": OURS}, True),
        ({"Origin": OURS, "Sec-Fetch-Site": "same-origin"}, True),
        ({"Origin": "https://proxy.local", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Origin": "http://ide.local", "Sec-Fetch-Site": "cross-site"}, True),
        ({"Origin": THEIRS}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Origin": THEIRS, "Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
    ],
)
def test_a_page_of_another_site_changes_nothing(
    tmp_path: Path, headers: dict[str, str], is_let_in: bool
) -> None:
    """What a browser sends for it without asking first: a form, or no body at all."""
    settings = {"server": {"cors_origins": ["http://ide.local"]}}
    with RunningApp(tmp_path, settings=settings) as app:
        session_id = app.session()
        port = app.url.rpartition(":")[2]
        headers = {name: value.format(port=port) for name, value in headers.items()}
        path = f"/v1/sessions/{session_id}"
        exported = app.http.get(f"{path}/export", headers=headers)
        assert exported.status_code == 200, "CORS decides who may read"
        plain = {"Content-Type": "text/plain", **headers}
        for reply in (
            app.http.post(f"{path}/suspend", headers=headers),
            app.http.post("/v1/sessions/import", content=exported.content, headers=plain),
            app.http.delete(path, headers=headers),
        ):
            if not is_let_in:
                assert app.error(reply)[:2] == (403, "cross_site_request")
            else:
                assert reply.status_code in (200, 201, 409), reply.text
        assert (app.get(path).status_code == 404) is is_let_in


def test_a_session_deleted_under_its_turn_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunningApp(tmp_path, says("word " * 400)) as app:
        app.engine.hold_at = 5
        session_id = app.session()
        path = f"/v1/sessions/{session_id}"
        body = {"input": "go", "stream": True}
        with app.http.stream("POST", f"{path}/turns", json=body) as reply:
            events = sse_events(reply)
            next(events)
            assert app.http.delete(path).status_code == 200
            assert list(events)[-1]["type"] in ("turn.cancelled", "turn.failed")
        assert app.asgi.state.context.turns.runner.ending._owed == {}
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_metrics_count_turns_tokens_and_misses(tmp_path: Path) -> None:
    with RunningApp(tmp_path) as app:
        session_id = app.session()
        first = app.turn(session_id, "one")
        app.engine._cached.clear()
        second = app.turn(session_id, "two")
        text = app.get("/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        assert lines['moorage_turns_total{outcome="completed",reason="end_turn"}'] == "2.0"
        total = sum(
            float(value)
            for name, value in lines.items()
            if name.startswith("moorage_input_tokens_total")
        )
        assert total == first["usage"]["input_tokens"] + second["usage"]["input_tokens"]
        missed = second["cache"]["miss"]["missed_tokens"]
        assert lines['moorage_cache_missed_tokens_total{reason="evicted"}'] == str(float(missed))
        assert lines["moorage_turn_submit_seconds_count"] == "2.0"
        assert lines["moorage_engine_up"] == "1.0" and "moorage_engine_num_pages" in lines
        name = 'moorage_http_requests_total{route="/v1/sessions/{session_id}/turns",status="200"}'
        assert lines[name] == "2.0"


def test_metrics_show_drafts_by_drafter_and_place_and_not_once_more_as_gauges() -> None:
    counters = Counters()
    for num_drafts, num_accepted in ((3, 1), (2, 2), (1, 0)):
        counters.note_drafts("ngram", num_drafts, num_accepted)
    counters.note_drafts("mtp", 1, 1)
    metrics = Metrics()
    metrics.engine_stats.stats = counters.as_dict()
    lines = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines())
    verified = {"1": "3.0", "2": "2.0", "3": "1.0"}
    accepted = {"1": "2.0", "2": "1.0", "3": "0.0"}
    for place in verified:
        labels = f'{{drafter="ngram",place="{place}"}}'
        assert lines[f"moorage_draft_tokens_total{labels}"] == verified[place]
        assert lines[f"moorage_draft_tokens_accepted_total{labels}"] == accepted[place]
    assert lines['moorage_draft_tokens_accepted_total{drafter="mtp",place="1"}'] == "1.0"
    assert lines["moorage_engine_draft_tokens"] == "7.0"
    assert not any(name.startswith("moorage_engine_draft_tokens_ngram") for name in lines)


@pytest.mark.parametrize("api", ["session", "chat", "completions"])
def test_the_bench_drives_every_api_and_sees_the_reuse(app: RunningApp, api: str) -> None:
    app.engine.script = says("word " * 20)
    params = BenchParams(
        base_url=app.url, api=api, sessions=2, turns=3, system=20, context=60, new=10, output=8
    )
    result = asyncio.run(run_bench(params))
    assert result["turns"] == 6 and result["output_tokens"] == 48
    assert result["cached_share_later"] > 0.5
    assert result["ttft_cold_s"]["median"] > 0 and result["ttft_later_s"]["median"] > 0


def test_a_bench_of_the_same_seed_sends_the_same_prompts(app: RunningApp) -> None:
    params = BenchParams(base_url=app.url, turns=2, system=20, context=30, new=5, output=2)
    sent = []
    for _ in range(2):
        num_before = len(app.engine.requests)
        asyncio.run(run_bench(params))
        sent.append([r.token_ids for r in app.engine.requests[num_before:]])
    assert sent[0] == sent[1]


def test_a_bench_against_a_server_that_refuses_says_its_answer(app: RunningApp) -> None:
    params = BenchParams(base_url=app.url, api="chat", model="gpt-9")
    with pytest.raises(RuntimeError, match="model_not_found"):
        asyncio.run(run_bench(params))


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "127.0.0.1:9", "ftp://x", "http://[x"])
def test_a_bench_against_nobody_names_the_address(address: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(f"--base-url {address}: ")):
        asyncio.run(run_bench(BenchParams(base_url=address)))


def test_a_bench_takes_the_address_that_openai_s_clients_are_given(app: RunningApp) -> None:
    params = BenchParams(base_url=f"{app.url}/v1/", api="chat", turns=1, context=10)
    assert asyncio.run(run_bench(params))["turns"] == 1
