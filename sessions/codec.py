# SPDX-License-Identifier: Apache-2.0
"""Sessions, records and pending turns as bytes at rest (msgpack with sums; token ids packed apart).

Does not know: tables or keys. A field that is added with a default reads back from old bytes; one
that is renamed or removed needs a migration of the store's schema.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from sessions import stored_sums, token_codec
from sessions.errors import StoreCorrupt
from sessions.session import Session
from sessions.settings import SessionSettings
from sessions.turn_log import PendingTurn, Record

logger = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_session_decoder = msgspec.msgpack.Decoder(Session)
_settings_decoder = msgspec.msgpack.Decoder(SessionSettings)
_record_decoder = msgspec.msgpack.Decoder(Record)
_pending_decoder = msgspec.msgpack.Decoder(PendingTurn)
_NO_SETTINGS = SessionSettings()


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """`tokens`: packed ids of input and output together; `input_len` of them are the input's.

    The sum in `body` covers all three.
    """

    tokens: bytes
    input_len: int
    body: bytes


def encode_session(session: Session) -> bytes:
    """The session without its settings: those are large and change rarely."""
    return stored_sums.seal(_encoder.encode(replace(session, settings=_NO_SETTINGS)))


def encode_settings(settings: SessionSettings) -> bytes:
    return stored_sums.seal(_encoder.encode(settings))


def decode_session(body: bytes, settings: bytes) -> Session:
    """Raises `StoreCorrupt`."""
    try:
        session = _session_decoder.decode(stored_sums.unseal(body))
        decoded = _settings_decoder.decode(stored_sums.unseal(settings))
        return replace(session, settings=decoded)
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(f"a stored session does not decode: {error}") from error


def decode_sessions(rows: Iterable[tuple[bytes, bytes]]) -> tuple[Session, ...]:
    """Those that decode: one damaged session must not hide the others from lists and sweeps."""
    sessions = []
    for row in rows:
        try:
            sessions.append(decode_session(*row))
        except StoreCorrupt as error:
            logger.error("left out of a list: %s", error)
    return tuple(sessions)


def encode_record(record: Record) -> StoredRecord:
    body = _encoder.encode(replace(record, input_token_ids=b"", output_token_ids=b""))
    input_len = token_codec.count(record.input_token_ids)
    tokens = token_codec.pack(record.token_ids)
    return StoredRecord(tokens, input_len, stored_sums.seal(body, tokens, _number(input_len)))


def decode_record(stored: StoredRecord) -> Record:
    """Raises `StoreCorrupt`."""
    try:
        body = stored_sums.unseal(stored.body, stored.tokens, _number(stored.input_len))
        record = _record_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(f"a stored record does not decode: {error}") from error
    token_ids = token_codec.unpack(stored.tokens)
    input_end = stored.input_len * token_codec.TOKEN_BYTES
    return replace(
        record, input_token_ids=token_ids[:input_end], output_token_ids=token_ids[input_end:]
    )


def encode_pending(turn: PendingTurn) -> bytes:
    return stored_sums.seal(_encoder.encode(turn))


def decode_pending(body: bytes) -> PendingTurn:
    """Raises `StoreCorrupt`."""
    try:
        return _pending_decoder.decode(stored_sums.unseal(body))
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(f"a stored pending turn does not decode: {error}") from error


def decode_pendings(bodies: Iterable[bytes]) -> tuple[PendingTurn, ...]:
    """Those that decode: one damaged turn must not keep a process from taking up the others."""
    turns = []
    for body in bodies:
        try:
            turns.append(decode_pending(body))
        except StoreCorrupt as error:
            logger.error("left out of the turns to take up: %s", error)
    return tuple(turns)


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)
