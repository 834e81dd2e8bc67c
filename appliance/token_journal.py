# SPDX-License-Identifier: Apache-2.0
"""The sampled ids of one turn in a file, so that a turn goes on where both processes died.

Ids are written before the events that are made of them: whatever a reader saw can be made again.
How the answer ended is written before its last events, as an id below zero.
(Not synced: it outlives the processes, not the machine. Where the disk takes no more, the turn goes
on without it.) Does not know: events, the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from sessions.token_codec import TOKEN_BYTES, decode_ids, encode_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What an earlier process left of an answer: int32 ids, and how it ended if it had."""

    token_ids: bytes = b""
    end: int | None = None


class TokenJournal:
    """Writing twice what is there already is harmless: each id has its place in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._is_given_up = False

    def write(self, start: int, token_ids: bytes) -> None:
        """Keep ids, int32 bytes, of which the first is output token `start`."""
        if self._is_given_up:
            return
        place, rest = start * TOKEN_BYTES, memoryview(token_ids)
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            while rest:
                num_written = os.pwrite(self._fd, rest, place)
                place, rest = place + num_written, rest[num_written:]
        except OSError as error:
            self._give_up(error)

    def write_end(self, end: int) -> None:
        """Keep how the answer ended, a number of the caller's."""
        if self._fd >= 0:
            size = os.fstat(self._fd).st_size
            self.write(size // TOKEN_BYTES, encode_ids([-1 - end]))

    def close(self) -> None:
        """Let go of the file; it stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Close and delete it."""
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _give_up(self, error: OSError) -> None:
        """Ids with a gap would be another answer: rather none at all."""
        logger.warning("sampled ids not journalled: %s", error, extra={"turn_id": self._path.stem})
        self._is_given_up = True
        self.remove()


def read_sampled(path: Path) -> SampledTokens:
    """Return what an earlier process left in a file; nothing where there is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return SampledTokens()
    data = data[: len(data) - len(data) % TOKEN_BYTES]
    values = decode_ids(data)
    num_ids = next((place for place, value in enumerate(values) if value < 0), len(values))
    end = -1 - values[num_ids] if num_ids < len(values) else None
    return SampledTokens(data[: num_ids * TOKEN_BYTES], end)
