# SPDX-License-Identifier: Apache-2.0
"""The arrows between rooms, as executable facts."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("appliance", "sessions", "tools_schema", "engine", "kvtiers", "kernels")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def imported_modules(path: pathlib.Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


def importers_of(top: str) -> set[str]:
    found = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            if any(name.split(".")[0] == top for name in imported_modules(path)):
                found.add(path.relative_to(ROOT).as_posix())
    return found


def test_import_contracts_hold() -> None:
    lint = pathlib.Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([str(lint)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("triton", "kernels/"),
        ("redis", "sessions/redis_server.py"),
        ("mooncake", "kvtiers/mooncake_"),
        ("_scheduler", "engine/loop/"),
        ("_cpu_kernels", "kernels/"),
    ],
)
def test_a_dependency_is_imported_in_its_one_home(module: str, allowed: str) -> None:
    assert [path for path in importers_of(module) if not path.startswith(allowed)] == []


@pytest.mark.parametrize("package", ["engine", "kvtiers"])
def test_package_inits_that_would_load_a_runtime_stay_empty(package: str) -> None:
    assert (ROOT / package / "__init__.py").read_text() == ""


def test_the_api_process_loads_no_torch() -> None:
    code = (
        "import pkgutil, importlib, sys, appliance\n"
        "for m in pkgutil.walk_packages(appliance.__path__, 'appliance.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "heavy = {'torch', 'triton', 'transformers', 'xgrammar'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("order", ["kernels, transformers, xgrammar", "xgrammar, kernels"])
def test_our_kernels_package_is_safe_beside_transformers_and_xgrammar(order: str) -> None:
    code = (
        f"import {order}\n"
        "import transformers\n"
        "from transformers import AutoModelForCausalLM\n"
        "import kernels, pathlib\n"
        "print(pathlib.Path(kernels.__file__).parent)\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(ROOT / "kernels")


def test_every_source_file_carries_one_licence_line() -> None:
    sources = [
        path
        for room in (*ROOMS, "csrc", "tests", "examples", "benchmarks")
        for pattern in ("*.py", "*.cpp", "*.h")
        for path in (ROOT / room).rglob(pattern)
        if path.read_text().strip()
    ]
    missing = [
        path.relative_to(ROOT).as_posix()
        for path in sources
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ]
    assert len(sources) > 20
    assert missing == []


def test_no_dumping_ground_modules() -> None:
    banned = {"utils.py", "common.py", "helpers.py", "misc.py"}
    found = [p for room in ROOMS for p in (ROOT / room).rglob("*.py") if p.name in banned]
    assert found == []
