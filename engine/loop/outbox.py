# SPDX-License-Identifier: Apache-2.0
"""Who hears what: the peers of the engine's socket, and the messages of a request to its readers.

A peer that is gone, or so far behind that its queue is full, is told nothing until it says
something; it asks for what it missed with `AttachRequest`. Does not know: steps, the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from engine import api
from engine.loop.requests import Request
from engine.transport import encode_outputs

logger = logging.getLogger(__name__)

# A client pings several times a second; one that is silent for so long is gone.
PEER_SILENCE_MS = 60_000


class FrameSink(Protocol):
    """The sending half of `engine.transport.EngineSocket`."""

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Queue a frame; False if the peer cannot take it."""
        ...


class Outbox:
    """Collects what peers are told until `flush`, and keeps the list of peers."""

    def __init__(self, sink: FrameSink, hello: api.EngineHello) -> None:
        self._sink = sink
        self._hello = hello
        self._last_heard_ms: dict[bytes, int] = {}
        self._kv_peers: dict[bytes, None] = {}
        self._pending: dict[bytes, list[api.EngineOutput]] = {}

    def heard_of(self, peer: bytes, now_ms: int) -> None:
        """Note a message of `peer`; one that is new is greeted."""
        if peer not in self._last_heard_ms:
            self.reply(peer, self._hello)
        self._last_heard_ms[peer] = now_ms

    def forget_silent(self, now_ms: int) -> None:
        """Drop peers that have not said anything for long."""
        for peer, heard_ms in list(self._last_heard_ms.items()):
            if now_ms - heard_ms > PEER_SILENCE_MS:
                self._forget(peer)

    def reply(self, peer: bytes, message: api.EngineOutput) -> None:
        """Tell one peer."""
        self._pending.setdefault(peer, []).append(message)

    def publish(self, request: Request, message: api.EngineOutput) -> None:
        """Tell every reader of `request`."""
        self._tell(request.subscribers, message)

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
        """Tell of cache changes whoever subscribed."""
        self._tell(self._kv_peers, batch)

    def flush(self) -> None:
        """Send everything, one frame a peer."""
        if not self._pending:
            return
        for peer, messages in self._pending.items():
            if not self._sink.send(peer, encode_outputs(messages)):
                self._forget(peer)
        self._pending = {}

    def _tell(self, peers: Iterable[bytes], message: api.EngineOutput) -> None:
        for peer in peers:
            if peer in self._last_heard_ms:
                self._pending.setdefault(peer, []).append(message)

    def _forget(self, peer: bytes) -> None:
        # Should it come back, the greeting makes it subscribe again, and it asks for what of its
        # requests it has missed.
        if self._last_heard_ms.pop(peer, None) is not None:
            logger.info("peer %s is gone", peer.hex())
        self._kv_peers.pop(peer, None)
