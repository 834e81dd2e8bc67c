# SPDX-License-Identifier: Apache-2.0
"""EngineClient: the API process's side of the engine, many requests over one socket.

It hides the death of an engine process: when another instance answers, every request in flight is
sent again with what it had produced (`resume_token_ids`), and its stream goes on where it was. One
that an engine on its way out refuses waits for the next in the same way. A slow reader costs nobody
anything: what it has not read is kept once, as ids, never as a queue of messages. Does not
know: sessions, HTTP, text, torch.

    EngineClient     the public face; answers of the engine are routed to
    OutputStream     what one request has produced and how far its reader is (client_streams.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import msgspec

from engine import api
from engine.client_streams import KvEventQueue, OutputStream, Pace, StreamItem
from engine.errors import EngineUnavailableError, QueryRefusedError
from engine.transport import ClientSocket, decode_outputs, pack_ids

logger = logging.getLogger(__name__)

Reply = (
    api.GrammarCompiled
    | api.StatsReply
    | api.TreeReply
    | api.PrefixReply
    | api.LeaseReply
    | api.HintReply
    | api.MoveReply
    | api.TiersReply
    | api.DrainReply
    | api.VerifyReply
)
ReplyT = TypeVar("ReplyT", bound=Reply)

MISSED_PINGS_UNREADY = 4
ABORT_PATIENCE_S = 3.0  # how long a request that shall stop waits for a silent engine to say so
MAX_LATE_S = 2.0  # that this process' own loop may be before it has stood still


class EngineClient:
    """Talk to the engine behind a Unix socket, whichever process that is at the moment.

    Everything runs on the asyncio loop that called `start`. Limits: `max_resubmits` lives a
    request may consume before it ends in `engine_restarted`; `dead_after_s` without an engine
    before requests end in `engine_unavailable`.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        ping_interval_s: float = 0.25,
        dead_after_s: float = 60.0,
        reconcile_s: float = 5.0,
        max_resubmits: int = 3,
    ) -> None:
        self._socket_path = socket_path
        self._ping_interval_s = ping_interval_s
        self.dead_after_s = dead_after_s
        self._reconcile_s = reconcile_s
        self._max_resubmits = max_resubmits
        self._socket: ClientSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._hello: api.EngineHello | None = None
        self._hello_event = asyncio.Event()
        self._last_heard_s = 0.0
        self._streams: dict[str, OutputStream] = {}
        self._pace = Pace()
        self._queries: dict[str, tuple[api.EngineInput, asyncio.Future[Any]]] = {}
        self._query_ids = itertools.count()
        self._restart_callbacks: list[Callable[[api.EngineHello], None]] = []
        self._lease_callbacks: list[Callable[[api.LeaseChanged], None]] = []
        self._kv_queues: list[KvEventQueue] = []

    # Life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the socket; returns at once, whether or not an engine is there yet."""
        if self._socket is not None:
            return
        self._socket = ClientSocket(self._socket_path, self._read)
        self._last_heard_s = time.monotonic()
        self._tasks = [asyncio.create_task(self._watch_forever(), name="engine-client-watch")]

    async def close(self) -> None:
        """Close the socket; open streams end with an error. Requests go on in the engine."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._fail_everything("client_closed", "the engine client was closed")
        for queue in self._kv_queues:
            queue.close()

    @property
    def is_ready(self) -> bool:
        """An engine has introduced itself and answers pings."""
        silence_s = time.monotonic() - self._last_heard_s
        limit_s = max(MISSED_PINGS_UNREADY * self._ping_interval_s, 1.0)
        return self._hello is not None and silence_s < limit_s

    @property
    def hello(self) -> api.EngineHello | None:
        """What the engine last said of itself; None before the first contact."""
        return self._hello

    async def wait_ready(self, timeout_s: float) -> api.EngineHello:
        """Wait for an engine. Raises: EngineUnavailableError."""
        try:
            await asyncio.wait_for(self._hello_event.wait(), timeout_s)
        except TimeoutError:
            raise EngineUnavailableError(
                f"no engine answered on {self._socket_path} within {timeout_s:g} s"
            ) from None
        assert self._hello is not None
        return self._hello

    def on_restart(self, callback: Callable[[api.EngineHello], None]) -> None:
        """Call `callback` whenever another engine instance takes over (not for the first)."""
        self._restart_callbacks.append(callback)

    # Requests -----------------------------------------------------------------------------

    def generate(
        self, request: api.GenerateRequest, *, abort_on_close: bool = True
    ) -> AsyncGenerator[StreamItem, None]:
        """Run a request and yield what it produces, ending with `Finished`.

        `Tokens` items are contiguous and never repeat; several steps may arrive as one item. A
        sampled request without a seed is given one here, so that a second life draws the same
        tokens. Closing the iterator early aborts the request unless `abort_on_close` is False; a
        reader that may leave early holds it in `contextlib.aclosing`.

        Raises: ValueError if this request_id is already in flight here.
        """
        if request.sampling.seed is None:
            seeded = msgspec.structs.replace(request.sampling, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, sampling=seeded)
        stream = OutputStream(
            request.request_id,
            self._pace,
            request=request,
            base=len(request.resume_token_ids) // 4,
        )
        return self._run_stream(stream, request, abort_on_close)

    def attach(
        self,
        request_id: str,
        from_output: int = 0,
        *,
        abort_on_close: bool = True,
    ) -> AsyncGenerator[StreamItem, None]:
        """Go on reading a request that another client started, from output token `from_output`.

        Ends with `Finished{error, unknown_request}` when the engine has no such request.
        """
        stream = OutputStream(request_id, self._pace, request=None, base=from_output)
        message = api.AttachRequest(request_id=request_id, from_output=from_output)
        return self._run_stream(stream, message, abort_on_close)

    @property
    def num_streams(self) -> int:
        """Requests that are being read."""
        return len(self._streams)

    def end_streams(self, code: str, text: str) -> None:
        """Stop every request that is being read here; its reader gets an error with this code."""
        for stream in list(self._streams.values()):
            stream.fail(code, text)
            self._send(api.AbortRequest(request_id=stream.request_id))

    async def abort(self, request_id: str) -> None:
        """Ask the engine to stop a request; its stream ends with `Finished{aborted}`.

        It ends so, with what has come, even where no engine is there to be asked.
        """
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.is_to_end = True
            if stream.awaits_engine:
                stream.end_aborted()
        self._send(api.AbortRequest(request_id=request_id))

    # Questions ----------------------------------------------------------------------------

    async def compile(
        self, grammar: api.GrammarSpec, *, budget_ms: int = 2000
    ) -> api.GrammarCompiled:
        """Compile a grammar ahead of its use. Errors are in the reply's `error_code`."""
        query_id = self._next_query_id()
        message = api.CompileGrammar(compile_id=query_id, grammar=grammar, budget_ms=budget_ms)
        timeout_s = budget_ms / 1000 + self.dead_after_s
        return await self._ask(api.GrammarCompiled, query_id, message, timeout_s)

    async def stats(self, *, timeout_s: float = 10.0) -> dict[str, float]:
        """Counters and gauges of the engine. Raises: EngineUnavailableError."""
        query_id = self._next_query_id()
        message = api.QueryStats(query_id=query_id)
        return (await self._ask(api.StatsReply, query_id, message, timeout_s)).stats

    async def tree(self, max_nodes: int = 256, *, timeout_s: float = 10.0) -> api.TreeReply:
        """A bounded snapshot of the radix tree. Raises: EngineUnavailableError."""
        query_id = self._next_query_id()
        message = api.QueryTree(query_id=query_id, max_nodes=max_nodes)
        return await self._ask(api.TreeReply, query_id, message, timeout_s)

    async def query_prefix(
        self, token_ids: bytes | list[int], *, salt: str = "", timeout_s: float = 10.0
    ) -> api.CacheHit:
        """How much of a prefix each tier holds. Raises: EngineUnavailableError."""
        query_id = self._next_query_id()
        raw = token_ids if isinstance(token_ids, bytes) else pack_ids(token_ids)
        message = api.QueryPrefix(query_id=query_id, token_ids=raw, salt=salt)
        return (await self._ask(api.PrefixReply, query_id, message, timeout_s)).cache

    async def drop_prefix(
        self, token_ids: bytes | list[int], keep_tokens: int = 0, *, salt: str = ""
    ) -> None:
        """Let go of a prefix's KV from `keep_tokens` on, where nobody else shares it."""
        raw = token_ids if isinstance(token_ids, bytes) else pack_ids(token_ids)
        self._send(api.DropPrefix(token_ids=raw, keep_tokens=keep_tokens, salt=salt))

    async def lease(
        self,
        lease_id: str,
        token_ids: bytes,
        ttl_ms: int,
        *,
        tenant: str = "default",
        salt: str = "",
        tier: str = "l1",
        timeout_s: float = 10.0,
    ) -> api.LeaseReply:
        """Ask for a lease, or renew it. Raises: EngineUnavailableError.

        A new engine knows none of the old one's leases: `on_restart` is the time to ask again.
        """
        query_id = self._next_query_id()
        message = api.LeasePrefix(
            query_id=query_id,
            lease_id=lease_id,
            token_ids=token_ids,
            ttl_ms=ttl_ms,
            tenant=tenant,
            salt=salt,
            tier=tier,
        )
        return await self._ask(api.LeaseReply, query_id, message, timeout_s)

    async def release_lease(self, lease_id: str) -> None:
        """End a lease; nothing happens if there is none of that id."""
        self._send(api.ReleaseLease(lease_id=lease_id))

    def on_lease_change(self, callback: Callable[[api.LeaseChanged], None]) -> None:
        """Call `callback` when a lease that this client asked for is granted, cut or over."""
        self._lease_callbacks.append(callback)

    async def hint_prefix(
        self,
        token_ids: bytes,
        expected_return: float,
        *,
        salt: str = "",
        hold_ms: tuple[int, int, int] = (0, 0, 0),
        timeout_s: float = 10.0,
    ) -> int:
        """Weigh a prefix for eviction; how many of its tokens are cached.

        Args:
            hold_ms: how long it should stay in L1, in L2 and in L3; 0: unsaid.

        Raises: EngineUnavailableError.
        """
        query_id = self._next_query_id()
        message = api.HintPrefix(
            query_id=query_id,
            token_ids=token_ids,
            expected_return=expected_return,
            salt=salt,
            hold_l1_ms=hold_ms[0],
            hold_l2_ms=hold_ms[1],
            hold_l3_ms=hold_ms[2],
        )
        return (await self._ask(api.HintReply, query_id, message, timeout_s)).num_tokens

    async def move_prefix(
        self, token_ids: bytes, tier: str, *, salt: str = "", timeout_s: float = 35.0
    ) -> api.MoveReply:
        """Bring a prefix to a tier (l1 | l2 | l3 | none); returns when it is there, when it came no
        nearer for 3 s, or after 30 s.

        Raises: EngineUnavailableError.
        """
        query_id = self._next_query_id()
        message = api.MovePrefix(query_id=query_id, token_ids=token_ids, tier=tier, salt=salt)
        return await self._ask(api.MoveReply, query_id, message, timeout_s)

    async def tiers(self, *, timeout_s: float = 10.0) -> tuple[api.TierStatus, ...]:
        """State, size and counters of each tier. Raises: EngineUnavailableError."""
        query_id = self._next_query_id()
        message = api.QueryTiers(query_id=query_id)
        return (await self._ask(api.TiersReply, query_id, message, timeout_s)).tiers

    async def drain_tiers(self, *, timeout_s: float = 10.0) -> api.DrainReply:
        """Finish the write-backs and stores under way. Raises: EngineUnavailableError."""
        query_id = self._next_query_id()
        message = api.DrainTiers(query_id=query_id, timeout_ms=int(timeout_s * 1000))
        return await self._ask(api.DrainReply, query_id, message, timeout_s + 5.0)

    async def verify_tiers(
        self, *, max_pages: int = 4096, timeout_s: float = 60.0
    ) -> api.VerifyReply:
        """Read pages of the lower tiers back and check them. Raises: EngineUnavailableError."""
        query_id = self._next_query_id()
        message = api.VerifyTiers(query_id=query_id, max_pages=max_pages)
        return await self._ask(api.VerifyReply, query_id, message, timeout_s)

    async def kv_events(self) -> AsyncGenerator[api.KvEventBatch, None]:
        """Cache changes from now on. An event of kind `reset` says that earlier ones are void."""
        queue = KvEventQueue()
        self._kv_queues.append(queue)
        try:
            self._send(api.SubscribeKvEvents(enabled=True))
            async for batch in queue:
                yield batch
        finally:
            self._kv_queues.remove(queue)
            if not self._kv_queues and self._socket is not None:
                self._send(api.SubscribeKvEvents(enabled=False))

    # Inside -------------------------------------------------------------------------------

    async def _run_stream(
        self, stream: OutputStream, first: api.EngineInput, abort_on_close: bool
    ) -> AsyncGenerator[StreamItem, None]:
        if stream.request_id in self._streams:
            raise ValueError(f"request_id = {stream.request_id!r}: already in flight")
        self._streams[stream.request_id] = stream
        try:
            stream.touch()
            self._send(first)
            while True:
                for item in await stream.news():
                    if isinstance(item, api.Finished):
                        self._forget(stream)  # a reader may stop here and never come back
                        yield item
                        return
                    yield item
        finally:
            self._forget(stream)
            if not stream.is_finished and abort_on_close and self._socket is not None:
                self._send(api.AbortRequest(request_id=stream.request_id))

    def _forget(self, stream: OutputStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]

    def _send(self, message: api.EngineInput) -> None:
        if self._socket is None:
            raise EngineUnavailableError("the engine client is not started, or was closed")
        self._socket.send(message)

    def _next_query_id(self) -> str:
        return f"q{next(self._query_ids)}"

    async def _ask(
        self, kind: type[ReplyT], query_id: str, message: api.EngineInput, timeout_s: float
    ) -> ReplyT:
        future: asyncio.Future[ReplyT] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = (message, future)
        try:
            self._send(message)
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise EngineUnavailableError(
                f"the engine did not answer {type(message).__name__} within {timeout_s:g} s"
            ) from None
        finally:
            del self._queries[query_id]
        assert isinstance(reply, kind)
        return reply

    def _read(self, frame: bytes) -> None:
        self._last_heard_s = time.monotonic()
        try:
            messages = decode_outputs(frame)
        except msgspec.DecodeError as error:
            logger.warning("dropped a frame that is no engine message: %s", error)
            return
        for message in messages:
            self._route(message)

    def _route(self, message: api.EngineOutput) -> None:
        match message:
            case api.Tokens() | api.Started() | api.PrefillProgress() | api.Finished():
                stream = self._streams.get(message.request_id)
                if stream is not None:
                    self._feed(stream, message)
            case api.GrammarCompiled():
                self._answer(message.compile_id, message)
            case (
                api.StatsReply()
                | api.TreeReply()
                | api.PrefixReply()
                | api.LeaseReply()
                | api.HintReply()
                | api.MoveReply()
                | api.TiersReply()
                | api.DrainReply()
                | api.VerifyReply()
            ):
                self._answer(message.query_id, message)
            case api.QueryRefused():
                self._refuse(message)
            case api.LeaseChanged():
                for callback in self._lease_callbacks:
                    callback(message)
            case api.KvEventBatch():
                for queue in self._kv_queues:
                    queue.put(message)
            case api.EngineHello():
                self._meet(message)
            case api.Pong():
                pass

    def _feed(self, stream: OutputStream, message: StreamItem) -> None:
        is_unknown = isinstance(message, api.Finished) and message.error_code == "unknown_request"
        if is_unknown and stream.request is not None:
            # The answer to a question that was asked before the last resubmission is void.
            if time.monotonic() - stream.submitted_s > self._reconcile_s:
                self._resubmit(stream)
        elif _is_leaving(message) and stream.request is not None:
            stream.awaits_engine = True  # as what this one leaves unfinished does
            if stream.is_to_end:
                stream.end_aborted()
        elif not stream.feed(message):  # tokens are missing before this message
            self._send(stream.catch_up())
        elif stream.num_resubmits and stream.has_failed:
            self._withdraw(stream)  # it was refused, perhaps, when it was sent before the last time

    def _answer(self, query_id: str, reply: Reply) -> None:
        _, future = self._queries.get(query_id, (None, None))
        if future is not None and not future.done():
            future.set_result(reply)

    def _refuse(self, refusal: api.QueryRefused) -> None:
        _, future = self._queries.get(refusal.query_id, (None, None))
        if future is not None and not future.done():
            error = QueryRefusedError(refusal.error_code, refusal.error_message)
            future.set_exception(error)

    def _meet(self, hello: api.EngineHello) -> None:
        previous, self._hello = self._hello, hello
        self._hello_event.set()
        if previous is not None and previous.instance_id == hello.instance_id:
            return  # the engine had forgotten this client, which was silent for long
        if self._kv_queues:
            self._send(api.SubscribeKvEvents(enabled=True))
        if previous is None:
            return
        logger.warning(
            "engine restarted (instance %s after %s): %d requests go on",
            hello.instance_id,
            previous.instance_id,
            len(self._streams),
        )
        for queue in self._kv_queues:
            queue.reset()
        for message, _ in list(self._queries.values()):
            self._send(message)
        for stream in list(self._streams.values()):
            self._resubmit(stream)
        for callback in self._restart_callbacks:
            callback(hello)

    def _resubmit(self, stream: OutputStream) -> None:
        if stream.is_finished:
            return
        if stream.is_to_end:
            stream.end_aborted()
            return
        stream.num_resubmits += 1
        if stream.num_resubmits > self._max_resubmits:
            stream.fail("engine_restarted", f"the engine died {stream.num_resubmits} times")
            self._withdraw(stream)
        elif stream.request is None:
            self._send(stream.catch_up())
        else:
            self._send(stream.resume_request())

    async def _watch_forever(self) -> None:
        while True:
            self._send(api.Ping(sent_ms=time.monotonic_ns() // 1_000_000))
            before_s = time.monotonic()
            await asyncio.sleep(self._ping_interval_s)
            now_s = time.monotonic()
            self._forgive(now_s - before_s - self._ping_interval_s, now_s)
            if now_s - self._last_heard_s > self.dead_after_s:
                self._fail_everything(
                    "engine_unavailable", f"no engine for {self.dead_after_s:g} s"
                )
            elif self.is_ready:
                for stream in list(self._streams.values()):
                    is_silent = now_s - stream.touched_s > self._reconcile_s
                    if is_silent and not stream.is_finished and not stream.awaits_engine:
                        self._send(stream.catch_up())
            elif now_s - self._last_heard_s > ABORT_PATIENCE_S:
                for stream in list(self._streams.values()):
                    if stream.is_to_end:
                        stream.end_aborted()

    def _forgive(self, late_s: float, now_s: float) -> None:
        """A machine that stood still (paused, suspended) let nobody be heard meanwhile."""
        if late_s > MAX_LATE_S:
            self._last_heard_s = min(now_s, self._last_heard_s + late_s)

    def _fail_everything(self, code: str, text: str) -> None:
        for stream in list(self._streams.values()):
            if not stream.is_finished:
                stream.fail(code, text)
                self._withdraw(stream)

    def _withdraw(self, stream: OutputStream) -> None:
        """A request that has failed here may be on its way, to the next engine too: there it would
        run for nobody."""
        if stream.request is not None and self._socket is not None:
            self._send(api.AbortRequest(request_id=stream.request_id))


def _is_leaving(message: StreamItem) -> bool:
    """The engine takes no new request, as it is about to end."""
    return isinstance(message, api.Finished) and message.error_code == "engine_draining"
