# SPDX-License-Identifier: Apache-2.0
"""Rendering by items: what is appended reads as the whole conversation rendered at once, also for
templates that know tools themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.prompts import Head, HistoryEnd, PromptRenderer
from appliance.services import tool_format_of
from engine.text.assets import TextAssets, load_text_assets
from sessions.items import Item, parse_items
from sessions.token_codec import decode_ids, encode_ids
from tests.fakes.appliance import default_assets
from tests.fakes.hf_text import FAMILIES, write_hf_text
from tools_schema.tool_spec import ToolSet, parse_tools

TOOLS = parse_tools(
    [
        {
            "type": "function",
            "name": "ls",
            "description": "List",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        }
    ]
)
CALL = {"type": "function_call", "call_id": "call00000", "name": "ls", "arguments": '{"path": "a"}'}
RESULT = {"type": "function_call_output", "call_id": "call00000", "output": "x.py"}


def renderer_of(assets: TextAssets) -> PromptRenderer:
    return PromptRenderer(assets, tool_format_of(assets))


@pytest.fixture(params=sorted(FAMILIES))
def assets(request: pytest.FixtureRequest, tmp_path: Path) -> TextAssets:
    return load_text_assets(str(write_hf_text(tmp_path, request.param)))


def text_of(assets: TextAssets, ids: bytes | list[int]) -> str:
    listed = decode_ids(ids) if isinstance(ids, bytes) else ids
    return assets.tokenizer.decode(listed, with_control=True)


class Conversation:
    """A history that grows as a session's does."""

    def __init__(self, assets: TextAssets, head: Head) -> None:
        self.assets = assets
        self.renderer = renderer_of(assets)
        self.head = head
        self.ids = self.renderer.render_head(head)
        self.last: Item | None = None
        self.is_closed = True

    def ask(self, raw: list[dict[str, Any]]) -> None:
        items = parse_items(raw)
        role = self.renderer.role_of(self.last, has_tokens=bool(self.ids))
        end = HistoryEnd(role=role, is_closed=self.is_closed, call_names={"call00000": "ls"})
        self.ids += self.renderer.render_turn(end, items, self.head).token_ids
        self.last = items[-1]

    def answer(self, text: str, raw: dict[str, Any]) -> None:
        self.ids += encode_ids(self.assets.tokenizer.encode_with_control(text))
        end_id = self.assets.chat_template.end_token_id
        if end_id is not None:
            self.ids += encode_ids([end_id])
        self.last = parse_items([raw])[0]


def test_appended_turns_equal_the_whole_conversation_for_every_template(
    assets: TextAssets,
) -> None:
    talk = Conversation(assets, Head("Be brief.", ToolSet()))
    talk.ask([{"role": "user", "content": "one  two"}])
    talk.answer("three", {"role": "assistant", "content": "three"})
    talk.ask([{"role": "user", "content": "four\n"}])
    whole = assets.chat_template.render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one  two"},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "four\n"},
        ],
        add_generation_prompt=True,
    )
    assert text_of(assets, talk.ids) == text_of(assets, whole)
    assert decode_ids(talk.ids) == whole


def test_tools_are_declared_once_and_results_follow_their_calls(assets: TextAssets) -> None:
    talk = Conversation(assets, Head("Be brief.", TOOLS))
    talk.ask([{"role": "user", "content": "look"}])
    talk.answer("called", CALL)
    talk.ask([RESULT])
    text = text_of(assets, talk.ids)
    assert text.count('"name": "ls"') == 1 and text.count("Be brief.") == 1
    assert text.index("look") < text.index("called") < text.index("x.py")


def test_a_stateless_chat_declares_its_tools_beside_its_own_system_message() -> None:
    renderer = renderer_of(default_assets())
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "look"},
    ]
    ids = renderer.render_chat(messages, TOOLS)
    text = text_of(default_assets(), ids)
    assert text.count("<|im_start|>system") == 1 and text.rstrip().endswith("assistant")
    session = renderer.render_head(Head("Be brief.", TOOLS))
    assert ids.startswith(session), "a chat and a session of one head share its prefix"


def test_item_ends_say_where_each_message_ends() -> None:
    renderer = renderer_of(default_assets())
    items = parse_items([{"role": "user", "content": text} for text in ("a", "b b", "c")])
    end = HistoryEnd(role=None, call_names={})
    rendered = renderer.render_turn(end, items, Head(None, ToolSet()))
    for number, item_end in enumerate(rendered.item_token_ends, 1):
        alone = renderer.render_turn(
            end, items[:number], Head(None, ToolSet()), add_generation_prompt=False
        )
        assert decode_ids(alone.token_ids) == decode_ids(rendered.token_ids)[:item_end]


def test_results_of_one_group_have_no_ends_of_their_own() -> None:
    renderer = renderer_of(default_assets())
    results = parse_items([{**RESULT, "call_id": f"c{n}"} for n in range(2)])
    end = HistoryEnd(role="assistant", call_names={})
    assert renderer.render_turn(end, results, Head(None, TOOLS)).item_token_ends == ()
