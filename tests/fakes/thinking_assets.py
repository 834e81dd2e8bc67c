# SPDX-License-Identifier: Apache-2.0
"""The default model's text side, with the template of a model that reasons unless told not to."""

from __future__ import annotations

import dataclasses

from engine.text.assets import TextAssets
from engine.text.chat_template import ChatTemplate
from tests.fakes.appliance import default_assets

# ChatML with hermes tools. The prompt opens the reasoning, or closes it at once.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tool_call></tool_call> XML tags"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% if reasoning_effort is defined %}<|im_start|>system\nEffort: {{ reasoning_effort }}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)


def thinking_assets() -> TextAssets:
    """Return them; the tokenizer is the default model's."""
    assets = default_assets()
    return dataclasses.replace(assets, chat_template=ChatTemplate(TEMPLATE, assets.tokenizer))
