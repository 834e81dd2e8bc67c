# SPDX-License-Identifier: Apache-2.0
"""Which source a figure was measured on: the commit, and a digest of the files that ran.

    python -m benchmarks.source_tree [COMMIT]         of this tree, or of a commit

A tree may have been copied to a machine without its history, or beside an older one: what git says
there is no commit of what runs. The digest is taken over the contents of the rooms' sources, so
the same command finds the commit that it belongs to. Does not know: what was measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("appliance", "csrc", "engine", "kernels", "kvtiers", "sessions", "tools_schema")
SUFFIXES = {".cmake", ".cpp", ".h", ".html", ".js", ".py", ".pyi"}
# Who starts a run on a copy names the commit here.
COMMIT_VARIABLE = "BENCHMARK_COMMIT"


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    """Of (path, content), in the order of paths."""
    whole = hashlib.sha256()
    for path, content in sorted(files):
        whole.update(f"{path}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return whole.hexdigest()[:12]


def _is_source(path: str) -> bool:
    return path.split("/")[0] in ROOMS and Path(path).suffix in SUFFIXES


def source_of_tree(root: Path = ROOT) -> str:
    """Digest of the sources under a folder, whether or not git knows them."""
    found = (path for room in ROOMS for path in (root / room).rglob("*") if path.is_file())
    named = ((path.relative_to(root).as_posix(), path) for path in found)
    return _digest((name, path.read_bytes()) for name, path in named if _is_source(name))


def source_of_commit(commit: str, root: Path = ROOT) -> str:
    """The same of what a commit holds."""
    listed = _git(root, "ls-tree", "-r", "-z", commit).decode().split("\0")
    entries = (entry.split("\t") for entry in listed if entry)
    blobs = {path: facts.split()[2] for facts, path in entries if _is_source(path)}
    asked = "".join(f"{blob}\n" for blob in blobs.values()).encode()
    answer, at = _git(root, "cat-file", "--batch", given=asked), 0
    files: list[tuple[str, bytes]] = []
    for path in blobs:
        head_end = answer.index(b"\n", at)
        start, num_bytes = head_end + 1, int(answer[at:head_end].split()[2])
        files.append((path, answer[start : start + num_bytes]))
        at = start + num_bytes + 1
    return _digest(files)


def source_facts(root: Path = ROOT) -> dict[str, str]:
    """`source`, and `commit`: as the environment names it, else what git says, followed by
    "+changes" where the sources are not those of that commit; "" where there is no git."""
    source = source_of_tree(root)
    commit = os.environ.get(COMMIT_VARIABLE, "")
    if not commit:
        try:
            commit = _git(root, "rev-parse", "--short", "HEAD").decode().strip()
            if source_of_commit("HEAD", root) != source:
                commit += "+changes"
        except (OSError, subprocess.CalledProcessError):
            commit = ""
    return {"commit": commit, "source": source}


def _git(root: Path, *arguments: str, given: bytes = b"") -> bytes:
    return subprocess.run(
        ["git", *arguments], cwd=root, input=given, capture_output=True, check=True
    ).stdout


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps({"commit": sys.argv[1], "source": source_of_commit(sys.argv[1])}))
    else:
        print(json.dumps(source_facts()))
