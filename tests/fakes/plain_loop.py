# SPDX-License-Identifier: Apache-2.0
"""PlainLoop: what the engine must answer, found without steps, pages, slots or batches.

One request by itself: its logits, its own sampler row, its own grammar matcher, until it ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine import api
from engine.config import GrammarConfig
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.matcher import GrammarMatcher
from engine.loop.intake import Intake, ModelLimits, unspeakable_ids
from engine.loop.server import Vocabulary
from engine.sampling.params import SampleBatch
from engine.sampling.sampler import sample
from tests.fakes.scripted_runner import Script


@dataclass
class Answer:
    """`error_code` None: it ended as `reason` says. `gaps`: of tokens that somebody else said, how
    far below the best one's logit each one's is, in deviations of the logits."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[api.TokenLogprobs] = field(default_factory=list)
    reason: api.FinishReason = api.FinishReason.LENGTH
    error_code: str | None = None
    gaps: list[float] = field(default_factory=list)


class PlainLoop:
    """For one script and vocabulary."""

    def __init__(
        self, script: Script, vocabulary: Vocabulary, vocab_size: int, max_context_len: int
    ) -> None:
        self._script = script
        self._vocabulary = vocabulary
        self._limits = ModelLimits(
            vocab_size=vocab_size,
            max_context_len=max_context_len,
            eos_ids=vocabulary.eos_ids,
            unspeakable_ids=unspeakable_ids(
                vocabulary.token_bytes, vocabulary.control_ids, vocab_size
            ),
        )
        self._compiler: GrammarCompiler | None = None

    def answer(self, wire: api.GenerateRequest, said: Sequence[int] | None = None) -> Answer:
        """The whole answer; with `said`, the tokens that would follow each part of that one.

        Requires: the request is sound, its seed said if it needs one.
        """
        limits = self._limits
        intake = Intake(limits)
        request = intake.accept(wire, 0)
        row = intake.make_row(request)
        matcher = self._matcher(wire.grammar)
        found = Answer()
        history = request.prompt_ids.tolist()
        most = wire.sampling.max_new_tokens if said is None else len(said)
        while len(found.ids) < most:
            bitmask = np.full((1, -(-limits.vocab_size // 32)), -1, np.int32)
            if matcher is not None:
                is_early = len(found.ids) < wire.sampling.min_new_tokens
                matcher.fill(bitmask, 0, forbid_stop=is_early)
            logits = self._script(history).clone()[None]
            sampled = sample(
                logits,
                SampleBatch(
                    rows=[row],
                    slots=np.zeros(1, np.int64),
                    positions=np.array([len(found.ids)]),
                    bitmask=bitmask,
                ),
            )
            token_id = int(sampled.token_ids[0])
            if token_id < 0:
                found.reason, found.error_code = api.FinishReason.ERROR, "invalid_logits"
                return found
            found.ids.append(token_id)
            if said is not None:
                other = int(said[len(found.ids) - 1])
                raw = self._script(history)
                found.gaps.append(float((raw[token_id] - raw[other]) / raw.std()))
                token_id = other
            history.append(token_id)
            if 0 in sampled.logprobs:
                found.logprobs.append(sampled.logprobs[0])
            is_over = matcher is not None and (not matcher.accept(token_id) or matcher.is_over)
            if token_id in request.stop_ids or is_over:
                found.reason = api.FinishReason.STOP
                return found
        return found

    def close(self) -> None:
        """End the compiler's threads."""
        if self._compiler is not None:
            self._compiler.close()

    def _matcher(self, grammar: api.GrammarSpec | None) -> GrammarMatcher | None:
        if grammar is None:
            return None
        if self._compiler is None:
            self._compiler = GrammarCompiler(
                self._vocabulary.token_bytes,
                self._vocabulary.eos_ids,
                self._limits.vocab_size,
                GrammarConfig(),
                lambda: None,
                control_ids=self._vocabulary.control_ids,
            )
            self._compiler.wait_warm()
        job, _ = self._compiler.compile(grammar)
        while not job.is_done:
            time.sleep(0.001)
        assert job.error is None, job.error
        return GrammarMatcher(job.compiled, self._limits.eos_ids, self._limits.vocab_size)
