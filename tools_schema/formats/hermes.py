# SPDX-License-Identifier: Apache-2.0
"""Owns how the Hermes / Qwen2.5 / Qwen3 / SmolLM3 families write tool calls: one tag per call.

Does not know: anything but this data.
Source: the chat templates of Qwen2.5-Instruct and Qwen3, the Hermes function-calling format.
"""

from __future__ import annotations

from tools_schema.formats.base import JsonBody, ReasoningTags, ToolFormat

_SYSTEM = """\
{instructions}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

FORMAT = ToolFormat(
    name="hermes",
    body=JsonBody(),
    call_begin="<tool_call>\n",
    call_end="\n</tool_call>",
    separator="\n",
    reasoning=ReasoningTags(
        begin="<think>",
        end="</think>",
        layout_after_begin="\n",
        layout_before_end="\n",
        layout_after_end="\n\n",
    ),
    end_of_turn=("<|im_end|>",),
    architectures=("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    probes=(
        (r'<tool_call>\n{"name": ',),
        (r"<tool_call>\n{\"name\": ",),
        ("<tool_call></tool_call> XML tags",),
    ),
    system_template=_SYSTEM,
    tools_one_per_line=True,
)
