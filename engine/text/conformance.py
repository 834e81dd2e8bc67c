# SPDX-License-Identifier: Apache-2.0
"""Checks, when a model is loaded, that appending equals a full render under its template.

Does not know: how a template is rendered (chat_template does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.text.chat_template import ChatTemplate
from engine.text.errors import TextError
from engine.text.tokenizer import Tokenizer

_OPENING = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Read a file, please."},
)
_ANSWER = "Here is what I found"
_USER = {"role": "user", "content": "Go on.\n\n  def f(x): return x < 2\n"}
_RESULT = {"role": "tool", "content": '{"ok": true}\n', "name": "f", "tool_call_id": "call00000"}
_KINDS: Mapping[str, tuple[Sequence[Mapping[str, Any]], bool]] = {
    "user": ((_USER,), True),
    "user_after_open_assistant": ((_USER,), False),
    "tool_result": ((_RESULT,), True),
    "tool_results": ((_RESULT, {**_RESULT, "content": "2"}), True),
    "tool_result_after_open_assistant": ((_RESULT,), False),
    "tool_result_then_user": ((_RESULT, _USER), True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceCase:
    """`status`: equal | differs | refused (the template does not take this kind)."""

    kind: str
    status: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceReport:
    cases: tuple[ConformanceCase, ...]

    @property
    def ok(self) -> bool:
        """No kind of item renders otherwise when it is appended."""
        return all(case.status != "differs" for case in self.cases)


def check_conformance(template: ChatTemplate, tokenizer: Tokenizer) -> ConformanceReport:
    """Compare history ids + appended ids with the full render, per kind of new item."""
    return ConformanceReport(cases=tuple(_check(template, tokenizer, kind) for kind in _KINDS))


def _check(template: ChatTemplate, tokenizer: Tokenizer, kind: str) -> ConformanceCase:
    new, is_closed = _KINDS[kind]
    answer = {"role": "assistant", "content": _ANSWER}
    try:
        full = template.render([*_OPENING, answer, *new], add_generation_prompt=True)
    except TextError as error:
        return ConformanceCase(kind=kind, status="refused", detail=str(error))
    try:
        history = template.render(_OPENING, add_generation_prompt=True)
        history += tokenizer.encode(_ANSWER)
        if is_closed and template.end_token_id is not None:
            history.append(template.end_token_id)
        roles = ("system", "user", "assistant")
        history += template.render_append(
            roles, new, add_generation_prompt=True, assistant_closed=is_closed
        )
    except TextError as error:
        return ConformanceCase(kind=kind, status="differs", detail=str(error))
    if history == full:
        return ConformanceCase(kind=kind, status="equal")
    return ConformanceCase(kind=kind, status="differs", detail=_first_difference(history, full))


def _first_difference(appended: Sequence[int], full: Sequence[int]) -> str:
    pairs = zip(appended, full, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(appended), len(full)))
    return f"token {at}: appended {list(appended[at : at + 4])}, full {list(full[at : at + 4])}"
