# SPDX-License-Identifier: Apache-2.0
"""The room imports the standard library and msgspec; redis in one file; no other room."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sessions

ROOM = Path(sessions.__path__[0])
FILES = sorted(ROOM.glob("*.py"))


def imported_by(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_imports_only_what_the_room_may(path: Path) -> None:
    allowed = {"sessions", "msgspec", *sys.stdlib_module_names}
    if path.name == "redis_server.py":
        allowed.add("redis")
    assert imported_by(path) <= allowed


def test_the_embedded_store_loads_neither_redis_nor_torch() -> None:
    program = (
        "import sys\n"
        "from sessions.config import SessionsConfig\n"
        "from sessions.stores import make_store\n"
        "make_store(SessionsConfig())\n"
        "print(sorted({'redis', 'torch', 'fastapi'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOM.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_error_code_is_in_the_tree_of_the_docstring() -> None:
    from sessions import errors

    tree = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.SessionError):
            assert name in tree, name
            if name not in ("SessionError", "BadInput", "ItemError", "StoreError"):
                assert value.code in tree, value.code
