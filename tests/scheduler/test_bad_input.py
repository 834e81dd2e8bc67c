# SPDX-License-Identifier: Apache-2.0
"""Bad input is a ValueError that names the field, and leaves the scheduler as it was."""

from __future__ import annotations

import re

import numpy as np
import pytest

import _scheduler as cpp


def config(**options: object) -> cpp.SchedulerConfig:
    settings: dict[str, object] = dict(
        page_size=4, num_pages=10, max_slots=2, max_context_len=100, token_budget=8
    )
    return cpp.SchedulerConfig(**{**settings, **options})


def spec(**options: object) -> cpp.RequestSpec:
    settings: dict[str, object] = dict(
        request_id=1, token_ids=np.array([1, 2, 3], np.int32), max_new_tokens=2
    )
    return cpp.RequestSpec(**{**settings, **options})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0),
        ("page_size", -4),
        ("num_pages", 0),
        ("max_slots", 0),
        ("max_context_len", 1),
        ("token_budget", 0),
        ("lone_token_budget", -1),
        ("ageing_ms", 0),
        ("suffix_us_per_token", -1),
        ("spare_percent", 101),
        ("num_l2_pages", -1),
        ("num_l3_pages", 0),
        ("l3_wait_ms", 10**8),
        ("max_preemptions", 1001),
        ("lease_percent", 101),
    ],
)
def test_a_config_value_out_of_range_names_its_field(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{field}: {value} is not in"):
        config(**{field: value})


def test_slot_mapping_entries_must_fit_in_32_bits() -> None:
    with pytest.raises(ValueError, match="^num_pages: "):
        config(page_size=64, num_pages=2**26)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_ids": np.array([], np.int32)}, "token_ids: is empty"),
        ({"token_ids": np.array([1, -5], np.int32)}, "token_ids[1]: -5 is negative"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 is not in [1, "),
        ({"max_new_tokens": 98}, "max_new_tokens: 98 + 3 prompt tokens exceed max_context_len 100"),
        ({"max_new_tokens": 39}, "max_new_tokens: 39 + 3 prompt tokens can never fit in num_pages"),
        ({"max_new_tokens": 2**40}, "max_new_tokens: 1099511627776 is not in [1, "),
        ({"request_id": -1}, "request_id: -1 is negative"),
        ({"num_draft_tokens": 65}, "num_draft_tokens: 65 is not in"),
        ({"priority": 1001}, "priority: 1001 is not in"),
        ({"l3_wait_ms": -2}, "l3_wait_ms: -2 is not in"),
        ({"send_kv": True, "remote_prefill": True}, "send_kv: true with remote_prefill"),
    ],
)
def test_a_bad_request_names_its_field(options: dict[str, object], message: str) -> None:
    scheduler = cpp.Scheduler(config())
    with pytest.raises(ValueError, match=re.escape(f"specs[0].{message}")):
        scheduler.submit([spec(**options)])
    assert scheduler.stats()["waiting"] == 0


def test_the_largest_request_that_fits_is_taken() -> None:
    scheduler = cpp.Scheduler(config())
    scheduler.submit([spec(max_new_tokens=38)])  # 3 + 38 tokens, the last of which needs no KV
    assert scheduler.stats()["waiting"] == 1


def test_one_bad_request_keeps_the_whole_batch_out() -> None:
    scheduler = cpp.Scheduler(config())
    with pytest.raises(ValueError, match=r"specs\[1\].request_id: 1 appears twice"):
        scheduler.submit([spec(), spec()])
    with pytest.raises(ValueError, match=r"specs\[1\].max_new_tokens"):
        scheduler.submit([spec(), spec(request_id=2, max_new_tokens=0)])
    assert scheduler.stats()["waiting"] == 0
    scheduler.submit([spec()])
    with pytest.raises(ValueError, match=r"specs\[0\].request_id: 1 is in use"):
        scheduler.submit([spec()])


def test_token_ids_of_another_type_are_refused_not_converted() -> None:
    with pytest.raises(TypeError):
        spec(token_ids=np.array([1, 2**40], np.int64))
    with pytest.raises(TypeError):
        spec(token_ids=np.array([[1, 2]], np.int32))


def done(plan: cpp.Plan, **options: object) -> cpp.StepDone:
    rows = len(plan.row_slots)
    settings: dict[str, object] = dict(
        step_id=plan.step_id,
        num_accepted=np.ones(rows, np.int32),
        token_ids=np.ones((rows, 1), np.int32),
        finished=np.zeros(rows, np.uint8),
        failed=np.zeros(rows, np.uint8),
    )
    return cpp.StepDone(**{**settings, **options})


def test_results_must_belong_to_the_oldest_step_in_flight() -> None:
    scheduler = cpp.Scheduler(config())
    scheduler.submit([spec()])
    first = scheduler.next_plan(0)
    second = scheduler.next_plan(0)
    with pytest.raises(ValueError, match=r"events\[0\].step_id: 1 is not the oldest step"):
        scheduler.advance([done(second)])
    with pytest.raises(ValueError, match=r"events\[2\].step_id: 2 is not in flight"):
        scheduler.advance([done(first), done(second), done(second, step_id=2)])
    with pytest.raises(ValueError, match=r"num_accepted: 2 rows, but step 0 has 1"):
        scheduler.advance(
            [
                cpp.StepDone(
                    step_id=0,
                    num_accepted=np.ones(2, np.int32),
                    token_ids=np.ones((2, 1), np.int32),
                    finished=np.zeros(2, np.uint8),
                    failed=np.zeros(2, np.uint8),
                )
            ]
        )
    with pytest.raises(ValueError, match=r"num_accepted\[0\]: 2 is not in \[0, 1\]"):
        scheduler.advance([done(first, num_accepted=np.array([2], np.int32))])
    with pytest.raises(ValueError, match=r"token_ids\[0, 0\]: -1 is negative"):
        scheduler.advance([done(first, token_ids=np.array([[-1]], np.int32))])
    assert scheduler.stats()["steps_in_flight"] == 2, "nothing of a refused batch was applied"
    scheduler.advance([done(first), done(second)])
    scheduler.check_integrity()


def test_arrays_of_a_step_must_have_equal_rows() -> None:
    with pytest.raises(ValueError, match="finished: has 2 rows, num_accepted has 1"):
        cpp.StepDone(
            step_id=0,
            num_accepted=np.ones(1, np.int32),
            token_ids=np.ones((1, 1), np.int32),
            finished=np.zeros(2, np.uint8),
            failed=np.zeros(1, np.uint8),
        )


def test_unknown_requests_and_tickets_are_named() -> None:
    scheduler = cpp.Scheduler(config())
    with pytest.raises(ValueError, match=r"events\[0\].request_id: 7 is unknown"):
        scheduler.advance([cpp.Abort(request_id=7)])
    with pytest.raises(ValueError, match=r"events\[0\].ticket: 3 is not in flight"):
        scheduler.advance([cpp.TransferAck(ticket=3, ok=True)])
    with pytest.raises(ValueError, match=r"events\[0\].probe_id: 3 is not open"):
        scheduler.advance([cpp.ProbeDone(probe_id=3, num_pages=0)])
    with pytest.raises(ValueError, match=r"events\[0\].request_id: 7 is not being sent"):
        scheduler.advance([cpp.SendDone(request_id=7, ok=True)])
    with pytest.raises(TypeError, match="an event is a StepDone"):
        scheduler.advance(["abort"])  # type: ignore[list-item]


def test_an_abort_that_comes_with_the_finish_is_no_error() -> None:
    scheduler = cpp.Scheduler(config())
    scheduler.submit([spec()])
    plan = scheduler.next_plan(0)
    ended = scheduler.advance([done(plan, finished=np.ones(1, np.uint8)), cpp.Abort(request_id=1)])
    assert [e.status for e in ended] == ["finished"]


def test_counts_below_zero_are_refused() -> None:
    scheduler = cpp.Scheduler(config())
    with pytest.raises(ValueError, match="keep_tokens: -1"):
        scheduler.drop_prefix(np.array([1], np.int32), -1)
    with pytest.raises(ValueError, match="max_nodes: -1"):
        scheduler.tree(-1)
