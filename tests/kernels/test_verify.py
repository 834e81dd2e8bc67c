# SPDX-License-Identifier: Apache-2.0
"""`python -m kernels verify`: every family that has something to compare has cases, right kernels
pass them and wrong ones do not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels.registry import REGISTRY, Priority, register_kernel
from kernels.verify import (
    NOTHING_TO_COMPARE,
    all_cases,
    kernels_to_verify,
    verify_case,
    verify_family,
)

CASES = all_cases()
IN_CONTRACT = {"linear", "paged_attention", "llama_forward"}  # all of theirs: test_contract.py
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
# Triton kernels that run in fp32 without a GPU. By hand, as they take their time: mla_prefill,
# moe_norm_route, moe_dense, linear_add, draw_tokens (`python -m tests.kernels.verify_interpreted`).
INTERPRETED = {
    "mla_decode": {"triton"},
    "mla_output": {"fixed"},
    "mla_absorb": {"triton", "fixed"},
    "mla_kv_write": {"triton"},
    "mla_expand_pages": {"triton"},
    "rms_norm": {"triton"},
    "add_rms_norm": {"triton"},
    "silu_and_mul": {"triton"},
    "moe_route": {"triton"},
    "greedy_rows": {"triton"},
    "feed_ids": {"triton"},
    "embed_rows": {"triton"},
    "edit_rows": {"triton"},
    "apply_bitmask": {"triton"},
    "move_pages": {"triton"},
}


def _run(*arguments: str, **environment: str) -> list[dict[str, Any]]:
    """JSON lines of a process of its own: no test process loads triton."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_triton
def test_every_family_with_kernels_beside_its_reference_has_cases() -> None:
    """Those of a GPU included, as an H200 would have them."""
    script = (
        "import json\n"
        "from benchmarks.gpu.stub_device import stub_device\n"
        "from kernels.registry import REGISTRY\n"
        "from kernels.verify import kernels_to_verify\n"
        "with stub_device():\n"
        "    for family in REGISTRY.families():\n"
        "        print(json.dumps({'family': family, 'kernels': kernels_to_verify(family)}))\n"
    )
    families = {line["family"]: line["kernels"] for line in _run("-c", script)}
    assert len(families["mla_decode"]) == 3
    comparable = {family for family, kernels in families.items() if kernels}
    assert comparable - set(CASES) == set(NOTHING_TO_COMPARE)


@pytest.mark.parametrize("family", sorted(set(CASES) - IN_CONTRACT))
def test_kernels_of_this_cpu_pass(family: str) -> None:
    verdicts = [each for each in verify_family(family) if not each.case.startswith("cuda ")]
    failed = [verdict for verdict in verdicts if not verdict.passes]
    assert not failed
    ran = {verdict.kernel for verdict in verdicts if verdict.error is not None}
    anywhere = {spec.name for spec in REGISTRY.specs(family) if spec.device == "any"}
    assert ran >= anywhere & set(kernels_to_verify(family))


@pytest.fixture
def wrong_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """The reference, its results changed a little; of one that writes to its arguments, nothing."""
    family = request.param
    names = {spec.name: spec for spec in REGISTRY.specs(family)}
    right = names.get("reference") or names["composed"]

    def change(value: Any) -> Any:
        if isinstance(value, tuple):
            return (change(value[0]), *value[1:])
        return value * 1.1 + 0.1 if value.is_floating_point() else value + 1

    def wrong(*arguments: Any, **options: Any) -> Any:
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        found = right.fn(*copies, **options)
        return None if found is None else change(found)

    register_kernel(family, "wrong", priority=Priority.TRIAL)(wrong)
    yield family
    REGISTRY.remove(family, "wrong")


@pytest.mark.parametrize("wrong_kernel", sorted(CASES), indirect=True)
def test_a_kernel_that_is_wrong_fails(wrong_kernel: str) -> None:
    assert not verify_case(wrong_kernel, "wrong", CASES[wrong_kernel][-1]).passes


@needs_triton
def test_registered_triton_kernels_pass_in_the_interpreter() -> None:
    lines = _run("-m", "tests.kernels.verify_interpreted", *INTERPRETED, TRITON_INTERPRET="1")
    assert not [line for line in lines if line["failed"]]
    for line in lines:
        ran = {kernel for kernel, num in line["run"].items() if num}
        assert ran >= INTERPRETED[line["family"]], line


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", sorted(CASES))
def test_kernels_of_this_gpu_pass(family: str) -> None:
    cases = [case for case in CASES[family] if case.name.startswith("cuda ")]
    failed = [
        verdict
        for case in cases
        for kernel in kernels_to_verify(family)
        if not (verdict := verify_case(family, kernel, case)).passes
    ]
    assert not failed
