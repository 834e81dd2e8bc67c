# SPDX-License-Identifier: Apache-2.0
"""What a history says a turn should find, against a plain reading of all its records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.cache_report import REPORT, Expectation, expected_reuse
from sessions.token_codec import encode_ids
from sessions.turn_log import Record, TurnLog


def from_the_start(log: TurnLog) -> Expectation:
    """The definition: the longest claim counts, and a rewrite behind it voids what it says."""
    tokens, instance, reason, total = 0, "", "", 0
    for record in log.records:
        total += record.num_tokens
        report = record.params.get(REPORT) or {}
        reason = str(report.get("rewritten", reason))
        reusable = min(int(report.get("reusable", 0)), total)
        if reusable > tokens:
            tokens, instance, reason = reusable, str(report.get("engine_instance", "")), ""
    return Expectation(tokens=tokens, engine_instance=instance, known_reason=reason)


@st.composite
def logs(draw: st.DrawFn) -> TurnLog:
    records, total = [], 0
    for number in range(draw(st.integers(0, 7))):
        num_tokens = draw(st.integers(1, 9))
        total += num_tokens
        report: dict[str, object] = {}
        kind = draw(st.sampled_from(["none", "turn", "cut", "rewritten", "warmed"]))
        if kind in ("turn", "warmed"):  # all of the history but the last token sampled
            report |= {"reusable": total - 1, "engine_instance": f"e{number}"}
        if kind == "cut":  # what a turn that was stopped in mid-prefill leaves
            report |= {"reusable": draw(st.integers(0, total)), "engine_instance": f"e{number}"}
        if kind in ("rewritten", "warmed"):
            report["rewritten"] = f"r{number}"
        params = {REPORT: report} if report else {}
        ids = encode_ids(range(num_tokens))
        records.append(Record(id=f"turn_{number}", input_token_ids=ids, params=params))
    return TurnLog(tuple(records))


@given(logs())
def test_reading_from_the_end_says_what_reading_all_says(log: TurnLog) -> None:
    assert expected_reuse(log) == from_the_start(log)
