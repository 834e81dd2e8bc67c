# SPDX-License-Identifier: Apache-2.0
"""The real grammar engine as a judge of structural tags: what a plan accepts, and random walks.

Serving code of `tools_schema` never imports xgrammar; its tests ask it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import numpy as np
import xgrammar

from engine.grammar.bounded_strings import with_escapes
from engine.grammar.equal_rules import merge_equal_rules
from tools_schema.structural_tag import GrammarPlan

_EOS = 255


@functools.cache
def byte_tokenizer() -> xgrammar.TokenizerInfo:
    """256 tokens: one per byte (0x00 is left out), and an end of turn."""
    vocab = [bytes([code]) for code in range(1, 256)]
    return xgrammar.TokenizerInfo(
        [*vocab, b"<eos>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_EOS]
    )


@functools.cache
def byte_compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(byte_tokenizer(), max_threads=1, cache_enabled=False)


def compile_tag(tag: str, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
    """A structural tag as the engine compiles it."""
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    return compiler.compile_grammar(merge_equal_rules(with_escapes(str(grammar))))


def accepts(plan: GrammarPlan, text: str) -> bool:
    """Whether the plan lets a model write exactly `text` and stop."""
    if plan.text is None:
        return True
    matcher = xgrammar.GrammarMatcher(_compiled(plan.text))
    return bool(matcher.accept_string(text) and matcher.is_completed())


def accepts_prefix(plan: GrammarPlan, text: str) -> bool:
    """Whether the plan lets a model begin with `text`."""
    if plan.text is None:
        return True
    return bool(xgrammar.GrammarMatcher(_compiled(plan.text)).accept_string(text))


@functools.lru_cache(maxsize=256)
def _compiled(text: str) -> xgrammar.CompiledGrammar:
    return compile_tag(text, byte_compiler())


class RandomWalker:
    """Samples tokens under a grammar's mask, with a pull towards closing what is open."""

    def __init__(self, token_bytes: Sequence[bytes], eos_id: int) -> None:
        self._token_bytes = token_bytes
        self._eos_id = eos_id
        info = xgrammar.TokenizerInfo(
            [bytes(b) for b in token_bytes],
            vocab_type=xgrammar.VocabType.RAW,
            stop_token_ids=[eos_id],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._size = len(token_bytes)
        self._closing = np.array([bytes(b) in _CLOSING for b in token_bytes])
        self._closing[eos_id] = True

    def compile(self, plan: GrammarPlan) -> xgrammar.CompiledGrammar:
        assert plan.text is not None
        return compile_tag(plan.text, self._compiler)

    def walk(
        self,
        grammar: xgrammar.CompiledGrammar,
        seed: int,
        most_tokens: int,
        *,
        start: bytes = b"",
        closers: Sequence[bytes] = (),
    ) -> tuple[list[bytes], bool]:
        """The pieces written, and whether the grammar was finished within `most_tokens`.

        `closers`: markers that a random walk would never spell; each is tried now and then.
        """
        rng = random.Random(seed)
        matcher = xgrammar.GrammarMatcher(grammar)
        mask = np.zeros((1, (self._size + 31) // 32), dtype=np.int32)
        pieces = [start] if start else []
        assert not start or matcher.accept_string(start)
        for step in range(most_tokens):
            if closers and rng.random() < 0.15:
                closer = rng.choice(closers)
                if matcher.accept_string(closer):
                    pieces.append(closer)
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._size]
            token_id = self._pick(bits.astype(bool), rng, step)
            assert matcher.accept_token(token_id)
            if token_id == self._eos_id:
                return pieces, True
            pieces.append(self._token_bytes[token_id])
        return pieces, False

    def _pick(self, allowed: np.ndarray, rng: random.Random, step: int) -> int:
        closing = np.flatnonzero(allowed & self._closing)
        if len(closing) and rng.random() < min(0.6, step / 30):
            return int(closing[rng.randrange(len(closing))])
        every = np.flatnonzero(allowed)
        assert len(every), "the grammar leaves no token"
        return int(every[rng.randrange(len(every))])


_CLOSING = frozenset((b'"', b"}", b"]", b'"}', b"}}", b"<", b"</", b"true", b"null"))
