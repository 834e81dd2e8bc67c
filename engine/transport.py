# SPDX-License-Identifier: Apache-2.0
"""The wire between API process and engine: a ROUTER in the engine, a DEALER in each client.

Both ends may die and come back: the engine binds the same Unix socket again, a DEALER reconnects
by itself. A client sends one message a frame (MessagePack); the engine sends an array of messages,
all that a step has for that client, because a frame costs it more than a message. Does not know:
what the messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from engine.api import EngineInput, EngineOutput
from engine.errors import EngineError, RequestError

MAX_MESSAGE_BYTES = 64 << 20
# Frames the engine keeps for one client that does not read: a busy step sends one per request.
ENGINE_SEND_FRAMES = 100_000
RECONNECT_MS = 50
FRAMES_IN_A_ROW = 32  # that a client takes in before anybody else on its loop has a turn
# A wake-up costs several times what a frame does: where frames come closer than the one, a client
# takes in what the other brings. No single engine steps so fast.
BUSY_GAP_S, PAUSE_S = 0.001, 0.004
# As numbers: the arithmetic of zmq's own enums costs more than a receive.
_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)

_ENCODER = msgspec.msgpack.Encoder()
_INPUT_DECODER: msgspec.msgpack.Decoder[EngineInput] = msgspec.msgpack.Decoder(EngineInput)
_OUTPUT_DECODER: msgspec.msgpack.Decoder[list[EngineOutput]] = msgspec.msgpack.Decoder(
    list[EngineOutput]
)


def encode_input(message: EngineInput) -> bytes:
    """The frame of one message to the engine."""
    return _ENCODER.encode(message)


def encode_outputs(messages: Sequence[EngineOutput]) -> bytes:
    """The frame of messages to one client, in order."""
    return _ENCODER.encode(messages)


def decode_input(frame: bytes) -> EngineInput:
    """What a client sent. Raises: msgspec.DecodeError."""
    return _INPUT_DECODER.decode(frame)


def decode_outputs(frame: bytes) -> list[EngineOutput]:
    """What the engine sent. Raises: msgspec.DecodeError."""
    return _OUTPUT_DECODER.decode(frame)


def pack_ids(token_ids: NDArray[np.int32] | list[int] | tuple[int, ...]) -> bytes:
    """Token ids as the wire carries them: little-endian int32."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_ids(raw: bytes) -> NDArray[np.int32]:
    """The ids in `raw`, int32 [n]; read-only view. Raises: RequestError if it is not whole ids."""
    if len(raw) % 4:
        raise RequestError("token_ids", f"{len(raw)} bytes", "whole int32 ids, 4 bytes each")
    return np.frombuffer(raw, dtype="<i4")


def endpoint(socket_path: str) -> str:
    """The ZMQ address of a Unix socket."""
    return f"ipc://{socket_path}"


class EngineSocket:
    """The engine's end. One thread only.

    A frame for a client that is gone, or that lets `ENGINE_SEND_FRAMES` pile up, is not sent and
    `send` says so: the client asks again with `AttachRequest` when it is back.

    Raises: EngineError where another engine listens on the path; zmq.ZMQError, OSError otherwise.
    """

    def __init__(self, socket_path: str) -> None:
        Path(socket_path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._socket_path = socket_path
        # libzmq takes a bound ipc path over without a word, so the path is guarded by a lock.
        self._lock = _lock_path(f"{socket_path}.lock")
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.SNDHWM, ENGINE_SEND_FRAMES)
        self.socket.setsockopt(zmq.RCVHWM, ENGINE_SEND_FRAMES)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self.socket.bind(endpoint(socket_path))
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            self._lock.close()
            raise

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next (peer, frame), or None when nothing waits."""
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(parts) == 2:
                return parts[0], parts[1]

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Queue a frame for `peer`; False if the peer is gone or its queue is full."""
        try:
            self.socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def close(self, *, linger_ms: int = 500) -> None:
        """Send what is queued for at most `linger_ms`, and remove the socket file."""
        self._context.destroy(linger=linger_ms)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._socket_path)
        self._lock.close()


def _lock_path(path: str) -> IO[bytes]:
    """Hold `path` until closed (or killed). Raises: EngineError if a live process holds it."""
    lock = open(path, "ab")  # noqa: SIM115  (held for the life of the socket)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise EngineError(f"another engine listens here: {path} is locked") from error
    return lock


class ClientSocket:
    """A client's end, on the running asyncio loop.

    `on_frame` is called there with each frame of the engine, in order. It is plain ZMQ watched by
    its file descriptor: `zmq.asyncio` costs a task switch and four times the CPU for each frame.
    """

    def __init__(self, socket_path: str, on_frame: Callable[[bytes], None]) -> None:
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._is_drain_due = False
        self._is_pausing = False
        self._drained_s = 0.0
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, b"c" + uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, ENGINE_SEND_FRAMES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(endpoint(socket_path))
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)

    def send(self, message: EngineInput) -> None:
        """Queue a message; it is sent when the engine is there. The queue has no bound."""
        self._socket.send(encode_input(message), _NOBLOCK)
        # The descriptor tells of changes once, and a send may be what takes the news in.
        self._drain_soon()

    def close(self) -> None:
        """Close at once; queued messages are dropped."""
        self._loop.remove_reader(self._fd)
        self._context.destroy(linger=0)

    def _drain(self) -> None:
        """Hand on what is there, but let others run after `FRAMES_IN_A_ROW`."""
        self._is_drain_due = False
        num_frames, is_empty = 0, False
        try:
            while num_frames < FRAMES_IN_A_ROW:
                if self._socket.closed or not self._has_frame():
                    is_empty = True
                    break
                num_frames += 1
                self._on_frame(self._socket.recv(_NOBLOCK))
        finally:
            if not is_empty:
                self._drain_soon()
            elif not self._socket.closed:
                self._pause_if_busy(num_frames)

    def _has_frame(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def _drain_soon(self) -> None:
        if not self._is_drain_due and not self._is_pausing:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _pause_if_busy(self, num_frames: int) -> None:
        """Where frames follow each other closely, look away a little and take several at once."""
        now_s = self._loop.time()
        if num_frames > 1 or (num_frames and now_s - self._drained_s < BUSY_GAP_S):
            self._is_pausing = True
            self._loop.remove_reader(self._fd)
            self._loop.call_later(PAUSE_S, self._look_again)
        self._drained_s = now_s

    def _look_again(self) -> None:
        self._is_pausing = False
        if not self._socket.closed:
            self._loop.add_reader(self._fd, self._drain)
            self._drain()
