# SPDX-License-Identifier: Apache-2.0
"""Wire requests -> checked requests, and their parameters -> rows for the sampler.

Every field is checked here, once; a RequestError names the field and nothing has happened yet.
Does not know: sockets, the scheduler, the model beyond its limits.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine import api
from engine.errors import RequestError, spelled
from engine.loop.requests import Request
from engine.sampling.params import RowSampling
from engine.sampling.penalties import Penalties

MAX_ID_CHARS = 256
MAX_STOP_IDS = 64
MAX_CONTROL_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 64
INT32_MAX = (1 << 31) - 1

# field: (least, most), both allowed
_RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, INT32_MAX),
    "min_new_tokens": (0, INT32_MAX),
    "temperature": (0.0, 100.0),
    "top_k": (0, INT32_MAX),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-10.0, 10.0),
    "frequency_penalty": (-10.0, 10.0),
    "num_logprobs": (-1, MAX_LOGPROBS),
}
# field: (more than, most)
_POSITIVE: dict[str, tuple[float, float]] = {
    "top_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelLimits:
    """What a request must fit, and the ids with a meaning of their own."""

    vocab_size: int
    max_context_len: int
    eos_ids: tuple[int, ...]
    unspeakable_ids: NDArray[np.int64]  # control tokens and holes of the vocabulary


def unspeakable_ids(
    token_bytes: Sequence[bytes], control_ids: Sequence[int], vocab_size: int
) -> NDArray[np.int64]:
    """Ids that are no text: control tokens, and ids without a spelling."""
    silent = [i for i, spelled in enumerate(token_bytes) if not spelled]
    holes = range(len(token_bytes), vocab_size)
    return np.unique(np.array([*silent, *holes, *control_ids], dtype=np.int64))


class Intake:
    """Checks requests against one model's limits and numbers them."""

    def __init__(self, limits: ModelLimits) -> None:
        self._limits = limits
        self._indices = itertools.count()

    def accept(self, wire: api.GenerateRequest, now_ms: int) -> Request:
        """A checked request, not yet in any table. Raises: RequestError."""
        limits = self._limits
        check_request_id(wire.request_id)
        prompt = read_ids("token_ids", wire.token_ids, limits.vocab_size)
        resumed = read_ids("resume_token_ids", wire.resume_token_ids, limits.vocab_size)
        if not prompt.size:
            raise RequestError("token_ids", "", "at least one token")
        check_sampling(wire.sampling, limits)
        self._check_room(prompt, resumed, wire.sampling)
        for name in ("tenant", "salt"):
            value = getattr(wire, name)
            if len(value) > MAX_ID_CHARS:
                raise RequestError(name, value[:32], f"up to {MAX_ID_CHARS} characters")
        if not -INT32_MAX <= wire.priority <= INT32_MAX:
            raise RequestError("priority", wire.priority, "a 32-bit integer")
        if wire.grammar is not None and wire.sampling.ignore_eos:
            raise RequestError(
                "sampling.ignore_eos", True, "false with a grammar, whose end is an EOS"
            )
        eos_ids = () if wire.sampling.ignore_eos else limits.eos_ids
        return Request(
            request_id=wire.request_id,
            index=next(self._indices),
            prompt_ids=prompt,
            resumed_ids=resumed,
            params=wire.sampling,
            stop_ids=frozenset((*eos_ids, *wire.sampling.stop_token_ids)),
            received_ms=now_ms,
            grammar=wire.grammar,
            priority=wire.priority,
            tenant=wire.tenant,
            salt=wire.salt,
            output=bytearray(wire.resume_token_ids),
        )

    def make_row(self, request: Request) -> RowSampling:
        """The sampler's view of a request, with the output it has now."""
        params = request.params
        is_grammar = request.grammar is not None
        stop_ids = np.array(sorted(request.stop_ids), dtype=np.int64)
        banned = self._limits.unspeakable_ids if params.mask_control_tokens else stop_ids[:0]
        bias = sorted(params.logit_bias.items())
        return RowSampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=_seed(request),
            num_logprobs=params.num_logprobs,
            penalties=self._penalties(request),
            bias_ids=np.array([i for i, _ in bias], dtype=np.int64),
            bias=np.array([value for _, value in bias], dtype=np.float32),
            banned_ids=np.setdiff1d(banned, [*stop_ids.tolist(), *params.allowed_control_ids]),
            stop_ids=stop_ids,
            # A grammar may leave nothing but the end: there its bitmask decides, not this.
            min_new_tokens=0 if is_grammar else params.min_new_tokens,
        )

    def _penalties(self, request: Request) -> Penalties | None:
        params = request.params
        neutral = (1.0, 0.0, 0.0)
        asked = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if asked == neutral:
            return None
        return Penalties(
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            prompt_ids=request.prompt_ids,
            output_ids=request.output_ids(),
        )

    def _check_room(
        self,
        prompt: NDArray[np.int32],
        resumed: NDArray[np.int32],
        sampling: api.SamplingParams,
    ) -> None:
        most = self._limits.max_context_len - len(prompt)
        if sampling.max_new_tokens > most:
            raise RequestError(
                "sampling.max_new_tokens",
                sampling.max_new_tokens,
                f"up to {max(most, 0)}: the context holds {self._limits.max_context_len} tokens "
                f"and the prompt has {len(prompt)}",
                code="context_too_long",
            )
        if len(resumed) > sampling.max_new_tokens:
            raise RequestError(
                "resume_token_ids",
                f"{len(resumed)} tokens",
                f"up to max_new_tokens ({sampling.max_new_tokens})",
            )


