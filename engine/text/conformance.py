# SPDX-License-Identifier: Apache-2.0
"""Checks, when a model is loaded, that appending equals a full render under its template.

Each kind of item says whether it does, and what a session does where it does not. Does not know:
how a template is rendered (chat_template does), sessions.
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


_ONE_BY_ONE = "tool_results_one_by_one"
_REASONING = "reasoning_before_user"
_THOUGHT = "qthoughtprobeq"
_REFUSED = "a turn with it is refused: template_refused"
_DIFFERS = "it is appended as a message of its own, at the cost of reading so to the model"
_CONSEQUENCES = {
    _ONE_BY_ONE: "results that come one by one stand as groups of their own; sent together, they "
    "read as the template groups them",
    _REASONING: "reasoning stays as it was sampled (reasoning.history keep); drop_before_last_user "
    "renders such answers anew, as the template would",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceCase:
    """`status`: equal | differs | refused (the template does not take this kind)."""

    kind: str
    status: str
    detail: str = ""

    @property
    def consequence(self) -> str:
        """What a session does with this kind where it is not equal."""
        if self.status == "equal":
            return ""
        return _REFUSED if self.status == "refused" else _CONSEQUENCES.get(self.kind, _DIFFERS)

    @property
    def is_known(self) -> bool:
        """It differs by rules of its template that sessions follow or name."""
        return self.kind in _CONSEQUENCES


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceReport:
    cases: tuple[ConformanceCase, ...]

    @property
    def ok(self) -> bool:
        """No kind of item renders otherwise when it is appended, but by rules that are known."""
        return all(case.status != "differs" or case.is_known for case in self.cases)


def check_conformance(template: ChatTemplate, tokenizer: Tokenizer) -> ConformanceReport:
    """Compare history ids + appended ids with the full render, per kind of new item."""
    cases = [_check(template, tokenizer, kind) for kind in _KINDS]
    cases += [_check_one_by_one(template), _check_reasoning(template, tokenizer)]
    return ConformanceReport(cases=tuple(cases))


def _check_one_by_one(template: ChatTemplate) -> ConformanceCase:
    """Two results appended one after the other, against both at once."""
    second = {**_RESULT, "content": "2"}

    def append(role: str, *messages: Mapping[str, Any]) -> list[int]:
        return template.render_append((role,), messages, add_generation_prompt=False)

    try:
        both = append("assistant", _RESULT, second)
        single = append("assistant", _RESULT) + append("tool", second)
    except TextError as error:
        return ConformanceCase(kind=_ONE_BY_ONE, status="refused", detail=str(error))
    if single == both:
        return ConformanceCase(kind=_ONE_BY_ONE, status="equal")
    detail = _first_difference(single, both)
    return ConformanceCase(kind=_ONE_BY_ONE, status="differs", detail=detail)


def _check_reasoning(template: ChatTemplate, tokenizer: Tokenizer) -> ConformanceCase:
    """Whether a full render still shows reasoning once the user has spoken again."""
    answer = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    try:
        last = template.render([*_OPENING, answer])
        later = template.render([*_OPENING, answer, _USER])
    except TextError as error:
        return ConformanceCase(kind=_REASONING, status="refused", detail=str(error))
    shown, kept = (_THOUGHT in tokenizer.decode(ids) for ids in (last, later))
    if shown and not kept:
        detail = "the template leaves reasoning out once a user's message follows"
        return ConformanceCase(kind=_REASONING, status="differs", detail=detail)
    return ConformanceCase(kind=_REASONING, status="equal")


def _check(template: ChatTemplate, tokenizer: Tokenizer, kind: str) -> ConformanceCase:
    new, is_closed = _KINDS[kind]
    answer = {"role": "assistant", "content": _ANSWER}
    try:
        full = template.render([*_OPENING, answer, *new], add_generation_prompt=True)
    except TextError as error:
        return ConformanceCase(kind=kind, status="refused", detail=str(error))
    try:
        history = template.render(_OPENING, add_generation_prompt=True)
        history += template.answer_opening() + tokenizer.encode(_ANSWER)
        if is_closed and template.end_token_id is not None:
            history.append(template.end_token_id)
        roles = ("system", "user", "assistant")
        history += template.render_append(
            roles,
            new,
            add_generation_prompt=True,
            assistant_closed=is_closed and template.end_token_id is not None,
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
