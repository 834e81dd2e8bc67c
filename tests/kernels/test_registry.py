# SPDX-License-Identifier: Apache-2.0
"""Registration, selection, override and explanation of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.errors import KernelConflictError, KernelInputError, NoKernelFoundError
from kernels.platform import Capability, cpu_capability
from kernels.registry import REGISTRY, KernelSpec, Priority, Registry, register_kernel
from kernels.selection import (
    explain_selection,
    override,
    select_kernel,
    set_override,
    usual_kernel,
)
from kernels.signature import CallSignature

FAMILY = "test_family"


def call(**formats: str) -> CallSignature:
    return CallSignature(FAMILY, "cpu", tuple(formats.items()), (("head_dim", 64),))


@pytest.fixture
def family() -> Iterator[None]:
    register_kernel(FAMILY, "reference", priority=Priority.REFERENCE)(lambda: "reference")
    register_kernel(
        FAMILY, "fast", priority=Priority.PERFORMANT, device="cpu", formats={"x": {"bf16"}}
    )(lambda: "fast")
    register_kernel(
        FAMILY,
        "choosy",
        priority=Priority.SPECIALIZED,
        refuses=lambda s: "head_dim is not 128" if s.trait("head_dim") != 128 else None,
    )(lambda: "choosy")
    yield
    set_override(FAMILY, None)
    for spec in REGISTRY.specs(FAMILY):
        REGISTRY.remove(FAMILY, spec.name)


def test_the_highest_band_that_accepts_the_call_wins(family: None) -> None:
    assert select_kernel(call(x="bf16")).name == "fast"
    assert select_kernel(call(x="fp32")).name == "reference"


def test_an_argument_that_a_kernel_does_not_name_may_have_any_format(family: None) -> None:
    assert select_kernel(call(x="bf16", weight="q4_1")).name == "fast"


def test_within_a_band_the_later_registration_wins(family: None) -> None:
    register_kernel(FAMILY, "newer", priority=Priority.PERFORMANT)(lambda: "newer")
    assert select_kernel(call(x="bf16")).name == "newer"


def test_a_selection_is_not_served_from_the_cache_after_a_registration(family: None) -> None:
    assert select_kernel(call(x="bf16")).name == "fast"
    register_kernel(FAMILY, "plug", priority=Priority.PLUGIN)(lambda: "plug")
    assert select_kernel(call(x="bf16")).name == "plug"
    REGISTRY.remove(FAMILY, "plug")
    assert select_kernel(call(x="bf16")).name == "fast"


def test_an_override_is_obeyed_and_taken_back(family: None) -> None:
    with override(FAMILY, "reference"):
        assert select_kernel(call(x="bf16")).name == "reference"
    assert select_kernel(call(x="bf16")).name == "fast"


def test_an_override_that_cannot_run_the_call_fails_with_its_reason(family: None) -> None:
    with (
        override(FAMILY, "choosy"),
        pytest.raises(NoKernelFoundError, match="head_dim is not 128"),
    ):
        select_kernel(call(x="bf16"))


def test_the_usual_kernel_is_that_without_override_and_never_a_trial(family: None) -> None:
    register_kernel(FAMILY, "trial", priority=Priority.TRIAL)(lambda: "trial")
    with override(FAMILY, "trial"):
        assert select_kernel(call(x="bf16")).name == "trial"
        assert usual_kernel(call(x="bf16")).name == "fast"
        register_kernel(FAMILY, "newer", priority=Priority.PERFORMANT)(lambda: "newer")
        assert usual_kernel(call(x="bf16")).name == "newer"
    for name in ("reference", "newer"):
        REGISTRY.remove(FAMILY, name)
    with pytest.raises(NoKernelFoundError, match="x is q4_1"):
        usual_kernel(call(x="q4_1"))


def test_an_override_of_an_unknown_kernel_is_refused_with_the_known_names(family: None) -> None:
    with pytest.raises(NoKernelFoundError, match=r"no kernel 'nothing'.*'reference'"):
        set_override(FAMILY, "nothing")


def test_an_explanation_names_every_candidate_and_why(family: None) -> None:
    text = str(explain_selection(call(x="fp32")))
    assert "-> reference" in text
    assert "x is fp32, it takes bf16" in text
    assert "head_dim is not 128" in text


def test_a_family_without_kernels_raises_no_kernel_found() -> None:
    with pytest.raises(NoKernelFoundError) as caught:
        select_kernel(CallSignature("no_such_family", "cpu", ()))
    assert caught.value.code == "no_kernel_found"


def test_a_name_registered_twice_in_a_family_is_a_conflict(family: None) -> None:
    with pytest.raises(KernelConflictError):
        register_kernel(FAMILY, "fast", priority=Priority.PORTABLE)(lambda: None)


def test_a_spec_for_another_device_or_missing_feature_says_so() -> None:
    spec = KernelSpec(
        family=FAMILY,
        name="gpu",
        fn=lambda: None,
        priority=Priority.PERFORMANT,
        device="cuda",
        min_sm=(9, 0),
    )
    here = call(x="bf16")
    assert spec.reason_against(here, cpu_capability()) == "runs on cuda, the call is on cpu"
    there = CallSignature(FAMILY, "cuda", ())
    old = Capability(device="cuda", sm=(8, 0))
    assert spec.reason_against(there, old) == "compute capability (8, 0) is below (9, 0)"
    picky = KernelSpec(
        family=FAMILY,
        name="vnni",
        fn=lambda: None,
        priority=Priority.PERFORMANT,
        features=frozenset({"avx512_vnni", "amx_tile"}),
    )
    plain = Capability(device="cpu", features=frozenset({"avx2"}))
    assert picky.reason_against(here, plain) == "the cpu lacks amx_tile, avx512_vnni"


def test_a_plugin_that_raises_is_left_out_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        name = "broken"

        def load(self) -> object:
            raise ImportError("no such library")

    loaded: list[str] = []

    class Working:
        name = "working"

        def load(self) -> object:
            return lambda: loaded.append("working")

    monkeypatch.setattr(
        "kernels.registry.entry_points", lambda group: [Broken(), Working()], raising=True
    )
    registry = Registry()
    registry.load_plugins()
    registry.load_plugins()
    assert loaded == ["working"]
    assert "kernel plugin broken failed to load" in caplog.text


@pytest.mark.parametrize("raised", [RuntimeError("late"), SystemExit(3), KernelInputError])
def test_a_plugin_that_raises_late_leaves_no_kernel(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: None,
    raised: BaseException | type[KernelInputError],
) -> None:
    def register() -> None:
        for name in (FAMILY, "another_family"):
            register_kernel(name, "half", priority=Priority.PLUGIN)(lambda: "half")
        if isinstance(raised, BaseException):
            raise raised
        register_kernel(FAMILY, "other", priority="high")(lambda: "")  # type: ignore[arg-type]

    class Half:
        name = "half_done"

        def load(self) -> object:
            return register

    monkeypatch.setattr("kernels.registry.entry_points", lambda group: [Half()])
    monkeypatch.setattr(REGISTRY, "_plugins_loaded", False)
    assert select_kernel(call(x="bf16")).name == "fast"
    assert "another_family" not in REGISTRY.families()
    assert "kernel plugin half_done failed to load" in caplog.text


def test_a_priority_that_is_no_band_is_named() -> None:
    for odd in ("high", 40, None):
        with pytest.raises(KernelInputError, match=r"priority: got .*; allowed: Priority\.TRIAL, "):
            register_kernel(FAMILY, "odd", priority=odd)  # type: ignore[arg-type]


def test_a_plugin_whose_check_raises_runs_no_call(family: None) -> None:
    def refuses(signature: CallSignature) -> str | None:
        raise KeyError("head_dim")

    register_kernel(FAMILY, "plugin", priority=Priority.PLUGIN, refuses=refuses)(lambda: "plugin")
    assert select_kernel(call(x="bf16")).name == "fast"
    assert "its check of the call raised KeyError" in str(explain_selection(call(x="bf16")))
    # One of ours that raises is our mistake.
    register_kernel(FAMILY, "ours", priority=Priority.PORTABLE, refuses=refuses)(lambda: "ours")
    with pytest.raises(KeyError):
        explain_selection(call(x="bf16"))


def test_cpu_features_are_those_the_operating_system_lists() -> None:
    with open("/proc/cpuinfo", encoding="utf-8") as handle:
        flags = next(line for line in handle if line.startswith("flags")).split()
    found = cpu_capability().features
    assert found <= set(flags)
    assert ("avx512_vnni" in found) == ("avx512_vnni" in flags)


def test_torch_dtypes_have_short_format_names() -> None:
    from kernels.signature import format_of

    assert format_of(torch.bfloat16) == "bf16"
    with pytest.raises(KernelInputError, match="complex64"):
        format_of(torch.complex64)
