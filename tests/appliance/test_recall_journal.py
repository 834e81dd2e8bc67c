# SPDX-License-Identifier: Apache-2.0
"""Answers outlive the process that sampled them: what is on disk, torn, damaged, or another's."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random

import pytest

from appliance.recall import Recall, Recalled
from appliance.recall_journal import RecallJournal
from tests.fakes.appliance import Json, RunningApp, says

TOOL: Json = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


def open_recall(directory: Path, *, model: str = "m1", max_file_bytes: int = 1 << 20) -> Recall:
    journal = RecallJournal(directory=directory, model=model, max_file_bytes=max_file_bytes)
    return Recall(journal=journal)


def key_of(text: str) -> bytes:
    return text.encode().ljust(32, b".")


def put(recall: Recall, line: list[str], ids: bytes) -> None:
    recall.put([key_of(word) for word in line], Recalled(token_ids=ids, is_closed=True))


def get(recall: Recall, line: list[str]) -> bytes | None:
    found = recall.longest([key_of(word) for word in line])
    return found[1].token_ids if found is not None and found[0] == len(line) else None


@pytest.mark.parametrize("max_file_bytes", [1 << 20, 2000])
@pytest.mark.parametrize("seed", range(5))
def test_a_tree_is_known_again_after_each_restart(
    tmp_path: Path, seed: int, max_file_bytes: int
) -> None:
    """With room for all of it; or for some, and then nothing that is found is wrong."""
    random = Random(seed)
    lines: dict[tuple[str, ...], bytes] = {(): b""}
    for restart in range(4):
        recall = open_recall(tmp_path, max_file_bytes=max_file_bytes)
        for line, ids in lines.items():
            found = get(recall, list(line)) if line else None
            assert found == ids or (max_file_bytes < 1 << 20 and found is None) or not line
        for step in range(20):
            line = random.choice(list(lines))
            found = get(recall, list(line)) if line else b""
            ids = (found if found is not None else lines[line]) + random.randbytes(80)
            grown = (*line, f"{restart}-{step}")
            put(recall, list(grown), ids)
            lines[grown] = ids
            assert get(recall, list(grown)) == ids
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * max_file_bytes + 4000


def test_a_torn_or_damaged_end_is_cut_off_and_written_over(tmp_path: Path) -> None:
    recall = open_recall(tmp_path)
    put(recall, ["a"], b"aaaa")
    put(recall, ["a", "b"], b"aaaabbbb")
    file = tmp_path / "recall.new"
    whole = file.read_bytes()
    for torn in (whole[:-1], whole[:-4] + b"xxxx", whole[:-70]):
        file.write_bytes(torn)
        recall = open_recall(tmp_path)
        assert (get(recall, ["a"]), get(recall, ["a", "b"])) == (b"aaaa", None)
        put(recall, ["a", "b"], b"aaaacccc")
        assert get(open_recall(tmp_path), ["a", "b"]) == b"aaaacccc"


def test_ids_of_another_model_are_not_taken(tmp_path: Path) -> None:
    put(open_recall(tmp_path), ["a"], b"aaaa")
    assert get(open_recall(tmp_path, model="m2"), ["a"]) is None


def test_without_a_disk_answers_are_recalled_until_the_process_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("no directory")
    with caplog.at_level(logging.WARNING):
        recall = open_recall(tmp_path / "taken")
    assert "not kept on disk" in caplog.text
    put(recall, ["a"], b"aaaa")
    assert get(recall, ["a"]) == b"aaaa"


def test_the_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    put(open_recall(tmp_path), ["a"], b"aaaa")
    assert (tmp_path / "recall.new").stat().st_mode & 0o777 == 0o600


def test_a_client_finds_its_history_cached_after_a_restart(tmp_path: Path) -> None:
    call = '<tool_call>[{"name": "ls", "arguments": {  "path":"a" }}]</tool_call>'
    with RunningApp(tmp_path, says(call)) as app:
        history: list[Json] = [{"role": "user", "content": "look " * 50}]
        body: Json = {"model": "default", "messages": history, "tools": [TOOL]}
        for _ in range(3):
            message = app.post("/v1/chat/completions", body).json()["choices"][0]["message"]
            asked = message["tool_calls"][0]
            asked["function"]["arguments"] = '{"path":"a"}'
            history += [message, {"role": "tool", "tool_call_id": asked["id"], "content": "x"}]
            app.restart()
        usage = app.post("/v1/chat/completions", body).json()["usage"]
        recent = app.get("/v1/implicit_sessions").json()["data"][0]["name"]
        last = app.get(f"/v1/implicit_sessions/{recent}").json()["recent"][-1]
        assert last["recalled_messages"] == 6
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= last["usage"]["recalled_tokens"] - 1
