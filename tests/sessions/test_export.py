# SPDX-License-Identifier: Apache-2.0
"""An exported session comes back with the same items and token ids; a bad file does not."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from sessions.errors import ImportFormatError
from sessions.export import export_lines, import_lines
from sessions.items import parse_items
from sessions.session import Session
from sessions.settings import HoldTimes, SessionSettings
from sessions.token_codec import decode_ids
from sessions.turn_log import TurnLog
from tests.fakes.session_turns import NOW_MS, fresh_session, outcome, pending


def exported() -> tuple[Session, TurnLog, list[bytes]]:
    settings = SessionSettings(
        instructions="be exact",
        tools=({"type": "function", "name": "f", "parameters": {"z": {}, "a": {}}},),
        hold=HoldTimes(l1_ms=5),
    )
    session, records = fresh_session(settings=settings, metadata={"repo": "m"})
    log = TurnLog(records)
    for items, call_ids in (
        (parse_items("go \U0001f6a2"), ("c",)),
        (parse_items([{"type": "function_call_output", "call_id": "c", "output": "o"}]), ("d",)),
    ):
        turn = pending(session, items)
        record = outcome(turn, call_ids=call_ids, token_ids=(70_000, 2, 3))
        session = session.begin_turn(turn, NOW_MS).commit_turn(record, NOW_MS)
        log = log.extended(record)
    return session, log, list(export_lines(session, log))


def changed(lines: list[bytes], index: int, change: Any) -> list[bytes]:
    line = json.loads(lines[index])
    change(line)
    return [*lines[:index], json.dumps(line).encode(), *lines[index + 1 :]]


def of_record(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """A change of some fields of a line's record."""
    return lambda line: line["record"].update(fields)


def test_lines_are_json_with_tokens_as_int32_base64() -> None:
    _, log, lines = exported()
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    kinds = [json.loads(line)["type"] for line in lines]
    assert kinds == ["session", "record", "record", "record", "end"]
    raw = base64.b64decode(json.loads(lines[2])["record"]["output_token_ids"])
    assert decode_ids(raw) == decode_ids(log.records[1].output_token_ids)
    assert json.loads(lines[-1]) == {
        "type": "end",
        "num_records": 3,
        "num_tokens": log.num_tokens,
    }


def test_import_makes_a_new_session_with_the_same_history() -> None:
    session, log, lines = exported()
    imported, records = import_lines(lines, tenant="t", now_ms=NOW_MS + 5)
    assert records == log.records
    assert imported.id != session.id and imported.log_id != session.log_id
    assert (imported.tenant, imported.created_at_ms) == ("t", NOW_MS + 5)
    for name in ("model", "settings", "metadata", "usage", "revision", "num_tokens", "num_items"):
        assert getattr(imported, name) == getattr(session, name), name
    assert (imported.status, imported.open_call_ids) == ("requires_action", ("d",))
    assert list(imported.settings.tools[0]["parameters"]) == ["z", "a"]
    again = list(export_lines(imported, TurnLog(records)))
    assert again[1:] == lines[1:]


def test_blank_lines_and_missing_newlines_are_fine() -> None:
    _, log, lines = exported()
    _, records = import_lines(
        [b"\n", *(line.strip() for line in lines), b" \n"], tenant="t", now_ms=NOW_MS
    )
    assert records == log.records


@pytest.mark.parametrize("num_lines", range(5))
def test_a_file_cut_off_at_any_line_is_refused(num_lines: int) -> None:
    _, _, lines = exported()
    with pytest.raises(ImportFormatError) as caught:
        import_lines(lines[:num_lines], tenant="t", now_ms=NOW_MS)
    assert caught.value.code == "invalid_import"


def test_a_missing_or_repeated_record_is_refused() -> None:
    _, _, lines = exported()
    with pytest.raises(ImportFormatError, match="the end line counts 3 records"):
        import_lines([*lines[:2], *lines[3:]], tenant="t", now_ms=NOW_MS)
    with pytest.raises(ImportFormatError, match="4 and|used twice"):
        import_lines([*lines[:3], lines[2], *lines[3:]], tenant="t", now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda line: line.update(format=2), "line 1: format 2"),
        (0, lambda line: line.pop("model"), r"line 1: .*`model`"),
        (0, lambda line: line["settings"].update(on_conflict="x"), "on_conflict"),
        (1, lambda line: line.update(type="session"), "line 2: "),
        (1, lambda line: line.update(type="odd"), "line 2: "),
        (2, lambda line: line["record"].update(input_token_ids="AAA="), "line 3: .*int32"),
        (2, lambda line: line["record"].update(input_token_ids="////fw=="), "line 3: item_token"),
        (2, of_record(input_token_ids="/w==", item_token_ends=[]), "line 3: .*int32"),
        (2, of_record(output_token_ids="/w==", item_token_ends=[]), "line 3: .*int32"),
        (2, of_record(page_hashes="/w=="), "line 3: page_hashes: 1 bytes"),
        (2, of_record(id="turn_\0"), "line 3: record id"),
        (2, of_record(id="../../turn_1"), "line 3: record id"),
        (2, of_record(id="/tmp/turn_1"), "line 3: record id"),
        (2, of_record(id="turn_" + "1" * 300), "line 3: record id"),
        (2, of_record(kind="odd"), "line 3: a record of kind 'odd'"),
        (2, of_record(status="odd"), "line 3: .*status 'odd'"),
        (2, of_record(revision=2**63), "line 3: revision 9223372036854775808"),
        (2, of_record(revision=-1), "line 3: revision -1"),
        (0, lambda line: line["settings"].update(expires_after_ms=2**63), "expires_after"),
        (0, lambda line: line["settings"].update(priority=2**31), "priority"),
        (0, lambda line: line["settings"]["hold"].update(l2_ms=-1), "cache.hold.l2"),
        (0, lambda line: line["settings"]["hold"].update(l3_ms=2**63), "cache.hold.l3"),
        (0, lambda line: line["settings"]["context"].update(max_tokens=2**31), "max_tokens"),
        (2, lambda line: line["record"].update(committed=False), "line 3: an uncommitted"),
        (2, lambda line: line["record"]["input_items"][0].update(role="robot"), "line 3: .*role"),
        (2, lambda line: line["record"].update(revision=9), "revision 2 after 9"),
        (4, lambda line: line.update(num_tokens=1), "the end line counts"),
    ],
)
def test_a_changed_file_is_refused_with_its_line(index: int, change: Any, message: str) -> None:
    _, _, lines = exported()
    with pytest.raises(ImportFormatError, match=message):
        import_lines(changed(lines, index, change), tenant="t", now_ms=NOW_MS)


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    _, _, lines = exported()
    import_lines(lines, tenant="t", now_ms=NOW_MS, vocab_size=70_001)
    with pytest.raises(ImportFormatError, match=r"line 3: token ids must lie in \[0, 70000\)"):
        import_lines(lines, tenant="t", now_ms=NOW_MS, vocab_size=70_000)


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff\xfe", b'"x"', b"null"])
def test_lines_that_are_no_export_are_refused(raw: bytes) -> None:
    with pytest.raises(ImportFormatError, match="line 1"):
        import_lines([raw], tenant="t", now_ms=NOW_MS)
