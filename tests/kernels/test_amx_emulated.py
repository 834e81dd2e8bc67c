# SPDX-License-Identifier: Apache-2.0
"""The AMX kernels, on CPUs that have AVX-512 but no AMX: its tile instructions in plain code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.decoder_cases import decoder_cases
from kernels.platform import cpu_capability

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`_cpu_kernels` with the AMX level offered and its instructions emulated."""
    pytest.importorskip("_cpu_kernels")
    features = cpu_capability().features
    if "amx_tile" in features:
        pytest.skip("this CPU has AMX, where the contract tests run the kernels themselves")
    if "avx512_bf16" not in features:
        pytest.skip("this CPU lacks AVX-512, which the AMX kernels use beside tiles")
    build = tmp_path_factory.mktemp("emulated")
    tools = Path(sys.executable).parent
    configure = [tools / "cmake", "-S", ROOT / "csrc", "-B", build, "-G", "Ninja"]
    settings = {
        "CMAKE_MAKE_PROGRAM": tools / "ninja",
        "Python_EXECUTABLE": sys.executable,
        "MOORAGE_BUILD_SCHEDULER": "OFF",
        "MOORAGE_EMULATE_AMX": "ON",
    }
    options = [f"-D{name}={value}" for name, value in settings.items()]
    for command in ([*configure, *options], [tools / "cmake", "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    (found,) = build.glob("_cpu_kernels*.so")
    return found


def test_the_amx_kernels_agree_with_the_references(extension: Path) -> None:
    command = [sys.executable, "-m", "tests.kernels.amx_emulated", str(extension)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    taken = [found for found in verdicts if found["error"] is not None]
    assert not [found for found in taken if not found["error"] <= found["allowed"]]
    cases = {(found["family"], found["case"]) for found in taken}
    assert {("llama_forward", case.name) for case in decoder_cases()} <= cases
    assert {family for family, _ in cases} >= {"linear", "paged_attention"}
