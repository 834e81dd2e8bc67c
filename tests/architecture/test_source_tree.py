# SPDX-License-Identifier: Apache-2.0
"""What a benchmark says of the source it ran: never the commit of another tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu.machine import machine_facts
from benchmarks.source_tree import (
    COMMIT_VARIABLE,
    source_facts,
    source_of_commit,
    source_of_tree,
)


def _git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=n@example.org")
    done = subprocess.run(
        ["git", *who, *arguments], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _commit(root: Path, text: str) -> str:
    for name in ("engine/loop.py", "csrc/core/a.cpp", "docs/page.md"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    _git(root, "add", ".")
    _git(root, "commit", "-q", "-m", text)
    return _git(root, "rev-parse", "--short", "HEAD")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    _git(tmp_path, "init", "-q")
    return tmp_path


def test_a_clean_tree_names_its_commit(root: Path) -> None:
    commit = _commit(root, "one")
    assert source_facts(root) == {"commit": commit, "source": source_of_commit(commit, root)}
    (root / "docs" / "page.md").write_text("other words")  # no source
    (root / "engine" / "__pycache__").mkdir()
    (root / "engine" / "__pycache__" / "loop.pyc").write_bytes(b"1")
    assert source_facts(root)["commit"] == commit


def test_a_newer_tree_beside_an_older_history_says_so_and_is_found_by_its_digest(
    root: Path,
) -> None:
    old = _commit(root, "one")
    new = _commit(root, "two")
    wanted = source_of_commit(new, root)
    _git(root, "reset", "-q", "--soft", old)
    facts = source_facts(root)
    assert facts == {"commit": f"{old}+changes", "source": wanted}
    assert source_of_commit(old, root) != wanted


def test_a_new_file_that_git_does_not_know_is_a_change(root: Path) -> None:
    commit = _commit(root, "one")
    (root / "kernels").mkdir()
    (root / "kernels" / "new.py").write_text("")
    assert source_facts(root)["commit"] == f"{commit}+changes"


def test_a_copy_without_history_has_its_digest_and_the_commit_it_is_told(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = _commit(root, "one")
    copy = tmp_path_factory.mktemp("copy")
    for name in ("engine/loop.py", "csrc/core/a.cpp"):
        (copy / name).parent.mkdir(parents=True)
        (copy / name).write_bytes((root / name).read_bytes())
    assert source_of_tree(copy) == source_of_commit(commit, root)
    assert source_facts(copy) == {"commit": "", "source": source_of_tree(copy)}
    monkeypatch.setenv(COMMIT_VARIABLE, commit)
    assert source_facts(copy)["commit"] == commit


def test_results_of_gpu_benchmarks_begin_with_hardware_versions_and_commit() -> None:
    facts = machine_facts()
    assert {name for name, value in facts.items() if value} >= {"device", "torch", "source", "date"}
    assert {"triton", "cuda", "commit"} <= set(facts)
    assert facts["source"] == source_of_tree()
