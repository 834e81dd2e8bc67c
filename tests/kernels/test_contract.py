# SPDX-License-Identifier: Apache-2.0
"""One suite for every kernel that computes on this CPU: the reference's result, within its
tolerance, on ragged and edge-sized calls over pools whose foreign slots hold NaN."""

from __future__ import annotations

import functools

import pytest
import torch

from kernels import ops
from kernels.cases import Case
from kernels.errors import NoKernelFoundError
from kernels.registry import REGISTRY
from kernels.selection import override
from kernels.tolerances import tolerance_of
from kernels.verify import all_cases, error_of, kernels_to_verify, reference_result

FAMILIES = ("linear", "paged_attention", "llama_forward", "argmax", "apply_bitmask", "copy_pages")
CASES = all_cases()
KERNELS = [(family, kernel) for family in FAMILIES for kernel in kernels_to_verify(family)]


@functools.cache
def expected_of(family: str, index: int) -> torch.Tensor:
    return reference_result(family, CASES[family][index])


def run_on(family: str, kernel: str, case: Case) -> torch.Tensor | None:
    try:
        with override(family, kernel):
            return case.run()
    except NoKernelFoundError:
        return None


@pytest.mark.parametrize(("family", "kernel"), KERNELS)
def test_a_kernel_agrees_with_the_reference_on_every_case(family: str, kernel: str) -> None:
    num_run = 0
    for index, case in enumerate(CASES[family]):
        actual = run_on(family, kernel, case)
        if actual is None:
            continue
        num_run += 1
        error = error_of(actual, expected_of(family, index))
        allowed = tolerance_of(family, case.variant)
        assert error <= allowed.relative, f"{case.name}: {error} ({allowed.reason})"
    capability_gap = num_run == 0
    if capability_gap:
        pytest.skip(f"{family} {kernel}: this CPU lacks what it needs")


def test_every_family_with_cases_has_a_portable_kernel() -> None:
    cpu_kernels = pytest.importorskip("_cpu_kernels")
    assert "portable" in cpu_kernels.available_levels()
    for family in FAMILIES:
        names = kernels_to_verify(family)
        assert {"cpu_portable", "cpu_memcpy"} & set(names), family


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_results_do_not_depend_on_the_number_of_threads(num_threads: int) -> None:
    cpu = pytest.importorskip("kernels.cpu")
    before = cpu.num_threads()
    chosen = [
        CASES["llama_forward"][index]
        for index, case in enumerate(CASES["llama_forward"])
        if case.name in ("decode rows q4_1", "mixed q4_1", "longer than a slab q4_1")
    ]
    assert len(chosen) == 3
    expected = [case.run() for case in chosen]
    cpu.set_num_threads(num_threads)
    try:
        for case, want in zip(chosen, expected, strict=True):
            # Key ranges of a decode step are cut by the number of threads: sums differ in order.
            assert error_of(case.run(), want) < 1e-2
    finally:
        cpu.set_num_threads(before)


def test_poisoned_slots_would_show_in_a_result() -> None:
    """The suite's own guard: a reference that reads one key too many returns NaN."""
    from kernels.cases import paged_case

    case = paged_case(
        [(10, 1)],
        layers=1,
        num_kv_heads=1,
        head_dim=32,
        page_size=16,
        dtype=torch.bfloat16,
        seed=0,
    )
    rows = case.rows
    q = torch.randn(1, 1, 32)
    with override("paged_attention", "reference"):
        out = ops.paged_attention(
            q,
            case.kv_pool[:, 0],
            rows.page_table,
            rows.row_slots,
            rows.row_indptr,
            rows.seq_lens + 1,
            16,
            1.0,
        )
    assert bool(out.isnan().any())


def test_the_registry_knows_every_family_under_contract() -> None:
    assert set(FAMILIES) <= set(REGISTRY.families())
