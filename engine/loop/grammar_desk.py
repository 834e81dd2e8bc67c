# SPDX-License-Identifier: Apache-2.0
"""Those who wait for a grammar: requests not yet submitted, and clients that asked to compile.

Nobody else waits with them: the loop comes by after each compile and each deadline. Does not
know: how a grammar is compiled, what a request does next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.api import GrammarSpec
from engine.errors import GrammarError
from engine.grammar.compiler import CompileJob, GrammarCompiler

Continuation = Callable[[CompileJob, bool], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    job: CompileJob
    was_cached: bool
    deadline_ms: int
    budget_ms: int
    owner: object
    on_ready: Continuation
    on_error: Callable[[GrammarError], None]


class GrammarDesk:
    """Calls each continuation once: when its job is done, or when its budget is over."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._waits: list[_Wait] = []

    @property
    def next_deadline_ms(self) -> int | None:
        """When somebody's budget is over."""
        return min((wait.deadline_ms for wait in self._waits), default=None)

    def stats(self) -> dict[str, float]:
        """Counters of the compiler, and who waits for it."""
        return {**self._compiler.stats(), "grammar_waits": float(len(self._waits))}

    def ask(
        self,
        spec: GrammarSpec,
        owner: object,
        *,
        now_ms: int,
        budget_ms: int,
        on_ready: Continuation,
        on_error: Callable[[GrammarError], None],
    ) -> None:
        """Compile `spec` for `owner`; answers at once if it is cached or refused."""
        job, was_cached = self._compiler.compile(spec)
        wait = _Wait(job, was_cached, now_ms + budget_ms, budget_ms, owner, on_ready, on_error)
        if job.is_done:
            _answer(wait)
        else:
            self._waits.append(wait)

    def withdraw(self, owner: object) -> None:
        """`owner` no longer waits; nothing of it will be called."""
        self._waits = [wait for wait in self._waits if wait.owner is not owner]

    def serve(self, now_ms: int) -> None:
        """Answer whoever's job is done or budget is over."""
        due = [w for w in self._waits if w.job.is_done or now_ms >= w.deadline_ms]
        if not due:
            return
        self._waits = [wait for wait in self._waits if wait not in due]
        for wait in due:
            _answer(wait)


def _answer(wait: _Wait) -> None:
    if not wait.job.is_done:
        text = f"the grammar did not compile within {wait.budget_ms} ms"
        wait.on_error(GrammarError("grammar_budget_exceeded", text))
    elif wait.job.error is not None:
        wait.on_error(wait.job.error)
    else:
        wait.on_ready(wait.job, wait.was_cached)
