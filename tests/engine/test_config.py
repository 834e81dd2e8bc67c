# SPDX-License-Identifier: Apache-2.0
"""EngineConfig: what is wrong is named by path, value and what is allowed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast, get_type_hints

import pytest

from engine.config import (
    EngineConfig,
    GrammarConfig,
    SchedulerLimits,
    TiersConfig,
    from_json,
    from_mapping,
)
from engine.errors import ConfigError


def test_a_configuration_survives_its_json() -> None:
    config = EngineConfig(
        model="smollm2", max_slots=3, drain_s=2.5, grammar=GrammarConfig(budget_ms=9)
    )
    assert from_json(config.to_json()) == config


def test_missing_settings_keep_their_defaults_and_whole_numbers_may_stand_for_seconds() -> None:
    config = from_mapping({"drain_s": 3, "scheduler": {"max_waiting": 7}})
    assert config == EngineConfig(drain_s=3.0, scheduler=SchedulerLimits(max_waiting=7))


@pytest.mark.parametrize(
    ("settings", "path", "allowed"),
    [
        ({"model": "/nowhere"}, "engine.model", "a model that is there"),
        ({"load_format": "pickle"}, "engine.load_format", "auto | gguf"),
        ({"dtype": "float16"}, "engine.dtype", "bfloat16"),
        ({"weights": "int3"}, "engine.weights", "packed"),
        ({"num_threads": -1}, "engine.num_threads", "0 to 1024"),
        ({"page_size": 48}, "engine.page_size", "a power of two"),
        ({"kv_pool_tokens": 100}, "engine.kv_pool_tokens", "at least 2 pages (128)"),
        ({"max_slots": 0}, "engine.max_slots", "1 to 4096"),
        ({"token_budget": 4}, "engine.token_budget", "at least engine.max_slots (16)"),
        ({"lone_token_budget": -1}, "engine.lone_token_budget", "0 to 1048576"),
        ({"max_context_len": -5}, "engine.max_context_len", "0 to"),
        ({"run_dir": "/" + "x" * 100}, "engine.run_dir", "Unix socket"),
        ({"drain_s": -1.0}, "engine.drain_s", "0 to 3600"),
        ({"grammar": {"budget_ms": 0}}, "engine.grammar.budget_ms", "1 to 600000"),
        ({"grammar": {"threads": 1}}, "engine.grammar.threads", "compile_threads"),
        ({"grammar": 5}, "engine.grammar", "a table"),
        ({"scheduler": {"max_waiting": 0}}, "engine.scheduler.max_waiting", "1 to"),
        ({"max_slots": "many"}, "engine.max_slots", "type int"),
        ({"max_slots": True}, "engine.max_slots", "type int"),
        ({"eager": 1}, "engine.eager", "type bool"),
        ({"drain_s": float("nan")}, "engine.drain_s", "0 to 3600"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(
    settings: dict[str, object], path: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(settings)
    assert caught.value.field == path
    assert allowed in str(caught.value)
    assert caught.value.code == "invalid_config"


def test_all_wrong_settings_are_found_at_once() -> None:
    config = EngineConfig(page_size=3, max_slots=0, grammar=GrammarConfig(budget_ms=-1))
    assert [problem.field for problem in config.problems()] == [
        "engine.page_size",
        "engine.max_slots",
        "engine.grammar.budget_ms",
    ]
    with pytest.raises(ConfigError, match="page_size"):
        config.validate()


def test_every_setting_is_documented_where_it_is_declared() -> None:
    source = Path(__file__).resolve().parents[2].joinpath("engine/config.py").read_text()
    lines = source.splitlines()
    for cls in (EngineConfig, GrammarConfig, SchedulerLimits, TiersConfig):
        for item in dataclasses.fields(cls):
            if dataclasses.is_dataclass(item.type) or item.name in (
                "grammar",
                "scheduler",
                "tiers",
            ):
                continue
            place = next(i for i, line in enumerate(lines) if line.startswith(f"    {item.name}: "))
            assert lines[place + 1].strip().startswith('"""'), item.name


