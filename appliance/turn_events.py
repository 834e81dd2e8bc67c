# SPDX-License-Identifier: Apache-2.0
"""The numbered events of a turn: written once, replayed to any number of readers.

Each event is framed for SSE when it is emitted and appended to a journal file, so a restarted
API process hands out the very bytes, under the very numbers, that readers saw before the crash. How
an answer is cut into deltas is chance (what came together is one); what they spell is not.
(The journal is not synced: it outlives the process, not the machine. Where the disk takes no more,
a turn goes on without it: its readers lose nothing, only a crash would.) Does not know: HTTP, what
the events mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from appliance.token_journal import SampledTokens, TokenJournal, read_sampled

logger = logging.getLogger(__name__)

CONTENT_PREFIX = "response."
DELTA_SUFFIX = ".delta"
RECONNECT_MS = 1000
EVENTS_SUFFIX, TOKENS_SUFFIX = ".events", ".ids"
MEMORY_S = 15.0  # how long an ended turn's frames stay in memory
TERMINAL = ("turn.completed", "turn.incomplete", "turn.cancelled", "turn.failed")
ONCE_PER_TURN = ("turn.created", "turn.queued", "turn.in_progress")
_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class TurnEvents:
    """One turn's events. Sequence numbers start at 1; event n is `frames[n - 1]`."""

    session_id: str
    turn_id: str
    frames: list[bytes] = field(default_factory=list)
    is_closed: bool = False
    closed_at_s: float = 0.0
    num_readers: int = 0
    is_detached: bool = False  # this process lets go of a turn that goes on elsewhere
    on_readers_gone: Callable[[], None] | None = None
    sampled: SampledTokens = SampledTokens()  # what an earlier process had of the answer
    tokens: TokenJournal | None = None
    _journal_fd: int = -1
    _journal: Path | None = None  # None: there is none, or it was given up
    # What a resumed turn will emit again: so many content events that are no deltas, and of each
    # item's deltas so many characters (they are not cut as they were).
    _num_to_skip: int = 0
    _chars_to_skip: dict[str, int] = field(default_factory=dict)
    _seen_types: frozenset[str] = frozenset()  # before the crash this turn is taken up after
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def has_terminal(self) -> bool:
        """The last event is one that ends a turn."""
        return bool(self.frames) and _event_type(self.frames[-1]) in TERMINAL

    @property
    def is_caught_up(self) -> bool:
        """All that readers saw of the answer before a restart has been made again."""
        return not self._num_to_skip and not self._chars_to_skip

    def told(self, event_type: str) -> list[dict[str, Any]]:
        """The bodies of all events of a type so far."""
        return [decode_frame(frame) for frame in self.frames if _event_type(frame) == event_type]

    def emit(self, event_type: str, fields: Mapping[str, Any]) -> None:
        """Append one event and wake the readers; what a resumed turn repeats is dropped."""
        self.emit_all(((event_type, fields),))

    def emit_all(self, events: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Append events and wake the readers once."""
        if self.is_closed or self.is_detached:
            return
        frames = self.frames
        num_old = len(frames)
        for event_type, fields in events:
            new = self._unheard(event_type, fields)
            if new is not None:
                number = len(frames) + 1
                frames.append(_frame(event_type, number, self.session_id, self.turn_id, new))
        if len(frames) > num_old:
            self._write(b"".join(frames[num_old:]))
            self._wake()

    def close(self) -> None:
        """Mark the turn as ended: readers return after the last event."""
        if self.is_closed:
            return
        self.is_closed = True
        self.closed_at_s = time.monotonic()
        self._close_journal()
        if self.tokens is not None:
            self.tokens.remove()
        self._wake()

    @property
    def is_journalled(self) -> bool:
        """Every event so far is in the journal."""
        return self._journal is not None

    async def read(self, starting_after: int) -> AsyncIterator[bytes]:
        """Yield the frames of every event numbered above `starting_after`, then live ones."""
        index = max(starting_after, 0)
        self.num_readers += 1
        try:
            while True:
                if index < len(self.frames):
                    chunk = b"".join(self.frames[index:])
                    index = len(self.frames)
                    yield chunk
                elif self.is_detached:
                    yield _reconnect_frame(self.session_id, self.turn_id, index)
                    return
                elif self.is_closed:
                    if index > len(self.frames) > 0:  # no reader misses how the turn ended
                        yield self.frames[-1]
                    return
                else:
                    await self._growth()
        finally:
            self._let_go()

    def note_tokens(self, start: int, token_ids: bytes) -> None:
        """Keep sampled ids (int32, from output token `start` on) before their events are made."""
        if self.tokens is not None:
            self.tokens.write(start, token_ids)

    def note_end(self, end: int) -> None:
        """Keep how the answer ended before its last events are made."""
        if self.tokens is not None:
            self.tokens.write_end(end)

    def detach(self) -> None:
        """Send the readers away: the turn goes on, but this process will not see its end.

        Each is told where to come back from, and its stream ends properly.
        """
        if not self.is_closed:
            self.is_detached = True
            self.on_readers_gone = None
            self._close_journal()
            if self.tokens is not None:
                self.tokens.close()
            self._wake()

    async def read_to_end(self) -> None:
        """Wait for the end of the turn as one of its readers, who wants no event but the last."""
        self.num_readers += 1
        try:
            await self.wait_closed()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self.num_readers -= 1
        if not self.num_readers and not self.is_closed and self.on_readers_gone is not None:
            self.on_readers_gone()

    async def wait_closed(self) -> None:
        """Wait for the end of the turn, or of this process' part in it, without being a reader."""
        while not self.is_closed and not self.is_detached:
            await self._growth()

    def _unheard(self, event_type: str, fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What of an event no reader of an earlier process was told; None: nothing."""
        if not event_type.startswith(CONTENT_PREFIX):
            is_known = event_type in ONCE_PER_TURN and event_type in self._seen_types
            return None if is_known else fields
        if event_type.endswith(DELTA_SUFFIX):
            return self._unheard_delta(fields) if self._chars_to_skip else fields
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        return fields

    def _unheard_delta(self, fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        delta = str(fields["delta"])
        num_told = self._chars_to_skip.pop(fields["item_id"], 0)
        if num_told > len(delta):
            self._chars_to_skip[fields["item_id"]] = num_told - len(delta)
        return {**fields, "delta": delta[num_told:]} if num_told < len(delta) else None

    def _skip_told(self) -> None:
        """Skip what readers of an earlier process have of the answer."""
        for frame in self.frames:
            event_type = _event_type(frame)
            if event_type.startswith(CONTENT_PREFIX) and event_type.endswith(DELTA_SUFFIX):
                body = decode_frame(frame)
                item_id, num_chars = body["item_id"], len(body["delta"])
                self._chars_to_skip[item_id] = self._chars_to_skip.get(item_id, 0) + num_chars
            elif event_type.startswith(CONTENT_PREFIX):
                self._num_to_skip += 1

    def _open_journal(self, path: Path, num_bytes: int) -> None:
        """Go on behind the first `num_bytes` of a journal (a crash may have cut its last line)."""
        self._journal = path
        try:
            self._journal_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.ftruncate(self._journal_fd, num_bytes)
        except OSError as error:
            self._give_up_journal(error)

    def _write(self, frame: bytes) -> None:
        if self._journal_fd < 0:
            return
        rest = memoryview(frame)
        try:
            while rest:
                rest = rest[os.write(self._journal_fd, rest) :]
        except OSError as error:
            self._give_up_journal(error)

    def _give_up_journal(self, error: OSError) -> None:
        """A journal with a gap would replay a turn that never was: rather none at all."""
        logger.warning("journal given up: %s", error, extra={"turn_id": self.turn_id})
        self._close_journal()
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.unlink()
        self._journal = None

    def _close_journal(self) -> None:
        if self._journal_fd >= 0:
            os.close(self._journal_fd)
            self._journal_fd = -1

    def _growth(self) -> asyncio.Future[None]:
        """What is done when there is more."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():  # a reader that is gone
                waiter.set_result(None)


def _frame(
    event_type: str,
    sequence_number: int,
    session_id: str,
    turn_id: str,
    fields: Mapping[str, Any],
) -> bytes:
    body = {
        "type": event_type,
        "sequence_number": sequence_number,
        "session_id": session_id,
        "turn_id": turn_id,
        **fields,
    }
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (
        sequence_number,
        event_type.encode(),
        _encoder.encode(body),
    )


def _reconnect_frame(session_id: str, turn_id: str, num_read: int) -> bytes:
    """Return the frame that ends a stream whose turn has not ended.

    It has no number of its own: it is no event of the turn, and the next process does not repeat
    it. `retry:` makes EventSource clients come back by themselves.
    """
    body = {
        "type": "stream.reconnect",
        "session_id": session_id,
        "turn_id": turn_id,
        "starting_after": num_read,
        "retry_after_ms": RECONNECT_MS,
    }
    return b"event: stream.reconnect\nretry: %d\ndata: %s\n\n" % (
        RECONNECT_MS,
        _encoder.encode(body),
    )


def terminal_frame(event_type: str, turn: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
    """Return the terminal event of a turn whose other events are gone."""
    return _frame(event_type, 1, turn["session_id"], turn["id"], fields)


def decode_frame(frame: bytes) -> dict[str, Any]:
    """Return the JSON body of one frame."""
    data = frame.split(b"\ndata: ", 1)[1]
    return dict(msgspec.json.decode(data))


@dataclass(slots=True)
class EventJournals:
    """All turns whose events can be replayed, and their files in one directory."""

    directory: Path
    replay_s: float
    _turns: dict[str, TurnEvents] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    def create(self, session_id: str, turn_id: str) -> TurnEvents:
        """Start the events of a new turn."""
        events = TurnEvents(session_id, turn_id)
        events._open_journal(self._path(turn_id), 0)
        events.tokens = TokenJournal(self._tokens_path(turn_id))
        self._turns[turn_id] = events
        return events

    def reopen(self, session_id: str, turn_id: str) -> TurnEvents:
        """Take up the events of a turn that an earlier API process left unfinished."""
        frames = self._read_frames(turn_id)
        events = TurnEvents(session_id, turn_id, frames)
        events._seen_types = frozenset(map(_event_type, frames))
        events._skip_told()
        events._open_journal(self._path(turn_id), sum(map(len, frames)))
        events.sampled = read_sampled(self._tokens_path(turn_id))
        events.tokens = TokenJournal(self._tokens_path(turn_id))
        self._turns[turn_id] = events
        return events

    def find(self, session_id: str, turn_id: str) -> TurnEvents | None:
        """Return a turn's events while they are kept, from memory or from its journal."""
        events = self._turns.get(turn_id)
        if events is not None:
            return events if events.session_id == session_id else None
        path = self._path(turn_id)
        try:
            age_s = time.time() - path.stat().st_mtime
        except (OSError, ValueError):  # none there, or a name no file can have
            return None
        if age_s > self.replay_s:
            return None
        frames = self._read_frames(turn_id)
        if not frames or decode_frame(frames[0])["session_id"] != session_id:
            return None
        events = TurnEvents(session_id, turn_id, frames, _journal=path)
        events.close()
        self._turns[turn_id] = events
        return events

    def sweep(self) -> None:
        """Forget turns that ended: soon in memory, after the replay window their files too."""
        now_s = time.monotonic()
        for turn_id, events in list(self._turns.items()):
            if not events.is_closed:
                continue
            age_s = now_s - events.closed_at_s
            if age_s > self.replay_s:
                self.drop(turn_id)
            elif age_s > MEMORY_S and not events.num_readers and events.is_journalled:
                del self._turns[turn_id]  # `find` reads it back from its file

    def sweep_files(self) -> None:
        """Delete journals left by earlier processes that are past the replay window."""
        for path in self.directory.iterdir():
            if path.suffix not in (EVENTS_SUFFIX, TOKENS_SUFFIX) or path.stem in self._turns:
                continue
            if time.time() - path.stat().st_mtime > self.replay_s:
                path.unlink(missing_ok=True)

    def drop_of(self, session_id: str, turn_id: str) -> None:
        """Forget a turn's events now if they are this session's.

        A fork has its parent's turns in its history, and an imported copy those of its original.
        """
        if self.find(session_id, turn_id) is not None:
            self.drop(turn_id)

    def drop(self, turn_id: str) -> None:
        """Forget one turn's events now (its session was deleted, or they expired)."""
        events = self._turns.pop(turn_id, None)
        if events is not None:
            events.close()
        self._path(turn_id).unlink(missing_ok=True)
        self._tokens_path(turn_id).unlink(missing_ok=True)

    def _path(self, turn_id: str) -> Path:
        return self.directory / f"{turn_id}{EVENTS_SUFFIX}"

    def _tokens_path(self, turn_id: str) -> Path:
        return self.directory / f"{turn_id}{TOKENS_SUFFIX}"

    def _read_frames(self, turn_id: str) -> list[bytes]:
        try:
            data = self._path(turn_id).read_bytes()
        except FileNotFoundError:
            return []
        frames = data.split(b"\n\n")
        return [frame + b"\n\n" for frame in frames[:-1]]


def _event_type(frame: bytes) -> str:
    return frame.split(b"\nevent: ", 1)[1].split(b"\n", 1)[0].decode()