def check_request_id(request_id: str) -> None:
    """Raises: RequestError."""
    if not 1 <= len(request_id) <= MAX_ID_CHARS:
        raise RequestError("request_id", request_id[:32], f"1 to {MAX_ID_CHARS} characters")


def read_ids(field: str, raw: bytes, vocab_size: int) -> NDArray[np.int32]:
    """Token ids of a wire field, int32; a view. Raises: RequestError."""
    if len(raw) % 4:
        raise RequestError(field, f"{len(raw)} bytes", "whole int32 ids (a multiple of 4 bytes)")
    ids = np.frombuffer(raw, dtype="<i4")
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))[0]
        raise RequestError(f"{field}[{wrong}]", int(ids[wrong]), f"0 to {vocab_size - 1}")
    return ids


def check_sampling(sampling: api.SamplingParams, limits: ModelLimits) -> None:
    """Raises: RequestError for the first field out of range."""
    for name, (least, most) in _RANGES.items():
        value = getattr(sampling, name)
        if not least <= value <= most:  # NaN fails too
            raise RequestError(f"sampling.{name}", value, f"{spelled(least)} to {spelled(most)}")
    for name, (above, most) in _POSITIVE.items():
        value = getattr(sampling, name)
        if not above < value <= most:
            allowed = f"more than {spelled(above)}, up to {spelled(most)}"
            raise RequestError(f"sampling.{name}", value, allowed)
    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise RequestError(
            "sampling.min_new_tokens",
            sampling.min_new_tokens,
            f"up to max_new_tokens ({sampling.max_new_tokens})",
        )
    if sampling.seed is not None and not -(1 << 63) <= sampling.seed < 1 << 63:
        raise RequestError("sampling.seed", sampling.seed, "a 64-bit integer")
    _check_id_fields(sampling, limits.vocab_size)
    is_control = np.isin(sampling.allowed_control_ids, limits.unspeakable_ids)
    for place, token_id in enumerate(sampling.allowed_control_ids):
        if not is_control[place]:
            raise RequestError(
                f"sampling.allowed_control_ids[{place}]", token_id, "ids of control tokens"
            )


def _check_id_fields(sampling: api.SamplingParams, vocab_size: int) -> None:
    for name, most in (("stop_token_ids", MAX_STOP_IDS), ("allowed_control_ids", MAX_CONTROL_IDS)):
        num = len(getattr(sampling, name))
        if num > most:
            raise RequestError(f"sampling.{name}", f"{num} ids", f"up to {most}")
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            "sampling.logit_bias", f"{len(sampling.logit_bias)} ids", f"up to {MAX_LOGIT_BIAS}"
        )
    for place, token_id in enumerate(sampling.stop_token_ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"sampling.stop_token_ids[{place}]", token_id, f"0 to {vocab_size - 1}"
            )
    for token_id, value in sampling.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise RequestError("sampling.logit_bias", token_id, f"ids 0 to {vocab_size - 1}")
        if not (math.isfinite(value) and -100 <= value <= 100):
            raise RequestError(f"sampling.logit_bias[{token_id}]", value, "-100 to 100")


def _seed(request: Request) -> int:
    """The seed as 64 bits without a sign; without one, from the id, so a second life agrees."""
    if request.params.seed is not None:
        return request.params.seed & ((1 << 64) - 1)
    digest = hashlib.sha256(request.request_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")
