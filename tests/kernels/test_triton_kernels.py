# SPDX-License-Identifier: Apache-2.0
"""Triton kernels without a GPU: run by the interpreter in fp32, and compiled for sm_90.

Each check runs in a child process: the interpreter is chosen when triton is imported, and no test
process loads triton otherwise. Not in the interpreter: the Hopper MLA kernel (Gluon has none),
bf16 and the inline PTX of the W4 kernel (the portable form of the same arithmetic runs instead).
Those are compiled here and checked on a GPU (test_gpu_kernels.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

CHECKS = {
    "mla": [
        "mla_one_row_split",
        "mla_ragged_and_empty_rows",
        "mla_folds_query_tokens",
        "mla_more_rows_than_a_tile",
        "mla_more_parts_than_tiles",
    ],
    "route": [
        "route_softmax",
        "route_grouped_sigmoid_with_bias",
        "route_grouped_softmax",
        "route_of_many_experts",
        "route_in_groups_of_any_size",
    ],
    "moe": ["moe_nvfp4_one_token", "moe_nvfp4_sorted_tokens", "moe_mxfp4", "moe_mxint4"],
}
SHARED_BYTES_OF_HOPPER = 227 * 1024

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def _run(module: str, arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("family", sorted(CHECKS))
def test_interpreted_kernels_agree_with_their_references(family: str) -> None:
    out = _run("tests.kernels.triton_interpreted", CHECKS[family], TRITON_INTERPRET="1")
    assert out.split("\n")[:-1] == [f"ok {name}" for name in CHECKS[family]]


def test_interpreted_kernels_of_a_decode_step_agree_with_their_references() -> None:
    out = _run("tests.kernels.triton_decode_interpreted", [], TRITON_INTERPRET="1")
    assert out.count("ok ") == 25


def test_interpreted_sampling_kernels_choose_what_their_references_choose() -> None:
    # `ends`, `ties`, `long_pieces` by hand: seconds
    checks = ["spread", "flat", "broken", "smallest_nuclei", "edit"]
    out = _run("tests.kernels.triton_sampling_interpreted", checks, TRITON_INTERPRET="1")
    assert out.count("ok ") == len(checks)


def test_interpreted_kernels_of_fixed_order_give_a_row_its_bits_whatever_is_beside_it() -> None:
    checks = ["linear", "experts", "attention"]  # `model` by hand: a whole model, chunked, batched
    out = _run("tests.kernels.triton_fixed_interpreted", checks, TRITON_INTERPRET="1")
    assert out.count("ok ") == len(checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "instructions"),
    [
        ("w4_rows", {"mma_sync": True, "bf16x2_scale": True}),
        ("dense_rows", {"mma_sync": True}),
        ("mla_hopper", {"wgmma": True, "tma": True, "mma_sync": False}),
        ("mla_hopper_of_eight", {"wgmma": True, "tma": True, "mma_sync": False}),
        ("mla_portable", {"mma_sync": True}),
        ("mla_fp8", {"wgmma": True, "tma": True, "mma_sync": False, "bf16x2_scale": True}),
        ("moe_gate_up", {"mma_sync": True, "bf16x2_scale": True}),
    ],
)
def test_kernels_compile_for_hopper_with_the_units_they_are_written_for(
    name: str, instructions: dict[str, bool]
) -> None:
    line = json.loads(_run("tests.kernels.triton_compiled", [name]))
    assert {key: line[key] for key in instructions} == instructions
    assert line["shared_bytes"] <= SHARED_BYTES_OF_HOPPER


@pytest.mark.slow
def test_kernels_of_sampling_and_of_fixed_order_compile_for_hopper() -> None:
    """bf16 on tensor cores, fp32 not: they would round its operands."""
    on_tensor_cores = {"fixed_linear": True, "fixed_experts": True, "fixed_part": True}
    on_tensor_cores |= {"fixed_linear_fp32": False, "fixed_part_fp32": False}
    on_tensor_cores |= {"draw_search": False, "draw_search_count": False}
    on_tensor_cores |= {"draw_choose": False, "edit_rows": False, "apply_bitmask": False}
    lines = _run("tests.kernels.triton_compiled", list(on_tensor_cores)).splitlines()
    found = {line["kernel"]: line for line in map(json.loads, lines)}
    assert {name: line["mma_sync"] for name, line in found.items()} == on_tensor_cores
    assert all(line["shared_bytes"] <= SHARED_BYTES_OF_HOPPER for line in found.values())


@pytest.mark.slow
def test_gathering_fp8_latents_compiles_for_hopper_without_spilling() -> None:
    line = json.loads(_run("tests.kernels.triton_compiled", ["gather_planes"]))
    assert line["stack_bytes"] == 0 and line["registers"] <= 128
    assert line["shared_bytes"] <= SHARED_BYTES_OF_HOPPER


@pytest.mark.slow
def test_routing_among_384_experts_compiles_for_hopper_without_spilling() -> None:
    """Kimi K2's. In seconds: where all were compared with all it took minutes."""
    names = ["moe_topk_384", "moe_norm_route_384"]
    lines = _run("tests.kernels.triton_compiled", names).splitlines()
    found = {line["kernel"]: line["stack_bytes"] for line in map(json.loads, lines)}
    assert found == dict.fromkeys(names, 0)


@pytest.mark.slow
def test_what_surrounds_folded_rows_compiles_for_hopper_without_spilling() -> None:
    names = ["absorb_placed", "merge_values_placed"]
    lines = _run("tests.kernels.triton_compiled", names).splitlines()
    found = {line["kernel"]: line["stack_bytes"] for line in map(json.loads, lines)}
    assert found == dict.fromkeys(names, 0)


@pytest.mark.slow
def test_the_sum_in_the_second_expert_product_compiles_for_hopper_without_spilling() -> None:
    kinds = ("rows", "unsorted", "sorted", "sorted_32")
    names = [f"moe_down_combined_{kind}" for kind in kinds]
    lines = _run("tests.kernels.triton_compiled", names).splitlines()
    found = {line["kernel"]: line for line in map(json.loads, lines)}
    assert {name: line["stack_bytes"] for name, line in found.items()} == dict.fromkeys(names, 0)
    assert all(line["registers"] <= 168 and line["mma_sync"] for line in found.values())
