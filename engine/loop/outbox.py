# SPDX-License-Identifier: Apache-2.0
"""Who hears what: the peers of the engine's socket, and the messages of a request to its readers.

A peer that is gone, or so far behind that its queue is full, loses its subscriptions; it asks
again with `AttachRequest`. Does not know: steps, the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

import msgspec

from engine import api
from engine.loop.requests import Request
from engine.transport import encode

logger = logging.getLogger(__name__)

# A client pings several times a second; one that is silent for so long is gone.
PEER_SILENCE_MS = 60_000


class FrameSink(Protocol):
    """The sending half of `engine.transport.EngineSocket`."""

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Queue a frame; False if the peer cannot take it."""
        ...


class Outbox:
    """Sends, and keeps the list of peers."""

    def __init__(self, sink: FrameSink, hello: api.EngineHello) -> None:
        self._sink = sink
        self._hello = encode(hello)
        self._last_heard_ms: dict[bytes, int] = {}
        self._kv_peers: dict[bytes, None] = {}

    def heard_of(self, peer: bytes, now_ms: int) -> None:
        """Note a message of `peer`; one that is new is greeted."""
        if peer not in self._last_heard_ms:
            self._sink.send(peer, self._hello)
        self._last_heard_ms[peer] = now_ms

    def forget_silent(self, now_ms: int) -> None:
        """Drop peers that have not said anything for long."""
        for peer, heard_ms in list(self._last_heard_ms.items()):
            if now_ms - heard_ms > PEER_SILENCE_MS:
                self._forget(peer)

    def reply(self, peer: bytes, message: msgspec.Struct) -> None:
        """Send one message to one peer."""
        if not self._sink.send(peer, encode(message)):
            self._forget(peer)

    def publish(self, request: Request, message: msgspec.Struct) -> None:
        """Send a message to every reader of `request`."""
        if not request.subscribers:
            return
        frame = encode(message)
        for peer in self._unreached(request.subscribers, frame):
            del request.subscribers[peer]

    def subscribe_kv(self, peer: bytes, enabled: bool) -> None:
        """Send KV events to `peer`, or stop."""
        if enabled:
            self._kv_peers[peer] = None
        else:
            self._kv_peers.pop(peer, None)

    @property
    def wants_kv_events(self) -> bool:
        """Somebody listens."""
        return bool(self._kv_peers)

    def publish_kv(self, batch: api.KvEventBatch) -> None:
        """Send cache changes to whoever subscribed."""
        for peer in self._unreached(self._kv_peers, encode(batch)):
            self._forget(peer)

    def _unreached(self, peers: Iterable[bytes], frame: bytes) -> list[bytes]:
        return [peer for peer in peers if not self._sink.send(peer, frame)]

    def _forget(self, peer: bytes) -> None:
        # Should it come back, the greeting makes it subscribe again.
        self._last_heard_ms.pop(peer, None)
        self._kv_peers.pop(peer, None)
        logger.info("peer %s is gone", peer.hex())
