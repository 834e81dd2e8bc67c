# SPDX-License-Identifier: Apache-2.0
"""What an answer ends with in a history is what its chat template writes there."""

from __future__ import annotations

import pytest

from engine.text.assets import TextAssets
from engine.text.chat_template import ChatTemplate
from engine.text.conformance import check_conformance
from engine.text.tokenizer import AddedToken, Tokenizer
from engine.text.turn_ends import TurnEnds
from tests.fakes.appliance import default_assets

# Messages on channels, as gpt-oss writes them: three ends, one of which only parts messages.
CHANNELS = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
<|start|>assistant<|channel|>commentary to=functions.{{ m.tool_calls[0].function.name }} \
<|constrain|>json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}\
{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}
{%- elif m.role == 'tool' -%}
{%- if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif -%}
<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- else -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}"""
# No end at all: a message lasts until the next role, as GLM writes them.
ROLES = """\
{%- for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>
{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
TEXTS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
    *("<|return|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|eot|>"),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    default: TextAssets = default_assets()
    added = [AddedToken(token_id=i, text=text) for i, text in enumerate(TEXTS)]
    plain = default.tokenizer._plain
    return Tokenizer(plain, added, vocab_size=default.vocab_size)


def ids(*texts: str) -> tuple[int, ...]:
    return tuple(map(TEXTS.index, texts))


def test_a_template_has_an_end_for_the_last_answer_for_others_and_for_calls(
    tokenizer: Tokenizer,
) -> None:
    end, call, last, eot = ids("<|end|>", "<|call|>", "<|return|>", "<|eot|>")
    template = ChatTemplate(CHANNELS, tokenizer, {}, (last, call, eot))
    assert template.ends == TurnEnds(last=last, middle=end, call=call)
    assert template.end_token_id == end
    # A sampled <|call|> stays; a final message ends with <|end|>; so does one that ended oddly.
    assert template.ends.replacements((last, call, eot)) == {last: end, eot: end}


def test_answers_of_each_end_are_appended_to_as_a_full_render_reads(tokenizer: Tokenizer) -> None:
    end, call, last = ids("<|end|>", "<|call|>", "<|return|>")
    template = ChatTemplate(CHANNELS, tokenizer, {}, (last, call))
    user = {"role": "user", "content": "Go."}
    function = {"name": "f", "arguments": {"a": 1}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}
    result = {"role": "tool", "content": "ok <|end|>", "name": "f", "tool_call_id": "c"}
    said = {"role": "assistant", "content": "Done."}
    for answer, new, end_id in ((called, [result], call), (said, [user], end)):
        full = template.render([user, answer, *new], add_generation_prompt=True)
        history = template.render([user, answer], add_generation_prompt=True)
        # Up to the end of the answer: what the model sampled, its end as history has it.
        history = history[: len(history) - 1 - history[::-1].index(end_id) + 1]
        history += template.render_append(("assistant",), new, add_generation_prompt=True)
        assert history == full
    assert check_conformance(template, tokenizer).ok


def test_a_role_that_a_model_stopped_at_is_no_part_of_its_answer(tokenizer: Tokenizer) -> None:
    user, observation = ids("<|user|>", "<|observation|>")
    template = ChatTemplate(ROLES, tokenizer, {}, (user, observation))
    assert template.ends == TurnEnds() and template.end_token_id is None
    assert template.ends.replacements((user, observation)) == {user: None, observation: None}
    opening = [{"role": "user", "content": "Go."}]
    answer, result = {"role": "assistant", "content": "ok"}, {"role": "tool", "content": "7"}
    full = template.render([*opening, answer, result], add_generation_prompt=True)
    history = template.render(opening, add_generation_prompt=True) + tokenizer.encode("ok")
    history += template.render_append(
        ("assistant",), [result], add_generation_prompt=True, assistant_closed=False
    )
    assert history == full
    assert full.count(observation) == 1
