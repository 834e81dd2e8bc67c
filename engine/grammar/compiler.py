# SPDX-License-Identifier: Apache-2.0
"""GrammarSpec -> compiled grammar, cached by content, in worker threads beside the loop.

xgrammar has no time limit of its own, so a job has none either: whoever waits for it gives up when
its budget is over, and the result is kept for the next one. A control token is allowed where a
structural tag names it by id and nowhere else (`engine.grammar.control_tokens`); the end of turn,
where the grammar is complete. Does not know: requests, sampling.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import queue
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from engine.api import GrammarKind, GrammarSpec
from engine.config import GrammarConfig
from engine.errors import GrammarError
from engine.grammar.bounded_strings import with_escapes
from engine.grammar.control_tokens import grammar_vocabulary, without_control_in_text
from engine.grammar.equal_rules import merge_equal_rules

logger = logging.getLogger(__name__)

# xgrammar 0.2.8 needs 0.08 s for 100 nested arrays, 86 s for 1,000, and more memory than there is
# for 10,000.
MAX_NESTING = 128
MAX_TEXT_BYTES = 4 << 20
MAX_WHITESPACE = 2  # unbounded JSON whitespace lets a model loop
ERROR_ENTRY_BYTES = 1024
# 24 tools need 0.9 s of one core with 200k tokens, 0.5 s of two. The threads are as nice as the
# worker that starts them.
COMPILE_THREADS = 2
# A compile shares the cores with the forward pass, whose threads wait for each other.
WORKER_NICENESS = 5
# A thread that is inside xgrammar when the interpreter goes takes the process down with an abort.
EXIT_WAIT_S = 60.0

_JSON_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{}\]]')
_LOG_PREFIX = re.compile(r"^\[[^\]]*\] \S+:\d+: ")


@dataclass(slots=True, eq=False)
class CompileJob:
    """One grammar on its way; read the results once `is_done`."""

    spec: GrammarSpec
    is_done: bool = False
    compiled: Any = None  # xgrammar.CompiledGrammar
    error: GrammarError | None = None
    compile_ms: float = 0.0
    size_bytes: int = ERROR_ENTRY_BYTES


class GrammarCompiler:
    """Owns the vocabulary, the workers and the cache.

    Thread rule: every method belongs to the loop's thread. `on_done` is called on a worker after
    each job; the loop then sees `job.is_done`, which is set last.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        stop_ids: Sequence[int],
        vocab_size: int,
        config: GrammarConfig,
        on_done: Callable[[], None],
        *,
        control_ids: Collection[int] = (),
    ) -> None:
        """`vocab_size`: rows of the model's output, at least len(token_bytes).

        `control_ids`: tokens that a structural tag may name; b"" in `token_bytes`.
        """
        self._config = config
        self._on_done = on_done
        self._cache: OrderedDict[bytes, CompileJob] = OrderedDict()
        self._cache_bytes = 0
        self._running: dict[bytes, CompileJob] = {}
        self._jobs: queue.SimpleQueue[CompileJob | None] = queue.SimpleQueue()
        self._is_warm = threading.Event()
        self._backend: Any = None
        self._num_compiled = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"grammar-{i}", daemon=True)
            for i in range(config.compile_threads)
        ]
        vocabulary = grammar_vocabulary(token_bytes, control_ids, stop_ids, vocab_size)
        self._warm_up = threading.Thread(
            target=self._load, args=(vocabulary, list(stop_ids)), name="grammar-load", daemon=True
        )
        self._warm_up.start()
        _compilers.add(self)

    def wait_warm(self) -> None:
        """Wait until grammars compile at their usual speed (importing xgrammar takes seconds)."""
        self._warm_up.join()
        if self._backend is None:
            raise GrammarError("grammar_unavailable", "xgrammar could not be loaded")

    def compile(self, spec: GrammarSpec) -> tuple[CompileJob, bool]:
        """The job of a grammar, started if there is none; and whether it was there already."""
        self._settle()
        key = hashlib.sha256(f"{spec.kind}\0{spec.text}".encode()).digest()
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key], True
        if key in self._running:
            return self._running[key], False
        job = CompileJob(spec)
        problem = _text_problem(spec)
        if problem is not None:
            job.error = GrammarError("invalid_grammar", problem)
            job.is_done = True
            return job, False
        self._running[key] = job
        self._jobs.put(job)
        return job, False

    def stats(self) -> dict[str, float]:
        """Counters for StatsReply."""
        self._settle()
        return {
            "grammars_compiled": self._num_compiled,
            "grammars_cached": len(self._cache),
            "grammar_cache_bytes": self._cache_bytes,
            "grammars_compiling": len(self._running),
        }

    def close(self) -> None:
        """Let the workers end, once what they compile now is done; nobody waits for that here."""
        for _ in self._threads:
            self._jobs.put(None)

    def wait_closed(self, timeout_s: float) -> None:
        """After `close`: wait for the workers' end, at most so long."""
        deadline_s = time.monotonic() + timeout_s
        for thread in (self._warm_up, *self._threads):
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def _settle(self) -> None:
        """Move finished jobs into the cache, and drop the least recently used beyond its size."""
        for key in [key for key, job in self._running.items() if job.is_done]:
            job = self._running.pop(key)
            self._num_compiled += 1
            self._cache[key] = job
            self._cache_bytes += job.size_bytes
        while self._cache_bytes > self._config.cache_bytes and self._cache:
            _, dropped = self._cache.popitem(last=False)
            self._cache_bytes -= dropped.size_bytes

    def _load(self, vocabulary: list[bytes], stop_ids: list[int]) -> None:
        import xgrammar  # seconds: it imports transformers

        info = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary),
            stop_token_ids=stop_ids,
        )
        # Its own cache shares rules between grammars, and with it 0.2.8 now and then compiles a
        # grammar whose bitmask allows a token that its matcher refuses (77 of 80,482 random ones;
        # none of 20,000 without). Ours keeps whole grammars, and equal rules of one grammar are
        # merged before it is compiled, which is faster than that cache.
        threads = min(COMPILE_THREADS, os.cpu_count() or 1)
        self._backend = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WORKER_NICENESS)
        while (job := self._jobs.get()) is not None:
            start = time.perf_counter()
            try:
                job.compiled = _compile(self._backend, job.spec)
                job.size_bytes = job.compiled.memory_size_bytes  # half a millisecond of its own
            except Exception as error:  # xgrammar raises what it likes for a bad grammar
                job.error = GrammarError("invalid_grammar", _LOG_PREFIX.sub("", str(error)).strip())
            job.compile_ms = (time.perf_counter() - start) * 1e3
            job.is_done = True
            self._on_done()


