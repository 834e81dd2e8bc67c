# SPDX-License-Identifier: Apache-2.0
"""Other builds of Mooncake's library, and others' servers in place of a master: the store says what
is wrong and answers, it never raises. The library is a class of Python, its objects a dictionary.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvtiers.mooncake_client import NO_SPACE, MooncakeClient
from kvtiers.mooncake_endpoints import read_usage
from kvtiers.mooncake_heads import GuardedCalls, find_pages
from kvtiers.mooncake_library import load_library
from kvtiers.mooncake_store import MooncakeStore
from kvtiers.objects import HEADER_BYTES, key_hash, object_bytes
from kvtiers.page_order import NO_PARENT
from kvtiers.store import StoreState
from tests.fakes.stored_pages import LAYOUT, PAGE_BYTES, chain, page, pages, read

KEYS = chain("s", 12)
NEW = chain("new", 5)
SIZE = object_bytes(PAGE_BYTES)
NO_PART = -600


class Library:
    """What 0.3.13 has of what Moorage calls."""

    objects: dict[str, bytes]
    raises: type[Exception] | None

    def __init__(self) -> None:
        self._memory: Any = None

    def setup_dummy(self, ring_bytes: int, buffer_bytes: int, address: str) -> int:
        self._memory = (ctypes.c_ubyte * ring_bytes)()
        return 0

    def alloc_from_mem_pool(self, num_bytes: int) -> int:
        return ctypes.addressof(self._memory)

    def register_buffer(self, base: int, num_bytes: int) -> int:
        return 0

    def batch_put_from(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        self._fail()
        for key, place, size in zip(keys, places, sizes, strict=True):
            self.objects.setdefault(key, ctypes.string_at(place, size))
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        self._fail()
        codes = []
        for key, place, size in zip(keys, places, sizes, strict=True):
            found = self.objects.get(key)
            codes.append(-704 if found is None else len(found) if len(found) <= size else NO_PART)
            if found is not None and codes[-1] > 0:
                ctypes.memmove(place, found, len(found))
        return codes

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self._fail()
        return [int(key in self.objects) for key in keys]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        self._fail()
        return [0 if self.objects.pop(key, None) else -704 for key in keys]

    def close(self) -> int:
        return 0

    def _fail(self) -> None:
        if self.raises is not None:
            raise self.raises("out of order")


class PartsLibrary(Library):
    def get_into_ranges(
        self,
        places: list[int],
        keys: list[list[str]],
        targets: list[list[list[int]]],
        sources: list[list[list[int]]],
        sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        codes = []
        for key, [target], [source], [size] in zip(
            keys[0], targets[0], sources[0], sizes[0], strict=True
        ):
            found = self.objects.get(key)
            codes.append([-704 if found is None else size])
            if found is not None:
                ctypes.memmove(places[0] + target, found[source : source + size], size)
        return [codes]


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    monkeypatch.setattr(Library, "objects", found, raising=False)
    monkeypatch.setattr(Library, "raises", None, raising=False)
    monkeypatch.setattr("kvtiers.mooncake_client.check_answers", lambda address: None)
    return found


def use(monkeypatch: pytest.MonkeyPatch, library: type[Library]) -> None:
    monkeypatch.setattr("kvtiers.mooncake_client.load_library", lambda: library)


def open_store(tmp_path: Path, **endpoints: object) -> MooncakeStore:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"owner": "o:1", "capacity_bytes": 100 * SIZE, **endpoints}))
    return MooncakeStore(path, LAYOUT, SIZE)


@pytest.mark.parametrize("library", [Library, PartsLibrary])
def test_heads_are_read_with_or_without_a_call_that_reads_parts(
    objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, library: type[Library]
) -> None:
    use(monkeypatch, library)
    client = MooncakeClient("o:1", SIZE, 4)
    parents = [NO_PARENT, *map(key_hash, KEYS[:-1])]
    for at, key in enumerate(KEYS):
        assert client.put([key], [page(key)], [parents[at]], 2.0) == [0]
    objects["theirs"] = bytes(3 * HEADER_BYTES)
    objects["theirs/large"] = bytes(2 * SIZE)
    failures: list[Exception] = []

    def ask(call: Any, *allowed: int) -> list[int]:
        try:
            codes: list[int] = call()
        except Exception as error:
            failures.append(error)
            return []
        assert all(code in (-704, NO_SPACE, *allowed) for code in codes if code < 0)
        return codes

    wanted = [*KEYS, "theirs", "theirs/large", "gone"]
    found = find_pages(GuardedCalls(ask, client, 2.0), wanted, lambda: True)
    assert failures == []
    assert found.is_whole and found.num_unread == 0
    assert [stored.key for stored in found.pages] == KEYS
    assert [stored.parent_hash for stored in found.pages] == parents
    assert {stored.num_bytes for stored in found.pages} == {SIZE}
    assert found.strangers == {"theirs", "theirs/large"}


def test_a_library_that_raises_is_a_store_that_fails_and_comes_back(
    objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, PartsLibrary)
    store = open_store(tmp_path)
    assert store.put(KEYS, pages(KEYS)) == [True] * 12
    for error in (RuntimeError, TypeError, AttributeError, MemoryError):
        monkeypatch.setattr(Library, "raises", error)
        for _ in range(4):  # more calls than there is shared memory for, were it not given back
            assert store.put(NEW, pages(NEW)) == [False] * 5
            assert read(store, KEYS) == [False] * 12
            assert (store.probe(KEYS), store.remove(KEYS)) == (0, 0)
        status = store.status()
        assert status.state is StoreState.DEGRADED
        assert error.__name__ in status.reason
    monkeypatch.setattr(Library, "raises", None)
    assert read(store, KEYS) == [True] * 12
    assert store.status().state is StoreState.UP


@pytest.mark.parametrize("name", ["setup_dummy", "batch_remove", "batch_get_into"])
def test_a_build_that_lacks_what_is_needed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    members = {key: value for key, value in vars(Library).items() if key != name}
    module: Any = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = type("Store", (), members)
    module.__file__ = "nowhere.so"
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    with pytest.raises(OSError, match=f"no {name} .hint"):
        load_library()
    store = open_store(tmp_path)
    assert store.status().state is StoreState.DOWN
    assert name in store.status().reason
    assert store.put(KEYS, pages(KEYS)) == [False] * 12


@pytest.fixture
def other_server() -> Iterator[tuple[str, list[bytes]]]:
    """Any HTTP server: its address, and what it says (the first of the list)."""
    says = [b""]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(says[0])

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}", says
    server.shutdown()
    thread.join()
    server.server_close()


COUNTS = b"master_key_count 1\nmaster_allocated_bytes %s\nmaster_total_capacity_bytes 9\n"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>\n<body>It works!</body>\n</html>\n",
        b'{"status":"ok"}',
        b"\x00\xff\n\n",
        b"OneWord\n",
        COUNTS % b"Inf",
        COUNTS % b"NaN",
        COUNTS % b"many",
    ],
)
def test_another_server_in_place_of_a_master_s_metrics_is_a_master_that_cannot_be_asked(
    objects: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    other_server: tuple[str, list[bytes]],
    text: bytes,
) -> None:
    use(monkeypatch, PartsLibrary)
    address, says = other_server
    says[0] = text
    with pytest.raises(OSError, match="does not say what it holds"):
        read_usage(address)
    store = open_store(tmp_path, metrics=address)
    assert store.put(KEYS, pages(KEYS)) == [True] * 12
    assert read(store, KEYS) == [True] * 12
    assert (store.status().state, store.status().num_objects) == (StoreState.UP, 12)


@pytest.mark.parametrize("codes", [[-703] * 12, [0] * 4 + [-800] * 8, []])
def test_pages_that_could_not_be_removed_still_count(
    objects: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    codes: list[int],
) -> None:
    use(monkeypatch, PartsLibrary)
    store = open_store(tmp_path)
    assert store.put(KEYS, pages(KEYS)) == [True] * 12
    num_removed = codes.count(0)

    def remove(self: Library, keys: list[str], force: bool) -> list[int]:
        for key, code in zip(keys, codes, strict=False):
            if code == 0:
                del objects[key]
        return codes

    monkeypatch.setattr(Library, "batch_remove", remove)
    assert store.remove(KEYS) == num_removed
    assert store.status().num_objects == 12 - num_removed == len(objects)
    assert store.status().used_bytes == len(objects) * SIZE


@pytest.mark.parametrize("method", ["batch_is_exist", "batch_get_into"])
def test_a_page_that_is_put_while_it_is_asked_for_is_there(
    objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    use(monkeypatch, PartsLibrary)
    store = open_store(tmp_path)
    asked = getattr(Library, method)

    def slow(self: Library, keys: list[str], *more: list[int]) -> list[int]:
        codes: list[int] = asked(self, keys, *more)
        monkeypatch.setattr(Library, method, asked)
        assert store.put(KEYS[:2], pages(KEYS[:2])) == [True] * 2
        return codes

    monkeypatch.setattr(Library, method, slow)
    if method == "batch_is_exist":
        assert store.probe(KEYS) == 0
    else:
        assert read(store, KEYS) == [False] * 12
    assert store.status().num_objects == len(objects) == 2
    assert store.put(KEYS[2:], pages(KEYS[2:]), KEYS[1:-1]) == [True] * 10
    assert read(store, KEYS) == [True] * 12
