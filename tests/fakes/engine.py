# SPDX-License-Identifier: Apache-2.0
"""FakeEngine: the engine's side of the wire without a model, for tests of the API process.

It runs in a thread of the test, answers every message of `engine.api`, and samples what a script
says: `script(request) -> token ids` (the end-of-turn id is added if the script leaves it out and
max_new_tokens allows). It keeps token sequences to report cache hits like the radix tree would:
token-exact, all but the last token of a prompt. `restart()` makes it another engine instance that
has forgotten everything; `stop()` ends it.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from engine import api
from engine.transport import EngineSocket, decode_input, encode_outputs, pack_ids, unpack_ids

KV_BYTES = 100  # of a token, as its tiers say
Script = Callable[[api.GenerateRequest], Sequence[int]]
GrammarCheck = Callable[[api.GrammarSpec], tuple[str, str] | None]


@dataclass
class _Request:
    wire: api.GenerateRequest
    prompt: list[int]
    planned: list[int]
    peers: list[bytes]
    cache: api.CacheHit
    due_s: float
    output: list[int] = field(default_factory=list)
    finished: api.Finished | None = None


class FakeEngine:
    """See the module. Thread-safe: start, stop, restart, pause, resume and reading `requests`."""

    def __init__(
        self,
        socket_path: str,
        script: Script,
        *,
        tokens_per_s: float = 0.0,  # 0: as fast as it can
        prefill_s: float = 0.0,
        burst: int = 1,  # tokens in one message, as speculation gives
        progress_steps: int = 0,  # PrefillProgress messages before the first token
        eos_id: int = 2,
        vocab_size: int = 49152,
        max_context_len: int = 8192,
        page_size: int = 64,
        num_pages: int = 4096,
        grammar_check: GrammarCheck = lambda spec: None,
    ) -> None:
        self.socket_path = socket_path
        self.script = script
        self.tokens_per_s = tokens_per_s
        self.prefill_s = prefill_s
        self.burst = burst
        self.progress_steps = progress_steps
        self.eos_id = eos_id
        self.grammar_check = grammar_check
        self.fail_at: int | None = None  # requests fail at this output token
        self.hold_at: int | None = None  # requests wait at so many output tokens, until it is None
        self.held: set[str] = set()  # requests that wait where they are
        self.free_pages: int | None = None  # what its stats say; None: all
        self.tier_states = {"l1": "up", "l2": "up", "l3": "up"}
        self.requests: list[api.GenerateRequest] = []
        self.aborted: list[str] = []
        self.grammars: list[api.GrammarSpec] = []
        self.hints: list[api.HintPrefix] = []
        self.moves: list[api.MovePrefix] = []
        self._changes: deque[api.LeaseChanged] = deque()
        self._shape = (vocab_size, max_context_len, page_size, num_pages)
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._running = threading.Event()
        self._running.set()

    def start(self) -> FakeEngine:
        """Bind the socket and serve in a thread."""
        self._stopping.clear()
        self._forget()
        self._socket = EngineSocket(self.socket_path)
        self._thread = threading.Thread(target=self._serve, name="fake-engine", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End it as kill -9 would: nothing more is said to anybody."""
        self._stopping.set()
        self._running.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def restart(self, *, keep_lower_tiers: bool = False) -> None:
        """Another instance takes over; requests in flight and the cache are gone.

        keep_lower_tiers: what was moved to l2 or l3 is still there.
        """
        self.stop()
        lower = self._lower
        self.start()
        if keep_lower_tiers:
            self._lower = lower

    def drop_cache(self) -> None:
        """Evict all that is cached."""
        self._cached.clear()
        self._told_pages.clear()
        self._lower = {"l2": {}, "l3": {}}

    def pause(self) -> None:
        """Sample no further token until `resume` (other messages are answered)."""
        self._running.clear()

    def resume(self) -> None:
        """Go on sampling."""
        self._running.set()

    def __enter__(self) -> FakeEngine:
        return self if self._thread is not None else self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # The serving thread -------------------------------------------------------------------

    def _forget(self) -> None:
        self.instance_id = uuid.uuid4().hex
        self._peers: set[bytes] = set()
        self._kv_peers: set[bytes] = set()
        self._requests: dict[str, _Request] = {}
        self._cached: dict[str, list[list[int]]] = {}
        # What was moved down, by tier and salt; whole pages, as in the real tiers.
        self._lower: dict[str, dict[str, list[list[int]]]] = {"l2": {}, "l3": {}}
        self._told_pages: set[bytes] = set()
        self._num_tokens = 0
        self.leases: dict[str, tuple[int, bytes]] = {}

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket.socket, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                poller.poll(self._wait_ms())
                while (received := self._socket.receive()) is not None:
                    self._handle(*received)
                self._tell_lease_changes()
                if not self._stopping.is_set() and self._running.is_set():
                    self._sample_due()
        finally:
            self._socket.close(linger_ms=100)

    def _wait_ms(self) -> int:
        due = [r.due_s for r in self._requests.values() if self._is_going_on(r)]
        if not due or not self._running.is_set():
            return 5
        return max(0, min(5, int((min(due) - time.monotonic()) * 1000)))

    def _send(self, peers: Sequence[bytes], message: api.EngineOutput) -> None:
        frame = encode_outputs([message])
        for peer in peers:
            self._socket.send(peer, frame)

    def _handle(self, peer: bytes, frame: bytes) -> None:
        if peer not in self._peers:
            self._peers.add(peer)
            vocab_size, max_context_len, page_size, num_pages = self._shape
            hello = api.EngineHello(
                instance_id=self.instance_id,
                model_fingerprint="fake",
                vocab_size=vocab_size,
                max_context_len=max_context_len,
                page_size=page_size,
                num_pages=num_pages,
            )
            self._send([peer], hello)
        message = decode_input(frame)
        match message:
            case api.GenerateRequest():
                self._generate(peer, message)
            case api.AbortRequest():
                self.aborted.append(message.request_id)
                request = self._requests.get(message.request_id)
                if request is not None and request.finished is None:
                    self._finish(request, api.FinishReason.ABORTED)
            case api.AttachRequest():
                self._attach(peer, message)
            case api.CompileGrammar():
                self.grammars.append(message.grammar)
                problem = self.grammar_check(message.grammar)
                code, text = problem if problem is not None else (None, None)
                reply = api.GrammarCompiled(
                    compile_id=message.compile_id,
                    compile_ms=0.1,
                    cached=False,
                    error_code=code,
                    error_message=text,
                )
                self._send([peer], reply)
            case api.QueryStats():
                self._send([peer], api.StatsReply(query_id=message.query_id, stats=self._stats()))
            case api.QueryTree():
                self._send(
                    [peer], api.TreeReply(query_id=message.query_id, nodes=(), truncated=False)
                )
            case api.QueryPrefix():
                ids = unpack_ids(message.token_ids).tolist()
                hit = self._hit(ids, message.salt, len(ids))
                self._send([peer], api.PrefixReply(query_id=message.query_id, cache=hit))
            case api.DropPrefix():
                ids = unpack_ids(message.token_ids).tolist()
                for tier in (self._cached, *self._lower.values()):
                    tier[message.salt] = [
                        _without(s, ids, message.keep_tokens) for s in tier.get(message.salt, [])
                    ]
            case api.LeasePrefix():
                self._send([peer], self._lease(peer, message))
            case api.ReleaseLease():
                self.leases.pop(message.lease_id, None)
            case api.HintPrefix():
                ids = unpack_ids(message.token_ids).tolist()
                self.hints.append(message)
                num_tokens = self._hit(ids, message.salt, len(ids)).l1
                self._send([peer], api.HintReply(query_id=message.query_id, num_tokens=num_tokens))
            case api.MovePrefix():
                self.moves.append(message)
                self._move(message)
                ids = unpack_ids(message.token_ids).tolist()
                hit = self._hit(ids, message.salt, len(ids))
                self._send([peer], api.MoveReply(query_id=message.query_id, cache=hit))
            case api.QueryTiers():
                tiers = tuple(
                    api.TierStatus(
                        tier=name,
                        kind="fake",
                        state=state,
                        capacity_bytes=self._shape[3] * self._shape[2] * KV_BYTES,
                    )
                    for name, state in self.tier_states.items()
                )
                self._send([peer], api.TiersReply(query_id=message.query_id, tiers=tiers))
            case api.DrainTiers():
                self._send([peer], api.DrainReply(query_id=message.query_id, num_pages=0))
            case api.VerifyTiers():
                counts = {"l2": 0, "l3": 0}
                reply = api.VerifyReply(query_id=message.query_id, checked=counts, bad=counts)
                self._send([peer], reply)
            case api.SubscribeKvEvents():
                (self._kv_peers.add if message.enabled else self._kv_peers.discard)(peer)
            case api.Ping():
                self._send([peer], api.Pong(sent_ms=message.sent_ms, instance_id=self.instance_id))

    def _generate(self, peer: bytes, wire: api.GenerateRequest) -> None:
        if wire.request_id in self._requests:
            self._attach(peer, api.AttachRequest(request_id=wire.request_id))
            return
        prompt = unpack_ids(wire.token_ids).tolist()
        resumed = unpack_ids(wire.resume_token_ids).tolist()
        problem = self._problem(wire, prompt)
        planned = [] if problem else list(self.script(wire))
        if self.eos_id not in planned:
            planned.append(self.eos_id)
        total = len(prompt) + len(resumed)
        request = _Request(
            wire=wire,
            prompt=prompt,
            planned=planned[: wire.sampling.max_new_tokens],
            peers=[peer],
            cache=self._hit(prompt + resumed, wire.salt, total - 1),
            due_s=time.monotonic() + self.prefill_s,
            output=resumed,
        )
        self._requests[wire.request_id] = request
        # Only now: whoever sees it here may change the script.
        self.requests.append(wire)
        if problem is not None:
            self._finish(request, api.FinishReason.ERROR, code=problem[0], text=problem[1])
            return
        self._send([peer], api.Started(request_id=wire.request_id, cache=request.cache))
        for step in range(self.progress_steps):
            done = total * (step + 1) // self.progress_steps
            self._send(
                [peer], api.PrefillProgress(request_id=wire.request_id, done=done, total=total)
            )

    def _problem(self, wire: api.GenerateRequest, prompt: list[int]) -> tuple[str, str] | None:
        if wire.grammar is not None and (found := self.grammar_check(wire.grammar)) is not None:
            return found
        limit = self._shape[1]
        if len(prompt) + wire.sampling.max_new_tokens > limit:
            return "context_too_long", f"token_ids: {len(prompt)} tokens and max_new > {limit}"
        return None

    def _attach(self, peer: bytes, message: api.AttachRequest) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            unknown = api.Finished(
                request_id=message.request_id,
                reason=api.FinishReason.ERROR,
                num_output_tokens=0,
                error_code="unknown_request",
                error_message=f"request_id = {message.request_id!r}: not known",
            )
            self._send([peer], unknown)
            return
        if peer not in request.peers:
            request.peers.append(peer)
        self._send([peer], api.Started(request_id=message.request_id, cache=request.cache))
        rest = request.output[message.from_output :]
        if rest:
            tokens = api.Tokens(
                request_id=message.request_id, start=message.from_output, token_ids=pack_ids(rest)
            )
            self._send([peer], tokens)
        if request.finished is not None:
            self._send([peer], request.finished)

    def _sample_due(self) -> None:
        now_s = time.monotonic()
        for request in list(self._requests.values()):
            if self._is_going_on(request) and request.due_s <= now_s:
                self._sample(request)
                request.due_s = now_s + (1 / self.tokens_per_s if self.tokens_per_s else 0.0)

    def _is_going_on(self, request: _Request) -> bool:
        if request.finished is not None or request.wire.request_id in self.held:
            return False
        hold_at = self.hold_at
        return hold_at is None or len(request.output) < hold_at

    def _sample(self, request: _Request) -> None:
        sampling = request.wire.sampling
        position = len(request.output)
        if position == self.fail_at:
            self._finish(request, api.FinishReason.ERROR, code="step_failed", text="it broke")
            return
        token_ids = self._next_ids(request)
        if token_ids:
            request.output += token_ids
            self._num_tokens += len(token_ids)
            tokens = api.Tokens(
                request_id=request.wire.request_id,
                start=position,
                token_ids=pack_ids(token_ids),
                logprobs=_logprobs(token_ids, sampling.num_logprobs),
            )
            self._send(request.peers, tokens)
            if self._is_stop(request, token_ids[-1]):
                self._finish(request, api.FinishReason.STOP, stop_token_id=token_ids[-1])
                return
        if len(request.output) >= sampling.max_new_tokens:
            self._finish(request, api.FinishReason.LENGTH)
        elif len(request.output) >= len(request.planned):
            self._finish(request, api.FinishReason.STOP)

    def _next_ids(self, request: _Request) -> list[int]:
        """The tokens of one step: up to what stops the request, or to its limit."""
        start = len(request.output)
        most = min(start + self.burst, request.wire.sampling.max_new_tokens)
        token_ids: list[int] = []
        for token_id in request.planned[start:most]:
            token_ids.append(token_id)
            if self._is_stop(request, token_id):
                break
        return token_ids

    def _is_stop(self, request: _Request, token_id: int) -> bool:
        sampling = request.wire.sampling
        is_end = token_id == self.eos_id and not sampling.ignore_eos
        return is_end or token_id in sampling.stop_token_ids

    def _finish(
        self,
        request: _Request,
        reason: api.FinishReason,
        *,
        stop_token_id: int | None = None,
        code: str | None = None,
        text: str | None = None,
    ) -> None:
        hashes: list[bytes] = []
        held: list[int] = []
        if reason is not api.FinishReason.ERROR:
            held = (request.prompt + request.output)[: -1 if request.output else None]
            hashes = self._store(held, request.wire.salt)
        request.finished = api.Finished(
            request_id=request.wire.request_id,
            reason=reason,
            num_output_tokens=len(request.output),
            stop_token_id=stop_token_id,
            num_cached_tokens=len(held),
            page_hashes=b"".join(hashes),
            error_code=code,
            error_message=text,
        )
        self._send(request.peers, request.finished)

    # The pretended cache ------------------------------------------------------------------

    def _hit(self, ids: list[int], salt: str, most: int) -> api.CacheHit:
        l1 = min(_longest(self._cached.get(salt, []), ids), most)
        l2 = max(0, min(_longest(self._lower["l2"].get(salt, []), ids), most) - l1)
        l3 = max(0, min(_longest(self._lower["l3"].get(salt, []), ids), most) - l1 - l2)
        return api.CacheHit(l1=l1, l2=l2, l3=l3, to_compute=len(ids) - l1 - l2 - l3)

    def _move(self, message: api.MovePrefix) -> None:
        """All of the prefix that some tier holds goes to one; nobody shares it here."""
        ids, salt = unpack_ids(message.token_ids).tolist(), message.salt
        hit = self._hit(ids, salt, len(ids))
        found = ids[: hit.l1 + hit.l2 + hit.l3]
        for tier in (self._cached, self._lower["l2"], self._lower["l3"]):
            tier[salt] = [s for s in tier.get(salt, []) if s[: len(ids)] != ids[: len(s)]]
        if message.tier == "l1":
            self._cached[salt].append(found)
        elif message.tier in self._lower:
            whole = len(found) // self._shape[2] * self._shape[2]
            self._lower[message.tier][salt].append(found[:whole])

    def _store(self, ids: list[int], salt: str) -> list[bytes]:
        known = self._cached.get(salt, [])
        self._cached[salt] = [s for s in known if len(s) > len(ids) or ids[: len(s)] != s] + [ids]
        page_size = self._shape[2]
        parent = hashlib.sha256(salt.encode()).digest()[:16]
        hashes: list[bytes] = []
        events: list[api.KvEvent] = []
        for start in range(0, len(ids) - page_size + 1, page_size):
            page = parent + pack_ids(ids[start : start + page_size])
            page_hash = hashlib.sha256(page).digest()[:16]
            event = api.KvEvent(
                kind="stored",
                tier="l1",
                page_hash=page_hash,
                parent_hash=parent,
                num_tokens=page_size,
            )
            if page_hash not in self._told_pages:
                self._told_pages.add(page_hash)
                events.append(event)
            hashes.append(page_hash)
            parent = page_hash
        if events:
            self._send(list(self._kv_peers), api.KvEventBatch(events=tuple(events)))
        return hashes

    def _lease(self, peer: bytes, message: api.LeasePrefix) -> api.LeaseReply:
        """As the scheduler answers: what is cached, within half of the pool."""
        ids = unpack_ids(message.token_ids).tolist()
        pool = self._cached if message.tier == "l1" else self._lower[message.tier]
        found = _longest(pool.get(message.salt, []), ids)
        others = sum(n for id_, (n, _) in self.leases.items() if id_ != message.lease_id)
        room = self._shape[3] * self._shape[2] // 2 - others
        granted = min(found, max(0, room))
        reason = "" if found >= len(ids) - 1 else "not_resident"
        state = "denied"
        if found and granted < found:
            state, reason = ("clipped" if granted else "queued"), "budget"
        elif found:
            state = "clipped" if reason else "granted"
        if state == "denied":
            self.leases.pop(message.lease_id, None)
        else:  # in one step, as a test looks on
            self.leases[message.lease_id] = (granted, peer)
        return api.LeaseReply(
            query_id=message.query_id,
            state=state,
            tokens_requested=len(ids),
            tokens_granted=granted,
            reason=reason,
        )

    def change_lease(self, lease_id: str, kind: str, num_tokens: int) -> None:
        """Tell who holds a lease that it changed, from the serving thread."""
        self._changes.append(api.LeaseChanged(lease_id=lease_id, kind=kind, num_tokens=num_tokens))

    def _tell_lease_changes(self) -> None:
        while self._changes:
            change = self._changes.popleft()
            _, peer = self.leases[change.lease_id]
            if change.num_tokens:
                self.leases[change.lease_id] = (change.num_tokens, peer)
            else:
                del self.leases[change.lease_id]
            self._send([peer], change)

    def _stats(self) -> dict[str, float]:
        running = sum(r.finished is None for r in self._requests.values())
        num_pages = self._shape[3]
        return {
            "running": running,
            "waiting": 0,
            "num_pages": num_pages,
            "free_pages": num_pages if self.free_pages is None else self.free_pages,
            "owned_pages": 0,
            "cached_pages": 0,
            "output_tokens": self._num_tokens,
        }


def _logprobs(token_ids: list[int], num_tops: int) -> tuple[api.TokenLogprobs, ...] | None:
    if num_tops < 0:
        return None
    return tuple(
        api.TokenLogprobs(
            logprob=-0.5,
            top_ids=tuple(range(token_id, token_id + num_tops)),
            top_logprobs=tuple(-0.5 - i for i in range(num_tops)),
        )
        for token_id in token_ids
    )


def _without(sequence: list[int], ids: list[int], keep: int) -> list[int]:
    """What is left of a sequence once `ids` are dropped from `keep` on; what branches off stays."""
    num_shared = _longest([sequence], ids)
    is_part = num_shared in (len(sequence), len(ids))
    return sequence[:keep] if is_part and num_shared > keep else sequence


def _longest(sequences: list[list[int]], ids: list[int]) -> int:
    """Length of the longest prefix of `ids` that one of `sequences` begins with."""
    return max((_common(sequence, ids) for sequence in sequences), default=0)


def _common(left: list[int], right: list[int]) -> int:
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low + 1 < high:  # the first difference, by halves
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low if left[low] != right[low] else low + 1
