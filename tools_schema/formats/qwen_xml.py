# SPDX-License-Identifier: Apache-2.0
"""Owns how Qwen3-Coder and later Qwen models write tool calls: tagged parameters.

Does not know: anything but this data. MiMo writes the same without line breaks.
Source: the chat templates of Qwen3-Coder and MiMo.
"""

from __future__ import annotations

from tools_schema.formats.base import HeaderBody, ParamStyle, ReasoningTags, ToolFormat

_THINK = ReasoningTags(
    begin="<think>",
    end="</think>",
    layout_after_begin="\n",
    layout_before_end="\n",
    layout_after_end="\n\n",
)

_SYSTEM = """\
{instructions}# Tools

You have access to the following functions:

<tools>
{tools}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>"""

FORMAT = ToolFormat(
    name="qwen_xml",
    body=HeaderBody(
        before_name="<function=",
        after_name=">\n",
        params=ParamStyle(begin="<parameter=", after_key=">\n", end="\n</parameter>\n"),
    ),
    call_begin="<tool_call>\n",
    call_end="</function>\n</tool_call>",
    separator="\n",
    reasoning=_THINK,
    end_of_turn=("<|im_end|>",),
    architectures=("Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"),
    probes=(("<function=", "<parameter=", "\\n</parameter>"), ("<function=", "</parameter>\\n")),
    system_template=_SYSTEM,
    tools_one_per_line=True,
)

COMPACT = ToolFormat(
    name="mimo",
    body=HeaderBody(
        before_name="<function=",
        after_name=">",
        params=ParamStyle(begin="<parameter=", after_key=">", end="</parameter>"),
    ),
    call_begin="<tool_call>",
    call_end="</function></tool_call>",
    separator="\n",
    reasoning=_THINK,
    end_of_turn=("<|im_end|>",),
    architectures=("MiMoForCausalLM", "MiMoV2FlashForCausalLM"),
    probes=(("<function=", "<parameter="),),
    system_template=_SYSTEM,
    tools_one_per_line=True,
)
