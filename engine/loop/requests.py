# SPDX-License-Identifier: Apache-2.0
"""The requests of this engine process: running ones, and for a while the output of ended ones.

Does not know: sockets, the scheduler's states, how tokens are chosen.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine import api
from engine.grammar.matcher import GrammarMatcher
from engine.sampling.params import RowSampling
from engine.spec_decode.ngram import NO_DRAFTS, IdRow, NgramDrafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why a request ends. Decided once; announced when the scheduler has let go of it."""

    reason: api.FinishReason
    stop_token_id: int | None = None
    error_code: str | None = None
    error_message: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request, from the first check of its fields until its output is forgotten."""

    # Constant after intake.
    request_id: str
    index: int  # its name in the scheduler
    prompt_ids: NDArray[np.int32]
    resumed_ids: NDArray[np.int32]  # output of an earlier life
    params: api.SamplingParams
    stop_ids: frozenset[int]
    received_ms: int
    grammar: api.GrammarSpec | None = None
    priority: int = 0
    tenant: str = "default"
    salt: str = ""
    # Owned by the loop.
    subscribers: dict[bytes, None] = field(default_factory=dict)
    matcher: GrammarMatcher | None = None
    row: RowSampling | None = None  # made anew at each admission
    drafter: NgramDrafter | None = None
    drafts: IdRow = field(default_factory=lambda: NO_DRAFTS)  # behind the newest token
    output: bytearray = field(default_factory=bytearray)  # int32, little-endian
    logprobs: list[api.TokenLogprobs] = field(default_factory=list)
    is_submitted: bool = False
    named_len: int = 0  # tokens whose pages `page_names` has named
    last_name: bytes = bytes(16)  # of the page that ends there
    started: api.Started | None = None
    outcome: Outcome | None = None
    finished: api.Finished | None = None

    @property
    def num_output(self) -> int:
        """Output tokens, those of earlier lives included."""
        return len(self.output) // 4

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt, without any output."""
        return len(self.prompt_ids)

    def token_at(self, place: int) -> int:
        """The token at a place of prompt and output; -1 where there is none yet."""
        if place < self.prompt_len:
            return int(self.prompt_ids[place])
        start = 4 * (place - self.prompt_len)
        found = self.output[start : start + 4]
        return int.from_bytes(found, "little") if found else -1

    def output_ids(self) -> NDArray[np.int32]:
        """Output so far, int32; a copy."""
        return np.frombuffer(bytes(self.output), dtype="<i4")

    def append(self, token_id: int, logprob: api.TokenLogprobs | None) -> None:
        """Add a sampled token."""
        self.output += token_id.to_bytes(4, "little")
        if logprob is not None:
            self.logprobs.append(logprob)

    def tokens_from(self, start: int) -> api.Tokens | None:
        """What was output from token `start` on; None if nothing."""
        if start >= self.num_output:
            return None
        # Tokens of an earlier life have no logprobs here: the client that resumed holds them.
        num_without = self.num_output - len(self.logprobs)
        logprobs = tuple(self.logprobs[max(0, start - num_without) :]) or None
        return api.Tokens(
            request_id=self.request_id,
            start=start,
            token_ids=bytes(self.output[4 * start :]),
            logprobs=logprobs if start >= num_without else None,
        )


class RequestTable:
    """All requests by id and by scheduler index; ended ones are kept within time and bytes."""

    def __init__(self, *, keep_s: float, keep_bytes: int) -> None:
        self._keep_ms = int(keep_s * 1000)
        self._keep_bytes = keep_bytes
        self._by_id: dict[str, Request] = {}
        self._by_index: dict[int, Request] = {}
        self._ended: OrderedDict[str, tuple[int, int]] = OrderedDict()  # id -> (ended_ms, bytes)
        self._ended_bytes = 0

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._by_index)

    def add(self, request: Request) -> None:
        """Take in a new request. Requires: its id and index are not here."""
        self._by_id[request.request_id] = request
        self._by_index[request.index] = request

    def find(self, request_id: str) -> Request | None:
        """A running or recently ended request."""
        return self._by_id.get(request_id)

    def live(self, index: int) -> Request:
        """The request behind a scheduler index. Raises: KeyError if it has ended."""
        return self._by_index[index]

    def all_live(self) -> list[Request]:
        """Every request that has not ended."""
        return list(self._by_index.values())

    def end(self, request: Request, now_ms: int) -> None:
        """Keep only what an attach may ask for."""
        del self._by_index[request.index]
        request.matcher = request.row = request.grammar = request.drafter = None
        num_bytes = len(request.output) + 4 * len(request.prompt_ids) + 64 * len(request.logprobs)
        self._ended[request.request_id] = (now_ms, num_bytes)
        self._ended_bytes += num_bytes
        self.forget_old(now_ms)

    def forget_old(self, now_ms: int) -> None:
        """Drop ended requests beyond the time or the bytes, oldest first."""
        while self._ended:
            request_id, (ended_ms, num_bytes) = next(iter(self._ended.items()))
            is_old = now_ms - ended_ms >= self._keep_ms
            if not is_old and self._ended_bytes <= self._keep_bytes:
                return
            del self._ended[request_id]
            self._ended_bytes -= num_bytes
            del self._by_id[request_id]
