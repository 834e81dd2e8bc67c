# SPDX-License-Identifier: Apache-2.0
"""Messages to token ids through the model's own chat template, whole or only what is new.

Text of a client never becomes a control token (control_safety). `render_append` renders new
messages behind a placeholder conversation, so its cost does not grow with the history.
Does not know: HTTP, sessions, tool schemas; a tool is whatever JSON the template takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jinja2

from engine.text.control_safety import Neutraliser, TextParts, choose_sentinel, strings_in
from engine.text.errors import MessageShapeError, TemplateRenderError
from engine.text.placeholders import (
    ASSISTANT_MARK,
    CALL_ID,
    PROBE_TOOL,
    USER_MARK,
    Message,
    behind,
    placeholder_call,
    unused_mark,
    with_parsed_arguments,
)
from engine.text.template_env import TemplateRefusal, compile_template, variables_of
from engine.text.tokenizer import Tokenizer
from engine.text.turn_ends import TurnEnds

MAX_CLOSINGS = 256  # kept of what a template says without a message


class ChatTemplate:
    """A compiled template bound to its tokenizer.

    Args:
        source: the Jinja text.
        variables: what the template may refer to besides the messages (bos_token, ...).
        eos_ids: the tokens that the model is known to stop at.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        """Raises ChatTemplateError where the template does not compile."""
        self.source = source
        self._tokenizer = tokenizer
        self._template = compile_template(source)
        self.variable_names = variables_of(source)
        self._variables = dict(variables or {})
        self._closings: dict[tuple[str, bool, bool, str], tuple[int, ...]] = {}
        added = tokenizer.added_tokens
        self._guard_all = Neutraliser(added)
        # What an assistant wrote may hold markup tokens: they were its own tokens.
        self._guard_control = Neutraliser(t for t, token in added.items() if not token.is_markup)
        self._sends_string_arguments = self._probe_string_arguments()
        self.supports_tools = self._probe_tools()
        self.ends = self._probe_ends(eos_ids)

    def answer_opening(self) -> list[int]:
        """Ids between the request for an answer and its text, once a user has spoken behind it.

        Empty for most: some families write which channel a text is on.
        """
        user = {"role": "user", "content": USER_MARK}
        spoken = {"role": "assistant", "content": ASSISTANT_MARK}
        try:
            asked = self._render_text(messages=[user], tools=None, add_generation_prompt=True)
            text = self._render_text(
                messages=[user, spoken, user], tools=None, add_generation_prompt=True
            )
        except TemplateRenderError:
            return []
        before, found, _ = text.partition(ASSISTANT_MARK)
        opening = before.removeprefix(asked)
        if not found or opening == before:
            return []
        return self._tokenizer.encode_with_control(opening)

    @property
    def end_token_id(self) -> int | None:
        """What an answer ends with in a history."""
        return self.ends.middle

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of a whole conversation.

        Raises:
            MessageShapeError: a message without a role, or with content that is not text.
            TemplateRenderError: the template refused the messages.
        """
        sentinel, text = self._render_guarded(messages, tools, add_generation_prompt, kwargs)
        return self._tokenizer.encode_with_control(text, drop=sentinel)

    def render_append(
        self,
        before: Sequence[str],
        new_messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        assistant_closed: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Ids to put behind a history of token ids, so that the sum reads as a full render.

        Args:
            before: roles of the messages already in the history; only the last one counts.
            new_messages: what is new; may be empty, to close the history or to ask for a turn.
            assistant_closed: where the history ends in an assistant turn: its last id is the
                end-of-turn token. False: the turn was cut short, and is closed here first.
            tools: give them only where the template refuses tool results without.

        Raises:
            MessageShapeError, TemplateRenderError: as `render`.
        """
        if not before:
            return self.render(
                new_messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
            )
        role, options = before[-1], (tools, add_generation_prompt, kwargs)
        if new_messages or tools:
            return self._append(role, new_messages, assistant_closed, options)
        # What asks for an answer, or closes one, is the same in every turn.
        key = (role, assistant_closed, add_generation_prompt, repr(sorted(kwargs.items())))
        ids = self._closings.get(key)
        if ids is None:
            ids = tuple(self._append(role, [], assistant_closed, options))
            if len(self._closings) < MAX_CLOSINGS:
                self._closings[key] = ids
        return list(ids)

    def _append(
        self,
        role: str,
        new_messages: Sequence[Message],
        assistant_closed: bool,
        options: tuple[Any, ...],
    ) -> list[int]:
        if role == "assistant":
            sentinel, rest = self._after_assistant(new_messages, options)
            rest = self._without_end_token(rest) if assistant_closed else rest
        else:
            sentinel, rest = self._after_message(role, new_messages, options)
        return self._tokenizer.encode_with_control(rest, drop=sentinel)

    def _after_assistant(
        self, new_messages: Sequence[Message], options: tuple[Any, ...]
    ) -> tuple[str, str]:
        """(sentinel, text behind the content of a placeholder assistant turn)."""
        mark = unused_mark(ASSISTANT_MARK, [*new_messages, options[0], options[2]])
        user = {"role": "user", "content": USER_MARK}
        plain = {"role": "assistant", "content": mark}
        try:
            sentinel, text = self._render_guarded([user, plain, *new_messages], *options)
        except TemplateRenderError:
            # Some templates take a tool result only behind a call.
            called = [user, placeholder_call(new_messages, mark), *new_messages]
            sentinel, text = self._render_guarded(called, *options)
            return sentinel, self._from_end_token(behind(text, mark))
        return sentinel, behind(text, mark)

    def _after_message(
        self, role: str, new_messages: Sequence[Message], options: tuple[Any, ...]
    ) -> tuple[str, str]:
        """(sentinel, text behind a whole placeholder message of this role)."""
        mark = unused_mark("Qplaceholderlastq", [*new_messages, *options])
        last = {"role": role, "content": mark}
        if role == "tool":
            last["tool_call_id"] = CALL_ID
        opening = self._opening_for(last, options)
        tools, _, kwargs = options
        closed = behind(self._render_guarded([*opening, last], tools, False, kwargs)[1], mark)
        sentinel, text = self._render_guarded([*opening, last, *new_messages], *options)
        rest = behind(text, mark)
        if rest.startswith(closed):
            return sentinel, rest[len(closed) :]
        # The template folds the new message into the one before, which is already in the
        # history as a whole: the new one then stands as a group of its own.
        sentinel, rest = self._after_assistant(new_messages, options)
        return sentinel, self._without_end_token(rest).lstrip("\n")

    def _opening_for(self, last: Message, options: tuple[Any, ...]) -> list[Message]:
        """Placeholder messages that may stand before this one."""
        if last["role"] == "system":
            return []
        user: Message = {"role": "user", "content": USER_MARK}
        plain: list[Message] = [user, {"role": "assistant", "content": ASSISTANT_MARK}]
        if last["role"] != "tool":
            return plain
        tools, _, kwargs = options
        try:
            self._render_guarded([*plain, last], tools, False, kwargs)
        except TemplateRenderError:
            return [user, placeholder_call([last], ASSISTANT_MARK)]
        return plain

    def _without_end_token(self, text: str) -> str:
        """What follows the token that ends the turn."""
        found = self._end_in(text)
        return text if found is None else text[found[1] :]

    def _from_end_token(self, text: str) -> str:
        """The text from the token that ends the turn on, without what a call printed."""
        found = self._end_in(text)
        return text if found is None else text[found[0] :]

    def _end_in(self, text: str) -> tuple[int, int] | None:
        """Where the first token that ends a turn stands in a rendered text."""
        spelled = [
            self._tokenizer.token_bytes(i, with_control=True).decode() for i in self.ends.ids
        ]
        places = [(text.find(end), end) for end in spelled if end in text]
        return min(((at, at + len(end)) for at, end in places), default=None)

    def _render_guarded(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> tuple[str, str]:
        """(sentinel, rendered text with sentinels)."""
        shaped = [self._shape(message, index) for index, message in enumerate(messages)]
        payload = [shaped, list(tools or []), kwargs]
        sentinel = choose_sentinel([self.source, *strings_in(payload)])
        guarded = [
            (self._guard_control if m["role"] == "assistant" else self._guard_all).apply(
                m, sentinel
            )
            for m in shaped
        ]
        return sentinel, self._render_text(
            messages=guarded,
            tools=self._guard_all.apply(list(tools), sentinel) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **self._guard_all.apply(dict(kwargs), sentinel),
        )

    def _guard_of(self, message: Message) -> Neutraliser:
        return self._guard_control if message["role"] == "assistant" else self._guard_all

    def _render_text(self, **variables: Any) -> str:
        try:
            return self._template.render({"documents": None, **self._variables, **variables})
        except TemplateRefusal as error:
            raise TemplateRenderError(f"messages: the chat template refuses: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TemplateRenderError(
                f"messages: the chat template failed: {type(error).__name__}: {error}"
            ) from error

    def _shape(self, message: Message, index: int) -> dict[str, Any]:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise MessageShapeError(f"messages[{index}].role: {role!r}; allowed: a role name")
        if content is not None and not isinstance(content, str | TextParts):
            raise MessageShapeError(
                f"messages[{index}].content: {type(content).__name__}; allowed: text or null"
            )
        shaped = {**message, "content": content or ""}
        calls = message.get("tool_calls")
        if calls and not self._sends_string_arguments:
            shaped["tool_calls"] = [with_parsed_arguments(call) for call in calls]
        return shaped

    def _probe_string_arguments(self) -> bool:
        """Whether call arguments given as text come out as that very text."""
        text = '{"q":  "probe"}'
        call = {"type": "function", "function": {"name": "f", "arguments": text}, "id": "call00000"}
        messages = [
            {"role": "user", "content": USER_MARK},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return text in self._render_text(
                messages=messages, tools=None, add_generation_prompt=False
            )
        except TemplateRenderError:
            return False

    def _probe_tools(self) -> bool:
        messages = [{"role": "user", "content": USER_MARK}]
        try:
            text = self._render_text(
                messages=messages, tools=[PROBE_TOOL], add_generation_prompt=True
            )
        except TemplateRenderError:
            return False
        return "qprobetoolq" in text

    def _probe_ends(self, eos_ids: Collection[int]) -> TurnEnds:
        """The tokens behind an assistant's content and behind its calls, if there are any."""
        user = {"role": "user", "content": USER_MARK}
        spoken = {"role": "assistant", "content": ASSISTANT_MARK}
        control = self._tokenizer.control_ids
        last = self._first_behind([user, spoken], control)
        if last is None:
            return TurnEnds()
        middle = self._middle_end([user, spoken, user], last)
        result = {"role": "tool", "content": "q", "name": "f", "tool_call_id": CALL_ID}
        called = [user, placeholder_call([result], ASSISTANT_MARK), result]
        ends = frozenset(i for i in (last, middle, *eos_ids) if i is not None)
        return TurnEnds(last=last, middle=middle, call=self._first_behind(called, ends))

    def _middle_end(self, messages: list[Message], last: int) -> int | None:
        """What ends an answer that is not the last; None where the next message just begins."""
        try:
            text = self._render_text(messages=messages, tools=None, add_generation_prompt=False)
            rest = behind(text, ASSISTANT_MARK)
        except TemplateRenderError:
            return last  # two users around an answer are no conversation to it
        between = self._control_in(rest.partition(USER_MARK)[0])
        opening = self._control_in(text.partition(USER_MARK)[0])
        # Without an end in histories a cut answer and a whole one are continued alike: no harm
        # where a second kind of end also stands in an opening.
        if not between or (between[0] != last and between[0] in opening):
            return None
        return between[0]

    def _control_in(self, text: str) -> list[int]:
        ids = self._tokenizer.encode_with_control(text)
        return [i for i in ids if i in self._tokenizer.control_ids]

    def _first_behind(self, messages: list[Message], wanted: Collection[int]) -> int | None:
        """The first of these control tokens behind the assistant's mark."""
        try:
            text = self._render_text(messages=messages, tools=None, add_generation_prompt=False)
            ids = self._tokenizer.encode_with_control(behind(text, ASSISTANT_MARK))
        except TemplateRenderError:
            return None
        return next((i for i in ids if i in wanted), None)