_compilers: weakref.WeakSet[GrammarCompiler] = weakref.WeakSet()


@atexit.register
def _end_workers() -> None:
    """Before the interpreter goes: no thread is inside xgrammar any more, if it ends in time."""
    compilers = list(_compilers)
    for compiler in compilers:
        compiler.close()
    for compiler in compilers:
        compiler.wait_closed(EXIT_WAIT_S)


def _compile(backend: Any, spec: GrammarSpec) -> Any:
    import xgrammar  # the worker has loaded it

    match spec.kind:
        case GrammarKind.STRUCTURAL_TAG:
            tag = without_control_in_text(spec.text)
            return _compile_tidied(backend, xgrammar.Grammar.from_structural_tag(tag))
        case GrammarKind.JSON_SCHEMA:
            grammar = xgrammar.Grammar.from_json_schema(
                spec.text, max_whitespace_cnt=MAX_WHITESPACE
            )
            return _compile_tidied(backend, grammar)
        case GrammarKind.REGEX:
            return backend.compile_regex(spec.text)
        case GrammarKind.EBNF:
            return backend.compile_grammar(spec.text)


def _compile_tidied(backend: Any, grammar: Any) -> Any:
    return backend.compile_grammar(merge_equal_rules(with_escapes(str(grammar))))


def _text_problem(spec: GrammarSpec) -> str | None:
    """What would hurt the process rather than be refused by xgrammar."""
    if len(spec.text) > MAX_TEXT_BYTES:
        return f"grammar.text: {len(spec.text)} characters; allowed: {MAX_TEXT_BYTES}"
    if "\0" in spec.text:
        return "grammar.text holds a NUL character"
    if spec.kind in (GrammarKind.REGEX, GrammarKind.EBNF):
        return None  # xgrammar has its own limit there
    depth = deepest = 0
    for token in _JSON_BRACKET.findall(spec.text):
        if token in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token in "]}":
            depth -= 1
    if deepest > MAX_NESTING:
        return f"grammar.text nests {deepest} deep; allowed: {MAX_NESTING}"
    return None
