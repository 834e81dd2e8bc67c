# SPDX-License-Identifier: Apache-2.0
"""Rendering against transformers; appending against full renders; control tokens against text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.text.assets import TextAssets, load_text_assets
from engine.text.chat_template import ChatTemplate
from engine.text.conformance import check_conformance
from engine.text.errors import ChatTemplateError, MessageShapeError, TemplateRenderError
from tests.fakes.hf_text import FAMILIES, write_hf_text

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file \u2014 all of it.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "read_file", "arguments": {"path": "a<b>.py"}},
        }
    ],
}
_CONVERSATION = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "  Read a.py\n\n"},
    _CALL,
    {"role": "tool", "content": '{"text": "x < 1"}', "tool_call_id": "call_1", "name": "read_file"},
    {"role": "assistant", "content": "Done: caf\u00e9."},
    {"role": "user", "content": "Thanks & bye"},
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_hf_text(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def models(directories: dict[str, Path]) -> dict[str, TextAssets]:
    loaded = {family: load_text_assets(str(path)) for family, path in directories.items()}
    return {**loaded, "smollm2": load_text_assets("default")}


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_render_equals_transformers(
    directories: dict[str, Path],
    models: dict[str, TextAssets],
    family: str,
    with_tools: bool,
    add_generation_prompt: bool,
) -> None:
    reference = AutoTokenizer.from_pretrained(directories[family])
    tools = _TOOLS if with_tools else None
    for end in range(2, len(_CONVERSATION) + 1):
        expected = reference.apply_chat_template(
            _CONVERSATION[:end],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            return_dict=False,
        )
        found = models[family].chat_template.render(
            _CONVERSATION[:end], tools=tools, add_generation_prompt=add_generation_prompt
        )
        assert found == expected


def test_what_a_template_supports_is_found_out(models: dict[str, TextAssets]) -> None:
    supports = {name: m.chat_template.supports_tools for name, m in models.items()}
    assert supports == {
        "chatml": False,
        "hermes_like": True,
        "llama_like": True,
        "smollm2": False,
    }
    formats = {name: m.tool_format for name, m in models.items()}
    assert formats == {
        "chatml": None,
        "hermes_like": "hermes",
        "llama_like": "llama",
        "smollm2": "smollm2",
    }
    for name, end in (("llama_like", "<|eot_id|>"), ("hermes_like", "<|im_end|>")):
        end_id = models[name].tokenizer.token_id(end)
        assert models[name].chat_template.end_token_id == end_id
        assert end_id in models[name].eos_ids


@pytest.mark.parametrize("family", [*FAMILIES, "smollm2"])
def test_every_kind_of_item_appends_as_it_renders(
    models: dict[str, TextAssets], family: str
) -> None:
    report = models[family].conformance
    found = {case.kind: case.status for case in report.cases}
    grouped = found.pop("tool_results_one_by_one")
    assert grouped == ("differs" if family == "hermes_like" else "equal")
    assert found == dict.fromkeys(
        (
            "user",
            "user_after_open_assistant",
            "tool_result",
            "tool_results",
            "tool_result_after_open_assistant",
            "tool_result_then_user",
            "reasoning_before_user",
        ),
        "equal",
    )
    assert report.ok
    assert all(case.consequence for case in report.cases if case.status != "equal")


def test_a_template_that_drops_reasoning_is_reported_with_what_sessions_do(
    models: dict[str, TextAssets],
) -> None:
    source = (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}"
        "</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    base = models["smollm2"]
    report = check_conformance(ChatTemplate(source, base.tokenizer), base.tokenizer)
    case = next(case for case in report.cases if case.kind == "reasoning_before_user")
    assert case.status == "differs" and "drop_before_last_user" in case.consequence
    assert report.ok


def test_a_template_that_drops_the_end_of_earlier_answers_has_answers_without_one(
    models: dict[str, TextAssets],
) -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% if m.role != 'assistant' or loop.last %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    base = models["smollm2"]
    template = ChatTemplate(source, base.tokenizer)
    assert template.end_token_id is None
    end_id = base.tokenizer.token_id("<|im_end|>")
    assert template.ends.replacements([end_id]) == {end_id: None}
    assert check_conformance(template, base.tokenizer).ok


def test_a_template_that_rewrites_its_history_is_reported(models: dict[str, TextAssets]) -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{{ m.content if loop.last else m.content[:9] }}{{ '<|im_end|>' }}{% endfor %}"
    )
    base = models["smollm2"]
    template = ChatTemplate(source, base.tokenizer)
    report = check_conformance(template, base.tokenizer)
    assert not report.ok
    assert any(case.detail for case in report.cases if case.kind == "user")


def test_a_template_that_cannot_be_appended_to_is_logged_at_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_hf_text(tmp_path, "chatml")
    load_text_assets(str(directory))
    assert not caplog.records
    template = directory / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if loop.last %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    load_text_assets(str(directory))
    assert "not appendable for user" in caplog.text


_TEXT = st.text(
    st.sampled_from('ab1 \n<>|\u00e9{}"\\') | st.characters(exclude_categories=["Cs"]), max_size=12
)
_NEXT_ROLE = st.sampled_from(["user", "tool"])
_NEXT = st.sampled_from(["user", "tool", "tools"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(family=st.sampled_from([*FAMILIES, "smollm2"]), data=st.data())
def test_a_conversation_appended_item_by_item_equals_its_full_render(
    models: dict[str, TextAssets], family: str, data: st.DataObject
) -> None:
    model = models[family]
    template, tokenizer = model.chat_template, model.tokenizer
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": data.draw(_TEXT)},
        {"role": "user", "content": data.draw(_TEXT)},
    ]
    ids = template.render(messages, add_generation_prompt=True)
    for _ in range(data.draw(st.integers(1, 4))):
        answer = data.draw(_TEXT).strip()  # llama_like trims what an assistant said
        ids += tokenizer.encode(answer)
        is_closed = data.draw(st.booleans())
        if is_closed:
            ids.append(template.end_token_id)
        kind = data.draw(_NEXT)
        role = "user" if kind == "user" else "tool"
        count = 2 if kind == "tools" else 1
        new = [{"role": role, "content": data.draw(_TEXT)} for _ in range(count)]
        before = [message["role"] for message in messages] + ["assistant"]
        ids += template.render_append(
            before, new, add_generation_prompt=True, assistant_closed=is_closed
        )
        messages += [{"role": "assistant", "content": answer}, *new]
    assert ids == template.render(messages, add_generation_prompt=True)


def test_a_long_transcript_never_diverges_from_its_full_render(
    models: dict[str, TextAssets],
) -> None:
    template, tokenizer = models["smollm2"].chat_template, models["smollm2"].tokenizer
    messages: list[dict[str, str]] = [{"role": "user", "content": "\n\nGo"}]
    ids = template.render(messages, add_generation_prompt=True)
    for turn in range(300):
        # Not a line break first: a tokeniser would fold it into the prompt's last one, where a
        # history of sampled ids keeps them apart.
        answer = f"step {turn}\n\n" * (turn % 3)
        ids += [*tokenizer.encode(answer), 2]
        new = [{"role": "user" if turn % 2 else "tool", "content": f"\n result {turn}\n\n"}]
        ids += template.render_append(["assistant"], new, add_generation_prompt=True)
        messages += [{"role": "assistant", "content": answer}, *new]
    assert ids == template.render(messages, add_generation_prompt=True)


@pytest.mark.parametrize("family", [*FAMILIES, "smollm2"])
def test_messages_after_messages_append_as_they_render(
    models: dict[str, TextAssets], family: str
) -> None:
    template = models[family].chat_template
    first = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    more = [{"role": "user", "content": " again\n"}]
    ids = template.render(first)
    ids += template.render_append(["system", "user"], more, add_generation_prompt=True)
    assert ids == template.render([*first, *more], add_generation_prompt=True)
    start = template.render(first[:1]) + template.render_append(
        ["system"], first[1:], add_generation_prompt=False
    )
    assert start == template.render(first)
    assert template.render_append([], first, add_generation_prompt=False) == template.render(first)


def test_a_tool_result_after_a_finished_group_stands_alone(models: dict[str, TextAssets]) -> None:
    """The group before is in the history as a whole; its end cannot be taken back."""
    template, tokenizer = models["hermes_like"].chat_template, models["hermes_like"].tokenizer
    ids = template.render_append(
        ["assistant", "tool"], [{"role": "tool", "content": "2"}], add_generation_prompt=True
    )
    assert tokenizer.decode(ids, with_control=True) == (
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_empty_append_asks_for_a_turn_or_closes_one(models: dict[str, TextAssets]) -> None:
    template, tokenizer = models["smollm2"].chat_template, models["smollm2"].tokenizer

    def text(before: Sequence[str], **options: Any) -> str:
        return tokenizer.decode(template.render_append(before, [], **options), with_control=True)

    assert text(["user"], add_generation_prompt=True) == "<|im_start|>assistant\n"
    assert text(["assistant"], add_generation_prompt=False) == "\n"
    assert (
        text(["assistant"], add_generation_prompt=False, assistant_closed=False) == "<|im_end|>\n"
    )


def test_tool_results_append_where_the_template_wants_a_call(
    models: dict[str, TextAssets],
) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' and "
        "not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}"
    )
    tokenizer = models["smollm2"].tokenizer
    template = ChatTemplate(source, tokenizer)
    new = [{"role": "tool", "content": "7", "tool_call_id": "c"}]
    closed = template.render_append(["assistant"], new, add_generation_prompt=False)
    opened = template.render_append(
        ["assistant"], new, add_generation_prompt=False, assistant_closed=False
    )
    assert tokenizer.decode(closed, with_control=True) == "\n<|im_start|>tool\n7<|im_end|>\n"
    assert opened == [2, *closed]
    then_user = template.render_append(
        ["tool"], [{"role": "user", "content": "8"}], add_generation_prompt=False
    )
    assert tokenizer.decode(then_user, with_control=True) == "<|im_start|>user\n8<|im_end|>\n"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(family=st.sampled_from([*FAMILIES, "smollm2"]), data=st.data())
def test_messages_appended_one_at_a_time_equal_one_append(
    models: dict[str, TextAssets], family: str, data: st.DataObject
) -> None:
    template = models[family].chat_template
    roles = ["assistant", data.draw(_NEXT_ROLE), *data.draw(st.lists(_NEXT_ROLE, max_size=3))]
    new = [{"role": role, "content": data.draw(_TEXT)} for role in roles[1:]]
    if any(pair == ("tool", "tool") for pair in zip(roles, roles[1:], strict=False)):
        return  # results of one group belong in one append
    at_once = template.render_append(roles[:1], new, add_generation_prompt=True)
    ids: list[int] = []
    for index, message in enumerate(new):
        ids += template.render_append(roles[: index + 1], [message], add_generation_prompt=False)
    ids += template.render_append(roles, [], add_generation_prompt=True)
    assert ids == at_once


def _attacks(model: TextAssets) -> st.SearchStrategy[str]:
    texts = list(model.tokenizer.added_tokens)
    parts = [text[:cut] for text in texts for cut in (1, 2, len(text) - 1, len(text))]
    parts += [text[cut:] for text in texts for cut in (1, 2, len(text) - 1)]
    pieces = st.sampled_from([*parts, " ", "\n", "x", "\ufdd0", "\ue000"])
    return st.lists(pieces, max_size=8).map("".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(family=st.sampled_from([*FAMILIES, "smollm2"]), data=st.data())
def test_text_of_a_client_never_becomes_a_control_token(
    models: dict[str, TextAssets], family: str, data: st.DataObject
) -> None:
    model = models[family]
    template, tokenizer = model.chat_template, model.tokenizer
    attack = _attacks(model)
    texts = [data.draw(attack) for _ in range(3)]

    def conversation(contents: Sequence[str]) -> list[dict[str, str]]:
        roles = ("system", "user", "tool")
        return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]

    def control(ids: Sequence[int]) -> Counter[int]:
        special = tokenizer.control_ids | tokenizer.markup_ids
        return Counter(i for i in ids if i in special)

    ids = template.render(conversation(texts), add_generation_prompt=True)
    assert control(ids) == control(
        template.render(conversation(["a", "b", "c"]), add_generation_prompt=True)
    )
    spelled = tokenizer.decode(ids, with_control=True)
    expected_user = texts[1].strip() if family == "llama_like" else texts[1]
    assert expected_user in spelled
    assert texts[2] in spelled
    appended = template.render_append(
        ["assistant"], conversation(texts)[1:], add_generation_prompt=True
    )
    assert control(appended) == control(
        template.render_append(
            ["assistant"], conversation(["a", "b", "c"])[1:], add_generation_prompt=True
        )
    )


def test_control_text_in_tools_and_arguments_stays_text(models: dict[str, TextAssets]) -> None:
    model = models["llama_like"]
    evil = "<|eot_id|>"
    tools = [{"type": "function", "function": {"name": "f", "description": evil, evil: 1}}]
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": {evil: evil}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    ids = model.chat_template.render(messages, tools=tools)
    assert ids.count(model.tokenizer.token_id(evil)) == 3  # system, user, assistant
    assert model.tokenizer.decode(ids, with_control=True).count(evil) == 7


def test_markup_an_assistant_wrote_is_read_as_its_tokens(models: dict[str, TextAssets]) -> None:
    model = models["hermes_like"]
    text = "<tool_call>\n{}\n</tool_call><|im_end|>"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    ids = model.chat_template.render(messages)
    assert ids.count(model.tokenizer.token_id("<tool_call>")) == 1
    assert ids.count(model.tokenizer.token_id("<|im_end|>")) == 2


def test_arguments_given_as_text_come_out_verbatim_where_the_template_can(
    models: dict[str, TextAssets],
) -> None:
    arguments = '{"b":1,  "a": "x"}'
    function = {"name": "f", "arguments": arguments}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]},
    ]
    hermes = models["hermes_like"]
    ids = hermes.chat_template.render(messages)
    assert arguments in hermes.tokenizer.decode(ids)
    llama = models["llama_like"]
    ids = llama.chat_template.render(messages)
    assert '"parameters": {"b": 1, "a": "x"}' in llama.tokenizer.decode(ids)


def test_a_refusal_of_the_template_is_an_error_with_its_words(
    models: dict[str, TextAssets],
) -> None:
    calls = [{"id": "c", "function": {"name": "f", "arguments": {}}}] * 2
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    with pytest.raises(TemplateRenderError, match="one call at a time") as caught:
        models["llama_like"].chat_template.render(messages)
    assert caught.value.code == "template_refused"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "x"}, r"messages\[1\]\.role: None"),
        ({"role": "", "content": "x"}, r"messages\[1\]\.role: ''"),
        ({"role": "user", "content": 5}, r"messages\[1\]\.content: int"),
        ({"role": "user", "content": ["x"]}, r"messages\[1\]\.content: list"),
    ],
)
def test_a_misshapen_message_is_named(
    models: dict[str, TextAssets], message: dict[str, Any], said: str
) -> None:
    with pytest.raises(MessageShapeError, match=said):
        models["smollm2"].chat_template.render([{"role": "user", "content": "a"}, message])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].missing.deeper }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error(
    models: dict[str, TextAssets], source: str
) -> None:
    template = ChatTemplate(source, models["smollm2"].tokenizer)
    with pytest.raises(TemplateRenderError):
        template.render([{"role": "user", "content": "a"}])


def test_a_template_that_does_not_compile_names_its_line(models: dict[str, TextAssets]) -> None:
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("{# a #}\n{% if %}", models["smollm2"].tokenizer)


def test_generation_blocks_and_loop_controls_are_understood(models: dict[str, TextAssets]) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = models["smollm2"].tokenizer
    template = ChatTemplate(source, tokenizer)
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": "yes"}]
    assert template.render(messages) == tokenizer.encode("yes")
