# SPDX-License-Identifier: Apache-2.0
"""Opening the store a configuration asks for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtiers.breaker import BreakerLimits, BreakerStore
from kvtiers.deadline_store import Deadlines, DeadlineStore
from kvtiers.errors import TierConfigError
from kvtiers.file_store import FileStore
from kvtiers.objects import object_bytes
from kvtiers.store import Store, StoreState
from kvtiers.stores import StoreSpec, open_store
from tests.fakes.stored_pages import LAYOUT, PAGE_BYTES, blank, chain, pages, read

KEYS = chain("a", 3)


def _spec(kind: str, **fields: object) -> StoreSpec:
    return StoreSpec(
        kind=kind,
        layout_fingerprint=LAYOUT,
        object_bytes=object_bytes(PAGE_BYTES),
        **fields,  # type: ignore[arg-type]  # a test's own keywords
    )


def _open(kind: str, **fields: object) -> Store:
    store = open_store(_spec(kind, **fields))
    assert store is not None
    return store


def test_a_file_store_keeps_pages_from_one_opening_to_the_next(tmp_path: Path) -> None:
    for round_ in range(2):
        store = _open("file", directory=str(tmp_path), quota_bytes=1 << 22)
        assert store.kind == "file"
        if round_ == 0:
            assert store.put(KEYS, pages(KEYS)) == [True] * 3
        assert read(store, KEYS) == [True] * 3
        store.close()


def test_each_rank_has_a_directory_of_its_own(tmp_path: Path) -> None:
    stores = [
        _open("file", directory=str(tmp_path), quota_bytes=1 << 22, rank=rank) for rank in (0, 1)
    ]
    assert [store.status().state for store in stores] == [StoreState.UP] * 2
    stores[0].put(KEYS, pages(KEYS))
    assert read(stores[1], KEYS) == [False] * 3
    for store in stores:
        store.close()


def test_no_store_is_none() -> None:
    assert open_store(_spec("none")) is None


def test_a_store_that_cannot_be_had_is_cut_off_and_fails_nothing(tmp_path: Path) -> None:
    store = _open("mooncake", run_dir=str(tmp_path))
    assert store.status().state is not StoreState.UP
    assert str(tmp_path / "mooncake.json") in store.status().reason
    assert store.put(KEYS, pages(KEYS)) == [False] * 3
    assert store.get(KEYS, blank(3)) == [False] * 3
    store.close()


def test_a_directory_that_hangs_holds_no_start_up(tmp_path: Path) -> None:
    (tmp_path / "rank-0").mkdir()
    os.mkfifo(tmp_path / "rank-0" / "index")  # reading it waits for a writer
    bare = FileStore(tmp_path / "rank-0", 1 << 22, LAYOUT, opens_now=False)
    guarded = DeadlineStore(bare, Deadlines(open_s=0.1, call_s=20.0))
    guarded.open()
    store = BreakerStore(guarded, LAYOUT, BreakerLimits(first_pause_s=0.05, max_pause_s=0.1))
    assert store.status().state is not StoreState.UP
    assert store.put(KEYS, pages(KEYS)) == [False] * 3
    with (tmp_path / "rank-0" / "index").open("wb"):
        (tmp_path / "rank-0" / "index").unlink()
    for _ in range(3000):
        if store.status().state is StoreState.UP:
            break
        threading.Event().wait(0.02)
    assert store.put(KEYS, pages(KEYS)) == [True] * 3
    store.close()


WITHOUT_LIBRARY = """
import json, pathlib, socket, sys
sys.modules["mooncake"] = None  # as where no wheel is installed
from kvtiers.stores import StoreSpec, open_store
listener = socket.create_server(("127.0.0.1", 0))
run_dir = pathlib.Path(sys.argv[1])
owner = f"127.0.0.1:{listener.getsockname()[1]}"
(run_dir / "mooncake.json").write_text(json.dumps({"owner": owner}))
store = open_store(
    StoreSpec(
        kind="mooncake", layout_fingerprint="00" * 16, object_bytes=1000, run_dir=str(run_dir)
    )
)
print(store.status().reason)
"""


def test_without_the_library_mooncake_is_down_and_says_what_to_install(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY, str(tmp_path)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.startswith("mooncake cannot be loaded:"), result.stderr
    assert "moorage[mooncake]" in result.stdout


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("tape", {}, "kind = 'tape': allowed: file | mooncake | none"),
        ("file", {"quota_bytes": 5}, "directory = ''"),
        ("file", {"directory": "d"}, "quota_bytes = 0: allowed: 1 or more"),
        ("mooncake", {}, "run_dir = ''"),
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused(
    kind: str, fields: dict[str, object], named: str
) -> None:
    with pytest.raises(TierConfigError, match=named.replace("|", r"\|")):
        _spec(kind, **fields)