def test_a_step_holds_as_many_tokens_as_configured_or_as_suits_the_device() -> None:
    assert EngineConfig(token_budget=100).tokens_per_step("cuda") == 100
    assert EngineConfig().tokens_per_step("cpu") == 512
    assert EngineConfig().tokens_per_step("cuda") == 4096
    assert EngineConfig(max_slots=1000).tokens_per_step("cpu") == 1000


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cpu", {}, 512),
        ("cuda", {}, 16384),
        ("cuda", {"token_budget": 4096}, 4096),  # as it was set, for whoever comes
        ("cuda", {"token_budget": 2048, "lone_token_budget": 16384}, 16384),
        ("cuda", {"lone_token_budget": 8192}, 8192),
        ("cuda", {"lone_token_budget": 4096}, 4096),
        ("cuda", {"lone_token_budget": 1}, 4096),
        ("cpu", {"lone_token_budget": 1024}, 1024),
        ("cpu", {"max_slots": 1000}, 1000),
    ],
)
def test_a_lone_prompt_s_step_holds_no_less(
    device: str, settings: dict[str, int], expected: int
) -> None:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    config.validate()
    assert config.tokens_per_lone_step(device) == expected >= config.tokens_per_step(device)


def _numbers(cls: type, path: str = "") -> Iterator[str]:
    """Paths of all settings that are numbers."""
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _numbers(cast(type, hint), f"{path}{name}.")
        elif hint in (int, float):
            yield f"{path}{name}"


def _problem_of(path: str, value: float) -> str:
    """What is said to be allowed where a setting has this value; "" where nothing is wrong."""
    *tables, name = path.split(".")
    default = EngineConfig()
    for table in tables:
        default = getattr(default, table)
    config = dataclasses.replace(default, **{name: type(getattr(default, name))(value)})
    whole = dataclasses.replace(EngineConfig(), **{tables[0]: config}) if tables else config
    found = [problem for problem in whole.problems() if problem.field == f"engine.{path}"]
    return found[0].allowed if found else ""


def test_bounds_are_named_to_the_last_digit_and_are_allowed() -> None:
    num_checked = 0
    for path in _numbers(EngineConfig):
        bounds = re.fullmatch(r"(-?\d+) to (\d+)", _problem_of(path, 10**19))
        if bounds is None:  # a rule of another kind
            continue
        low, high = int(bounds[1]), int(bounds[2])
        assert (_problem_of(path, low), _problem_of(path, high)) == ("", ""), path
        assert _problem_of(path, low - 1) and _problem_of(path, high + 1), path
        num_checked += 1
    assert num_checked >= 18
    assert _problem_of("tiers.l2_bytes", 10**19) == "-1 to 17592186044416"


@pytest.mark.parametrize(
    ("fields", "field", "allowed"),
    [
        ({"mooncake_master": "10.0.0.5"}, "mooncake_master", "host:port"),
        ({"mooncake_master": "m:1", "mooncake_metrics": ":9003"}, "mooncake_metrics", "host:port"),
        (
            {"mooncake_metrics": "10.0.0.5:9003"},
            "mooncake_metrics",
            "empty where engine.tiers.mooncake_master is",
        ),
        ({"mooncake_master": "m:1", "mooncake_metrics": "m:2"}, "", ""),
    ],
)
def test_addresses_of_mooncake_are_checked(
    fields: dict[str, str], field: str, allowed: str
) -> None:
    tiers = TiersConfig(**fields)  # type: ignore[arg-type]  # a test's own keywords
    problems = EngineConfig(tiers=tiers).problems()
    found = [(problem.field, problem.allowed) for problem in problems]
    assert found == ([(f"engine.tiers.{field}", allowed)] if field else [])
