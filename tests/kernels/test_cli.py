# SPDX-License-Identifier: Apache-2.0
"""`python -m kernels`: what it prints and how it exits."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner

from kernels.__main__ import main
from kernels.registry import REGISTRY, Priority, register_kernel


def test_ls_prints_every_registered_kernel_as_json() -> None:
    result = CliRunner().invoke(main, ["ls", "--json"])
    assert result.exit_code == 0
    printed = {(r["family"], r["name"]) for r in map(json.loads, result.output.splitlines())}
    expected = {
        (family, spec.name) for family in REGISTRY.families() for spec in REGISTRY.specs(family)
    }
    assert printed == expected


def test_ls_says_what_the_machine_lacks() -> None:
    result = CliRunner().invoke(main, ["ls", "--json"])
    missing = {
        (r["family"], r["name"]): r["missing"] for r in map(json.loads, result.output.splitlines())
    }
    assert missing["linear", "reference"] is None
    if not torch.cuda.is_available():
        assert missing["mla_prefill", "flash"] == "torch finds no GPU"
    lines = CliRunner().invoke(main, ["ls"]).output.splitlines()
    assert len({line.index(line.split()[2]) for line in lines}) == 1  # columns


def test_explain_names_the_chosen_kernel_and_the_reasons() -> None:
    args = ["explain", "rms_norm", "--format", "x=fp32", "--format", "weight=fp32"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0
    assert "-> reference [REFERENCE]: can run it" in result.output


def test_explain_fails_when_nothing_can_run_the_call() -> None:
    result = CliRunner().invoke(main, ["explain", "nothing"])
    assert result.exit_code == 2
    assert "allowed:" in result.output
    result = CliRunner().invoke(main, ["explain", "rms_norm", "--format", "fp32"])
    assert result.exit_code == 2
    assert "NAME=VALUE" in result.output


def test_explain_says_which_formats_nobody_asks_for() -> None:
    args = ["explain", "linear", "--format", "x=bf16", "--format", "weihgt=q4_1"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0
    assert result.stderr == "note: no kernel of linear looks at the format of weihgt\n"
    result = CliRunner().invoke(main, [*args[:-1], "weight=q4_1"])
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("traits", "said"),
    [
        (["head_dim=64", "head_dim=128"], "got 'head_dim' twice; allowed: once"),
        (["head_dim=wide"], "got head_dim=wide; allowed: what the op paged_attention would say"),
        (["head_dim=²"], "got head_dim=²; allowed: what the op paged_attention would say"),
        (["head_dim=--64"], "got head_dim=--64; allowed: what the op paged_attention would say"),
    ],
)
def test_explain_names_traits_that_no_op_would_give(traits: list[str], said: str) -> None:
    options = [part for trait in traits for part in ("--trait", trait)]
    result = CliRunner().invoke(main, ["explain", "paged_attention", *options])
    assert result.exit_code == 2
    assert said in result.output
    twice = ["explain", "linear", "--format", "x=bf16", "--format", "x=fp32"]
    assert "got 'x' twice" in CliRunner().invoke(main, twice).output


def test_explain_names_devices_that_there_are() -> None:
    result = CliRunner().invoke(main, ["explain", "linear", "--device", "tpu"])
    assert result.exit_code == 2 and "'cpu', 'cuda'" in result.output
    if not torch.cuda.is_available():
        result = CliRunner().invoke(main, ["explain", "linear", "--device", "cuda"])
        assert result.exit_code == 2 and "as torch finds no GPU" in result.output


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_explain_answers_for_every_family_of_a_gpu_however_little_it_is_told() -> None:
    """In a process of its own, whose kernels are chosen as on an H200."""
    script = (
        "from unittest import mock\n"
        "import torch\n"
        "from click.testing import CliRunner\n"
        "from benchmarks.gpu.stub_device import stub_device\n"
        "from kernels.__main__ import main\n"
        "from kernels.registry import REGISTRY\n"
        "with stub_device(), mock.patch.object(torch.cuda, 'is_available', lambda: True):\n"
        "    for family in REGISTRY.families():\n"
        "        result = CliRunner().invoke(main, ['explain', family, '--device', 'cuda'])\n"
        "        failed = not isinstance(result.exception, (SystemExit, type(None)))\n"
        "        print(family, repr(result.exception) if failed else 'ok')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) > 30 and {line.split(" ", 1)[1] for line in lines} == {"ok"}, lines


def test_verify_compares_and_counts() -> None:
    result = CliRunner().invoke(main, ["verify", "copy_pages", "argmax", "--verbose"])
    assert result.exit_code == 0
    assert "0 failed" in result.output
    assert CliRunner().invoke(main, ["verify", "nothing"]).exit_code == 2


@pytest.fixture(params=["raises", "takes no arguments", "returns nothing"])
def broken_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    def raises(logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    wrong = {"raises": raises, "takes no arguments": lambda: 1, "returns nothing": lambda x: None}
    register_kernel("argmax", "broken", priority=Priority.TRIAL)(wrong[request.param])
    yield request.param
    REGISTRY.remove("argmax", "broken")


def test_a_kernel_that_raises_fails_and_the_others_go_on(broken_kernel: str) -> None:
    result = CliRunner().invoke(main, ["verify", "argmax", "copy_pages", "--verbose"])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    failed = [line for line in lines if line.startswith("FAIL")]
    assert all(line.startswith("FAIL  argmax broken: ") for line in failed)
    assert lines[-1].endswith(f"comparisons, {len(failed)} failed") and len(failed) > 3
    if broken_kernel == "raises":
        assert failed[0].endswith("raised RuntimeError: no such instruction")
    result = CliRunner().invoke(main, ["bench", "argmax", "--repeats", "1"])
    assert (result.exit_code == 0) is (broken_kernel == "returns nothing")
    assert "argmax reference" in result.output
    assert ("FAIL  argmax broken: " in result.output) is (broken_kernel != "returns nothing")


def test_bench_times_every_kernel_on_every_case_and_leaves_the_registry_as_it_was() -> None:
    before = [(spec.name, spec.fn) for spec in REGISTRY.specs("copy_pages")]
    result = CliRunner().invoke(main, ["bench", "copy_pages", "--repeats", "2", "--json"])
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert {line["kernel"] for line in lines} == {name for name, _ in before}
    assert all(line["us"] is None or line["us"] > 0 for line in lines)
    assert any(line["us"] for line in lines)
    assert sorted((spec.name, spec.fn) for spec in REGISTRY.specs("copy_pages")) == sorted(before)
    assert CliRunner().invoke(main, ["bench", "nothing"]).exit_code == 2
    assert CliRunner().invoke(main, ["bench", "argmax", "--repeats", "0"]).exit_code == 2


def test_every_command_has_help() -> None:
    for command in ("ls", "explain", "verify", "bench"):
        result = CliRunner().invoke(main, [command, "--help"])
        assert result.exit_code == 0
        assert len(result.output.splitlines()) > 3
