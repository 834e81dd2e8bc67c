# SPDX-License-Identifier: Apache-2.0
"""Histories kept in memory, so that a turn does not read its whole past from the store.

Does not know: stores. An entry is valid for the spans it was read for; a log only grows, so an
entry with fewer records of the same log is a valid beginning.

Range ownership of a hit, in records: [0, cached) from memory, [cached, session.num_records) from
the store. Used by one event loop; not locked.
"""

from __future__ import annotations

from collections import OrderedDict

from sessions.session import Session
from sessions.turn_log import Record, TurnLog

# What a record takes beside ids and text: objects, ids, parameters (tracemalloc, CPython 3.11,
# turns of a tool result, a message and a call).
_RECORD_BYTES = 2_400


class _Entry:
    def __init__(self, session: Session, log: TurnLog) -> None:
        self.log_id = session.log_id
        self.log_len = session.log_len
        self.log = log
        # The joined ids, the records' own copies of them, and about as many bytes of text.
        self.num_bytes = 3 * len(log.token_ids) + _RECORD_BYTES * len(log.records)


class LogCache:
    """Least recently used histories, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_bytes = 0

    def get(self, session: Session) -> TurnLog | None:
        """The longest cached beginning of this session's history, or None."""
        entry = self._entries.get(session.id)
        if entry is None:
            return None
        if entry.log_id != session.log_id:  # whatever changes the lineage starts a new log
            self.drop(session.id)
            return None
        if entry.log_len > session.log_len:
            return None  # asked about the past: correct, but not what the entry is
        self._entries.move_to_end(session.id)
        return entry.log

    def put(self, session: Session, log: TurnLog) -> None:
        """Keep `log`, the whole history of `session`."""
        self.drop(session.id)
        entry = _Entry(session, log)
        if entry.num_bytes > self._max_bytes:
            return
        self._entries[session.id] = entry
        self._num_bytes += entry.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def extend(self, session: Session, record: Record) -> None:
        """Note that `record` became the last of `session`, if what came before it is here."""
        log = self.get(session)
        if log is not None and len(log.records) == session.num_records - 1:
            self.put(session, log.extended(record))

    def drop(self, session_id: str) -> None:
        """Forget a session's history, if it is here."""
        entry = self._entries.pop(session_id, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes
