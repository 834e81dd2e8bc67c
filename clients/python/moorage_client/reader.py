# SPDX-License-Identifier: Apache-2.0
"""Where a reader of a turn's events is, whatever carries the bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

from moorage_client import calls, types
from moorage_client.calls import Call
from moorage_client.sse import SseParser

TERMINAL = ("turn.completed", "turn.incomplete", "turn.cancelled", "turn.failed")


class Position:
    """A turn's events, each exactly once, over any number of connections."""

    def __init__(
        self, session_id: str, first: Call[Any], turn_id: str | None, starting_after: int
    ) -> None:
        self.session_id = session_id
        self.turn_id = turn_id
        self.last_sequence = starting_after
        self.turn: types.Turn | None = None  # as it ended
        self._first = first
        self._parser = SseParser()

    @property
    def has_ended(self) -> bool:
        """The terminal event was read."""
        return self.turn is not None

    def next_call(self) -> Call[Any]:
        """What opens the next connection: the turn itself, or its events from here on."""
        self._parser = SseParser()
        if self.turn_id is None:
            return self._first
        return calls.turn_events(self.session_id, self.turn_id, self.last_sequence)

    def take(self, piece: bytes) -> Iterator[types.TurnEvent]:
        """Events that these bytes complete and that are new."""
        for sent in self._parser.push(piece):
            if sent.event == "stream.reconnect":
                continue  # the server stops: the stream ends here and goes on elsewhere
            event = cast(types.TurnEvent, json.loads(sent.data))
            if event["sequence_number"] <= self.last_sequence:
                continue
            self.last_sequence = event["sequence_number"]
            self.turn_id = event["turn_id"]
            if (
                event["type"] == "turn.completed"
                or event["type"] == "turn.incomplete"
                or event["type"] == "turn.cancelled"
                or event["type"] == "turn.failed"
            ):
                self.turn = event["turn"]
            yield event
