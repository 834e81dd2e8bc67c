# SPDX-License-Identifier: Apache-2.0
"""A session as JSON lines and back: one header, one line a record, one line that ends it.

Does not know: stores, HTTP. Token ids are base64 of int32 little-endian bytes. An import makes a
new session (new id, this tenant, no parent) with the same items, ids of turns and token history;
nothing of it is believed: types, roles, item boundaries and token ids are checked, and what can
be computed from the records is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import msgspec

from sessions import token_codec
from sessions.errors import BadInput, ImportFormatError
from sessions.history import on_history
from sessions.items import item_to_wire, parse_items
from sessions.residency import HASH_BYTES
from sessions.session import Session, UsageTotals, new_session
from sessions.settings import SessionSettings
from sessions.turn_log import KINDS, STATUSES, Record, TurnLog

FORMAT: Final = 1
MAX_LINE_BYTES: Final = 64 << 20
MAX_REVISION: Final = 1 << 53
_RECORD_ID = re.compile(r"(?:turn|batch)_[0-9A-Za-z_-]{1,64}\Z")


class Header(msgspec.Struct, tag="session", kw_only=True, frozen=True):
    format: int
    id: str
    model: str
    model_fingerprint: str
    created_at_ms: int
    settings: SessionSettings
    metadata: dict[str, str]
    usage: UsageTotals
    num_records: int


class RecordLine(msgspec.Struct, tag="record", kw_only=True, frozen=True):
    record: Record


class End(msgspec.Struct, tag="end", kw_only=True, frozen=True):
    num_records: int
    num_tokens: int


_encoder = msgspec.json.Encoder()
Line = Header | RecordLine | End
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def export_lines(session: Session, log: TurnLog) -> Iterator[bytes]:
    """The committed history, each line with its newline; a running turn is not part of it."""
    header = Header(
        format=FORMAT,
        id=session.id,
        model=session.model,
        model_fingerprint=session.model_fingerprint,
        created_at_ms=session.created_at_ms,
        settings=session.settings,
        metadata=session.metadata,
        usage=session.usage,
        num_records=len(log.records),
    )
    yield _encoder.encode(header) + b"\n"
    for record in log.records:
        yield _encoder.encode(RecordLine(record=record)) + b"\n"
    end = End(num_records=len(log.records), num_tokens=log.num_tokens)
    yield _encoder.encode(end) + b"\n"


def import_lines(
    lines: Iterable[bytes], *, tenant: str, now_ms: int, vocab_size: int | None = None
) -> tuple[Session, tuple[Record, ...]]:
    """A new session and its records, to be given to `SessionStore.create`.

    With `vocab_size`, every token id must be below it. Raises `ImportFormatError` naming the line.
    """
    header: Header | None = None
    records: list[Record] = []
    end: End | None = None
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        line = _decode(raw, number)
        if end is not None:
            _fail(number, "nothing may follow the end line")
        if isinstance(line, Header):
            if header is not None:
                _fail(number, "a second header")
            header = _checked_header(line, number)
        elif header is None:
            _fail(number, "the first line must be a header (type: session)")
        elif isinstance(line, RecordLine):
            records.append(_checked_record(line.record, number, vocab_size))
        else:
            end = line
    if header is None or end is None:
        raise ImportFormatError("the export is cut off: no end line", param="body")
    return _assemble(header, records, end, tenant, now_ms)


def _assemble(
    header: Header, records: list[Record], end: End, tenant: str, now_ms: int
) -> tuple[Session, tuple[Record, ...]]:
    num_tokens = sum(record.num_tokens for record in records)
    if (end.num_records, end.num_tokens) != (len(records), num_tokens):
        raise ImportFormatError(
            f"the end line counts {end.num_records} records and {end.num_tokens} tokens, "
            f"the file has {len(records)} and {num_tokens}",
            param="body",
        )
    _check_order(records)
    try:
        session = new_session(
            model=header.model,
            now_ms=now_ms,
            tenant=tenant,
            model_fingerprint=header.model_fingerprint,
            settings=header.settings,
            metadata=header.metadata,
        )
    except BadInput as error:
        raise ImportFormatError(f"line 1: {error}", param="body") from error
    session = on_history(session, (), tuple(records), now_ms)
    revision = records[-1].revision if records else 0
    return replace(session, revision=revision, usage=header.usage), tuple(records)


def _check_order(records: list[Record]) -> None:
    seen: set[str] = set()
    revision = 0
    for number, record in enumerate(records, start=2):
        if record.id in seen:
            _fail(number, f"record id {record.id!r} used twice")
        if record.revision < revision:
            _fail(number, f"revision {record.revision} after {revision}")
        seen.add(record.id)
        revision = record.revision


def _checked_header(header: Header, number: int) -> Header:
    if header.format != FORMAT:
        _fail(number, f"format {header.format}, this Moorage reads {FORMAT}")
    return header


def _checked_record(record: Record, number: int, vocab_size: int | None) -> Record:
    if not record.committed:
        _fail(number, "an uncommitted record")
    if not _RECORD_ID.match(record.id):  # files are named by it
        _fail(number, f"record id {record.id[:80]!r}: must read turn_... or batch_...")
    if record.kind not in KINDS or record.status not in STATUSES:
        _fail(number, f"a record of kind {record.kind[:80]!r} and status {record.status[:80]!r}")
    if not 0 <= record.revision < MAX_REVISION:
        _fail(number, f"revision {record.revision}")
    if len(record.page_hashes) % HASH_BYTES:
        _fail(number, f"page_hashes: {len(record.page_hashes)} bytes; a hash has {HASH_BYTES}")
    try:
        record.validate()
        token_codec.count(record.input_token_ids)
        token_codec.count(record.output_token_ids)
        wire: list[dict[str, Any]] = [item_to_wire(item) for item in record.items]
        parse_items(wire, path=f"line {number}: items")
    except ValueError as error:
        raise ImportFormatError(f"line {number}: {error}", param="body") from error
    ids = token_codec.decode_ids(record.token_ids)
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        _fail(number, f"token ids must lie in [0, {vocab_size or 2**31})")
    return record


def _decode(raw: bytes, number: int) -> Line:
    if len(raw) > MAX_LINE_BYTES:
        _fail(number, f"longer than {MAX_LINE_BYTES} bytes")
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ImportFormatError(f"line {number}: {error}", param="body") from error


def _fail(number: int, message: str) -> None:
    raise ImportFormatError(f"line {number}: {message}", param="body")
