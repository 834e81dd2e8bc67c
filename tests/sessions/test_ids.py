# SPDX-License-Identifier: Apache-2.0
"""Ids are ordered by time and never collide."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sessions.ids import is_id, new_id


def test_id_holds_its_prefix_and_the_time_it_was_made() -> None:
    before_ms = time.time_ns() // 1_000_000
    text = new_id("sess")
    after_ms = time.time_ns() // 1_000_000
    assert re.fullmatch(r"sess_[0-9a-hjkmnp-tv-z]{26}", text)
    value = 0
    for digit in text.removeprefix("sess_"):
        value = value * 32 + "0123456789abcdefghjkmnpqrstvwxyz".index(digit)
    assert before_ms <= value >> 80 <= after_ms + 1


def test_ids_of_many_threads_are_distinct_and_each_thread_sees_them_grow() -> None:
    def make(_: int) -> list[str]:
        return [new_id("turn") for _ in range(5_000)]

    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(make, range(8)))
    assert len({text for batch in batches for text in batch}) == 40_000
    assert all(batch == sorted(batch) for batch in batches)


def test_a_forked_child_makes_other_ids() -> None:
    read_end, write_end = os.pipe()
    new_id("item")
    child = os.fork()
    if child == 0:
        os.write(write_end, "".join(new_id("item") for _ in range(100)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    theirs = {text[start : start + 31] for start in range(0, len(text), 31)}
    assert len(theirs) == 100
    assert theirs.isdisjoint({new_id("item") for _ in range(100)})


def test_unknown_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix: 'user'"):
        new_id("user")


@pytest.mark.parametrize(
    ("text", "prefix", "expected"),
    [
        ("sess_01m8mbhy8mc6gxk5jheh7h6n48", "sess", True),
        ("sess_01m8mbhy8mc6gxk5jheh7h6n48", "turn", False),
        ("sess_01m8mbhy8mc6gxk5jheh7h6n48\n", "sess", False),
        ("sess_01m8mbhy8mc6gxk5jheh7h6n4", "sess", False),
        ("sess_01m8mbhy8mc6gxk5jheh7h6n4U", "sess", False),
        ("", "sess", False),
    ],
)
def test_is_id_checks_the_whole_form(text: str, prefix: str, expected: bool) -> None:
    assert is_id(text, prefix) is expected
