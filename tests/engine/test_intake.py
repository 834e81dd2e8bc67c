# SPDX-License-Identifier: Apache-2.0
"""Every field of a request is checked; what is wrong is named, and nothing is ignored."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from engine import api
from engine.errors import RequestError
from engine.loop.intake import Intake, ModelLimits, unspeakable_ids
from engine.transport import pack_ids

LIMITS = ModelLimits(
    vocab_size=100,
    max_context_len=50,
    eos_ids=(2, 9),
    unspeakable_ids=np.array([0, 1, 2, 9, 99]),
)


def wire(**fields: Any) -> api.GenerateRequest:
    sampling = fields.pop("sampling", {})
    return msgspec.structs.replace(
        api.GenerateRequest(
            request_id="r",
            token_ids=pack_ids([5, 6, 7]),
            sampling=api.SamplingParams(**{"max_new_tokens": 10, **sampling}),
        ),
        **fields,
    )


def test_a_sound_request_is_taken_as_it_is() -> None:
    request = Intake(LIMITS).accept(
        wire(resume_token_ids=pack_ids([8, 8]), priority=-3, tenant="t", salt="s"), now_ms=77
    )
    assert request.prompt_ids.tolist() == [5, 6, 7]
    assert request.resumed_ids.tolist() == [8, 8]
    assert request.num_output == 2
    assert request.stop_ids == {2, 9}
    assert (request.priority, request.tenant, request.salt) == (-3, "t", "s")
    assert request.received_ms == 77


def test_requests_are_numbered_apart() -> None:
    intake = Intake(LIMITS)
    assert intake.accept(wire(), 0).index != intake.accept(wire(), 0).index


@pytest.mark.parametrize(
    ("fields", "field", "code"),
    [
        ({"request_id": ""}, "request_id", "invalid_request"),
        ({"request_id": "x" * 257}, "request_id", "invalid_request"),
        ({"token_ids": b""}, "token_ids", "invalid_request"),
        ({"token_ids": b"12345"}, "token_ids", "invalid_request"),
        ({"token_ids": pack_ids([5, 100])}, "token_ids[1]", "invalid_request"),
        ({"token_ids": pack_ids([-1])}, "token_ids[0]", "invalid_request"),
        ({"resume_token_ids": pack_ids([100])}, "resume_token_ids[0]", "invalid_request"),
        ({"resume_token_ids": pack_ids([5] * 11)}, "resume_token_ids", "invalid_request"),
        ({"token_ids": pack_ids([5] * 41)}, "sampling.max_new_tokens", "context_too_long"),
        ({"token_ids": pack_ids([5] * 51)}, "sampling.max_new_tokens", "context_too_long"),
        ({"tenant": "t" * 257}, "tenant", "invalid_request"),
        ({"salt": "s" * 257}, "salt", "invalid_request"),
        ({"priority": 2**40}, "priority", "invalid_request"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        Intake(LIMITS).accept(wire(**fields), 0)
    assert (caught.value.field, caught.value.code) == (field, code)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 11}, "min_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 11.0}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"num_logprobs": -2}, "num_logprobs"),
        ({"num_logprobs": 65}, "num_logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"stop_token_ids": (100,)}, "stop_token_ids[0]"),
        ({"stop_token_ids": tuple([5] * 65)}, "stop_token_ids"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: math.inf}}, "logit_bias[5]"),
        ({"logit_bias": {5: 101.0}}, "logit_bias[5]"),
        ({"logit_bias": {i: 0.0 for i in range(1025)}}, "logit_bias"),
    ],
)
def test_a_wrong_sampling_parameter_is_named(sampling: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        Intake(LIMITS).accept(wire(sampling=sampling), 0)
    assert caught.value.field == f"sampling.{field}"


def test_ignore_eos_with_a_grammar_is_refused_rather_than_ignored() -> None:
    grammar = api.GrammarSpec(kind=api.GrammarKind.REGEX, text="a")
    with pytest.raises(RequestError, match="ignore_eos"):
        Intake(LIMITS).accept(wire(sampling={"ignore_eos": True}, grammar=grammar), 0)


def row_of(**sampling: Any) -> Any:
    intake = Intake(LIMITS)
    return intake.make_row(intake.accept(wire(sampling=sampling), 0))


def test_control_tokens_are_banned_but_those_that_stop() -> None:
    assert row_of().banned_ids.tolist() == [0, 1, 99]
    assert row_of(ignore_eos=True).banned_ids.tolist() == [0, 1, 2, 9, 99]
    assert row_of(ignore_eos=True, stop_token_ids=(1,)).banned_ids.tolist() == [0, 2, 9, 99]
    assert row_of(mask_control_tokens=False).banned_ids.tolist() == []


def test_a_request_without_a_seed_gets_one_from_its_id() -> None:
    assert row_of().seed == row_of().seed
    intake = Intake(LIMITS)
    other = intake.make_row(intake.accept(wire(request_id="other"), 0))
    assert other.seed != row_of().seed
    assert row_of(seed=-1).seed == 2**64 - 1
    assert row_of(seed=5).seed == 5


def test_penalties_are_built_only_where_one_is_asked_for() -> None:
    assert row_of().penalties is None
    assert row_of(presence_penalty=0.1).penalties is not None


def test_ids_without_a_spelling_are_unspeakable() -> None:
    spelled = [b"", b"a", b"", b"b"]
    assert unspeakable_ids(spelled, [3], 6).tolist() == [0, 2, 3, 4, 5]


def test_the_control_tokens_that_a_turn_may_write_are_not_banned() -> None:
    assert row_of(allowed_control_ids=(0,)).banned_ids.tolist() == [1, 99]
    assert row_of(allowed_control_ids=(1, 99)).banned_ids.tolist() == [0]


@pytest.mark.parametrize("wrong", [3, -1, 100, 1 << 40])
def test_only_control_tokens_can_be_let_through(wrong: int) -> None:
    with pytest.raises(RequestError, match=r"sampling\.allowed_control_ids\[1\]"):
        Intake(LIMITS).accept(wire(sampling={"allowed_control_ids": (0, wrong)}), 0)
    with pytest.raises(RequestError, match="allowed_control_ids = .1025 ids"):
        Intake(LIMITS).accept(wire(sampling={"allowed_control_ids": (0,) * 1025}), 0)
