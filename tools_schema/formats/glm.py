# SPDX-License-Identifier: Apache-2.0
"""Owns how GLM-4.5 and later write tool calls: a name, then keys and values in tags.

Does not know: anything but this data. From GLM-4.7 on the line breaks are gone.
Source: the chat templates of GLM-4.5 and GLM-4.7.
"""

from __future__ import annotations

from tools_schema.formats.base import HeaderBody, ParamStyle, ReasoningTags, ToolFormat

_SYSTEM = """\
{instructions}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, output the function name and arguments within the following XML format:
"""
_END_OF_TURN = ("<|observation|>", "<|user|>", "<|endoftext|>")

FORMAT = ToolFormat(
    name="glm",
    body=HeaderBody(
        after_name="\n",
        params=ParamStyle(
            begin="<arg_key>", after_key="</arg_key>\n<arg_value>", end="</arg_value>\n"
        ),
    ),
    call_begin="<tool_call>",
    call_end="</tool_call>",
    separator="\n",
    reasoning=ReasoningTags(begin="<think>", end="</think>", layout_after_end="\n"),
    end_of_turn=_END_OF_TURN,
    architectures=("Glm4MoeForCausalLM",),
    probes=(("<arg_key>", "</arg_key>\\n<arg_value>"), ("<arg_key>", "</arg_key>\n<arg_value>")),
    system_template=_SYSTEM
    + """\
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
<arg_key>{arg-key-2}</arg_key>
<arg_value>{arg-value-2}</arg_value>
...
</tool_call>""",
    tools_one_per_line=True,
    result_role="observation",
)

COMPACT = ToolFormat(
    name="glm_compact",
    body=HeaderBody(
        after_name="",
        params=ParamStyle(begin="<arg_key>", after_key="</arg_key><arg_value>", end="</arg_value>"),
    ),
    call_begin="<tool_call>",
    call_end="</tool_call>",
    reasoning=ReasoningTags(begin="<think>", end="</think>"),
    end_of_turn=_END_OF_TURN,
    architectures=("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"),
    probes=(("<arg_key>",),),
    system_template=_SYSTEM
    + """\
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>\
<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>""",
    tools_one_per_line=True,
    result_role="observation",
    result_begin="<tool_response>",
    result_end="</tool_response>",
    result_separator="",
)
