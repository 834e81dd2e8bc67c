# SPDX-License-Identifier: Apache-2.0
"""Items and chat messages -> prompt token ids, by the model's template and its tool format.

History is never rendered again: `render_turn` renders what is new behind stored ids. A model whose
template knows no tools gets them as text of its tool format. Does not know: stores, the engine,
HTTP, grammars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.text.assets import TextAssets
from engine.text.control_safety import Literal, TextParts
from engine.text.errors import TextError
from sessions.items import Compaction, FunctionCall, FunctionCallOutput, Item, Message
from sessions.token_codec import count, encode_ids
from tools_schema.formats.base import ToolFormat
from tools_schema.rendering import (
    CallText,
    FormatText,
    Pieces,
    ResultText,
    call_pieces,
    result_pieces,
    system_pieces,
)
from tools_schema.tool_spec import ToolSet, ToolSpec

TemplateMessage = dict[str, Any]
SUMMARY_OPENING = "Summary of the conversation so far:\n\n"
LEFT_OUT = "Earlier messages of this conversation were left out."
USER_PROBE = "Go on."
PROBE_TOOLS = ToolSet((ToolSpec(name="qprobetoolq"),))


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedInput:
    """New token ids, and where each new item ends among them (empty: not known)."""

    token_ids: bytes
    item_token_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """What a conversation starts with, and what its template is told besides (`options`)."""

    instructions: str | None
    toolset: ToolSet
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEnd:
    """Where a history stands: all that rendering needs to know of it.

    role: of its last message; None where there is none.
    is_closed: whether its last assistant message has its end-of-turn token.
    call_names: names of the calls that new outputs answer, by call id.
    """

    role: str | None
    is_closed: bool = True
    call_names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Group:
    """Items that become one template message, or several that cannot be told apart."""

    messages: list[TemplateMessage]
    num_items: int


class PromptRenderer:
    """Renders for one loaded model."""

    def __init__(self, assets: TextAssets, tool_format: ToolFormat) -> None:
        self.assets = assets
        self.tool_format = tool_format
        self._template = assets.chat_template
        self._template_has_tools = assets.chat_template.supports_tools
        self.takes_users_in_a_row = self._probe_users_in_a_row()
        self._stands_alone = {
            has_tools: self._probe_head(PROBE_TOOLS if has_tools else ToolSet())
            for has_tools in (False, True)
        }

    # Sessions -----------------------------------------------------------------------------

    def render_head(self, head: Head) -> bytes:
        """Return the ids a history starts with: the system message, where it can stand alone.

        b"" where there is none, or where the template wants a first message beside it: then
        `render_turn` puts it in front of that.
        """
        messages = self._head_messages(head)
        if not messages or not self._stands_alone[len(head.toolset) > 0]:
            return b""
        tools = self._tools(head.toolset)
        return encode_ids(
            self._template.render(
                messages, tools=tools, add_generation_prompt=False, **head.options
            )
        )

    def render_turn(
        self,
        end: HistoryEnd,
        items: Sequence[Item],
        head: Head,
        *,
        add_generation_prompt: bool = True,
    ) -> RenderedInput:
        """Render only the new items, to be put behind a history that ends like `end`.

        Raises: TemplateRenderError where the template refuses the items.
        """
        ids: list[int] = []
        ends: list[int] = []
        role, is_closed = end.role, end.is_closed
        for group in self._groups(items, end.call_names):
            ids += self._append(role, group.messages, head, is_closed, False)
            role, is_closed = str(group.messages[-1]["role"]), True
            if role == "assistant":
                ids = self._to_its_end(ids, head)
            ends += [len(ids)] * group.num_items
        if add_generation_prompt:
            ids += self._append(role, [], head, is_closed, True)
        exact = len(set(ends)) == len(ends)
        return RenderedInput(
            token_ids=encode_ids(ids), item_token_ends=tuple(ends) if exact else ()
        )

    def render_before(
        self, items: Sequence[Item], head: Head, *, role: str | None, kept_behind: bool | None
    ) -> RenderedInput:
        """Render items that are put in front of ids which stay as they are.

        Args:
            role: of the message in front of the items.
            kept_behind: what the first of those ids were rendered behind: an assistant's message
                with its end-of-turn token (True) or without (False), or something else (None).
        """
        names = {i.call_id: i.name for i in items if isinstance(i, FunctionCall)}
        rendered = self.render_turn(
            HistoryEnd(role=role, call_names=names), items, head, add_generation_prompt=False
        )
        if kept_behind is None:
            return rendered
        # Those ids begin with what closes an assistant's message: it would be there twice.
        closing = self._closing(head, kept_behind)
        if self.role_of(items[-1], has_tokens=True) == "assistant":
            closing = closing[: len(closing) - len(self._closing(head, True))]
        ids = rendered.token_ids.removesuffix(encode_ids(closing))
        ends = tuple(min(end, count(ids)) for end in rendered.item_token_ends)
        return RenderedInput(token_ids=ids, item_token_ends=ends)

    def _closing(self, head: Head, is_closed: bool) -> list[int]:
        """What a message behind an assistant's begins with, before it says anything itself."""
        return self._template.render_append(
            ("assistant",),
            [],
            add_generation_prompt=False,
            assistant_closed=is_closed,
            **head.options,
        )

    def _to_its_end(self, ids: list[int], head: Head) -> list[int]:
        """Ids that end with a rendered answer, up to its end-of-turn token: as if it was sampled.

        What follows that token comes with the message behind it.
        """
        rest = self._closing(head, True)
        return ids[: len(ids) - len(rest)] if rest and ids[-len(rest) :] == rest else ids

    def generation_prompt(self, role: str | None, head: Head) -> bytes:
        """Return what asks for an answer behind a message of this role."""
        return encode_ids(self._append(role, [], head, True, True))

    def render_spoken(
        self, role: str | None, items: Sequence[Item], head: Head, is_closed: bool
    ) -> bytes | None:
        """Render an answer as it reads once the user has spoken again, behind a message of `role`.

        It ends with its end-of-turn token, or (not `is_closed`) in front of that. None where the
        template gives it no end that could be told.
        """
        if role is None:
            return None
        user: TemplateMessage = {"role": "user", "content": USER_PROBE}
        messages = [m for group in self._groups(items, {}) for m in group.messages]
        spoken = messages or [{"role": "assistant", "content": ""}]
        whole = encode_ids(self._append(role, [*spoken, user], head, True, False))
        behind = encode_ids(self._append("assistant", [user], head, is_closed, False))
        return whole.removesuffix(behind) if whole.endswith(behind) else None

    def role_of(self, last: Item | None, has_tokens: bool) -> str | None:
        """Return the template role of a history whose last item is `last`."""
        if last is None:
            return "system" if has_tokens else None
        if isinstance(last, Message):
            return _template_role(last.role)
        if isinstance(last, FunctionCallOutput):
            return "tool" if self._template_has_tools else self.tool_format.result_role
        return "user" if isinstance(last, Compaction) else "assistant"

    # Stateless chat -----------------------------------------------------------------------

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        toolset: ToolSet,
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Render a whole conversation of chat messages (content already text).

        options: what the template is told besides.
        """
        rendered = self._with_head(self._chat_messages(messages), toolset)
        return encode_ids(
            self._template.render(
                rendered,
                tools=self._tools(toolset),
                add_generation_prompt=add_generation_prompt,
                **(options or {}),
            )
        )

    def append_chat(
        self,
        history: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        is_closed: bool,
        options: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Render only `new`, to be put behind the ids of `history`, and ask for an answer.

        `history` ends with an answer; `is_closed`: with its end-of-turn token.
        Raises: TemplateRenderError.
        """
        shaped = self._chat_messages([*history, *new])[len(self._chat_messages(history)) :]
        return encode_ids(
            self._template.render_append(
                ("assistant",),
                shaped,
                add_generation_prompt=True,
                assistant_closed=is_closed,
                **(options or {}),
            )
        )

    def encode_prompt(self, text: str) -> bytes:
        """Encode plain text as a prompt of its own."""
        return encode_ids(self.assets.tokenizer.encode_prompt(text))

    # Inside -------------------------------------------------------------------------------

    def _append(
        self,
        role: str | None,
        messages: list[TemplateMessage],
        head: Head,
        is_closed: bool,
        add_generation_prompt: bool,
    ) -> list[int]:
        if role is not None:
            return self._template.render_append(
                (role,),
                messages,
                add_generation_prompt=add_generation_prompt,
                assistant_closed=is_closed,
                **head.options,
            )
        if not messages:
            return []
        return self._template.render(
            [*self._head_messages(head), *messages],
            tools=self._tools(head.toolset),
            add_generation_prompt=add_generation_prompt,
            **head.options,
        )

    def _probe_users_in_a_row(self) -> bool:
        """Whether a user may speak twice: some templates want turns to alternate."""
        user: TemplateMessage = {"role": "user", "content": USER_PROBE}
        try:
            self._template.render([user, user])
        except TextError:
            return False
        return True

    def _probe_head(self, toolset: ToolSet) -> bool:
        """Whether a head renders alone just as in front of a message, its tools declared in it.

        Some templates declare tools in the first message of the user.
        """
        head = self._head_messages(Head("probe", toolset))
        tools = self._tools(toolset)
        try:
            alone = self._template.render(head, tools=tools)
            whole = self._template.render([*head, {"role": "user", "content": "q"}], tools=tools)
        except TextError:
            return False
        text = self.assets.tokenizer.decode(alone, with_control=True)
        return whole[: len(alone)] == alone and all(name in text for name in toolset.names)

    def _tools(self, toolset: ToolSet) -> list[dict[str, Any]] | None:
        if not self._template_has_tools or not len(toolset):
            return None
        return [tool.as_chat() for tool in toolset]

    def _head_messages(self, head: Head) -> list[TemplateMessage]:
        text = head.instructions or ""
        if self._template_has_tools:
            return [{"role": "system", "content": text}] if text else []
        pieces = system_pieces(self.tool_format, head.toolset, text)
        return [{"role": "system", "content": _text_parts(pieces)}] if pieces else []

    def _with_head(
        self, messages: list[TemplateMessage], toolset: ToolSet
    ) -> list[TemplateMessage]:
        """Declare the tools in the conversation's own system message, or in a new one."""
        if self._template_has_tools or not len(toolset):
            return messages
        rest, instructions = messages, ""
        if messages and messages[0]["role"] == "system":
            rest, instructions = messages[1:], messages[0]["content"]
        return [*self._head_messages(Head(instructions, toolset)), *rest]

    def _groups(self, items: Sequence[Item], call_names: Mapping[str, str]) -> list[_Group]:
        groups: list[_Group] = []
        index = 0
        while index < len(items):
            kind = _kind(items[index])
            end = index + 1
            while end < len(items) and kind != "message" and _kind(items[end]) == kind:
                end += 1
            groups.append(_Group(self._messages(items[index:end], call_names), end - index))
            index = end
        return groups

    def _messages(
        self, items: Sequence[Item], call_names: Mapping[str, str]
    ) -> list[TemplateMessage]:
        first = items[0]
        if isinstance(first, Message) and first.role != "assistant":
            return [{"role": _template_role(first.role), "content": first.text}]
        if isinstance(first, FunctionCallOutput):
            return self._result_messages(
                [
                    ResultText(
                        call_id=item.call_id,
                        name=call_names.get(item.call_id, ""),
                        output=item.text
                        if item.status == "completed" or item.text
                        else item.status,
                    )
                    for item in items
                    if isinstance(item, FunctionCallOutput)
                ]
            )
        if isinstance(first, Compaction):
            return [
                {"role": "user", "content": compaction_text(item)}
                for item in items
                if isinstance(item, Compaction)
            ]
        text = "".join(item.text for item in items if isinstance(item, Message))
        calls = [
            CallText(name=item.name, arguments=item.arguments, call_id=item.call_id)
            for item in items
            if isinstance(item, FunctionCall)
        ]
        return [self._assistant_message(text, calls)]

    def _assistant_message(self, text: str, calls: Sequence[CallText]) -> TemplateMessage:
        if not self._template_has_tools or not calls:
            pieces = call_pieces(self.tool_format, calls)
            return {"role": "assistant", "content": _text_parts((text, *pieces)) if calls else text}
        wire_calls = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
        return {"role": "assistant", "content": text, "tool_calls": wire_calls}

    def _result_messages(self, results: Sequence[ResultText]) -> list[TemplateMessage]:
        if self._template_has_tools:
            return [
                {"role": "tool", "content": r.output, "name": r.name, "tool_call_id": r.call_id}
                for r in results
            ]
        role, pieces = result_pieces(self.tool_format, results)
        return [{"role": role, "content": _text_parts(pieces)}]

    def _chat_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[TemplateMessage]:
        """Chat messages as the template takes them; runs of tool results become one group."""
        rendered: list[TemplateMessage] = []
        names: dict[str, str] = {}
        results: list[ResultText] = []
        for message in messages:
            if message["role"] == "tool":
                call_id = message.get("tool_call_id", "")
                results.append(
                    ResultText(
                        call_id=call_id, name=names.get(call_id, ""), output=message["content"]
                    )
                )
                continue
            if results:
                rendered += self._result_messages(results)
                results = []
            calls = [
                CallText(
                    name=call["function"]["name"],
                    arguments=call["function"].get("arguments") or "{}",
                    call_id=call.get("id", ""),
                )
                for call in message.get("tool_calls") or ()
            ]
            names.update({call.call_id: call.name for call in calls})
            if message["role"] == "assistant":
                spoken = self._assistant_message(message["content"], calls)
                if message.get("reasoning_content"):  # the template says whether it is shown
                    spoken["reasoning_content"] = message["reasoning_content"]
                rendered.append(spoken)
            else:
                rendered.append(
                    {"role": _template_role(message["role"]), "content": message["content"]}
                )
        return rendered + (self._result_messages(results) if results else [])


def compaction_text(item: Compaction) -> str:
    """What the model reads where older items were: their summary, or that there is none."""
    return SUMMARY_OPENING + item.summary if item.summary else LEFT_OUT


def _text_parts(pieces: Pieces) -> TextParts:
    """Text of which only the format's own may spell control tokens."""
    return TextParts(Literal(p) if isinstance(p, FormatText) else p for p in pieces)


def _template_role(role: str) -> str:
    return "system" if role == "developer" else role


def _kind(item: Item) -> str:
    """Items of one kind in a row share a template message, but messages of people never do."""
    if isinstance(item, Message) and item.role != "assistant":
        return "message"
    if isinstance(item, FunctionCallOutput):
        return "results"
    return "compaction" if isinstance(item, Compaction) else "assistant"
