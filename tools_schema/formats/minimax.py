# SPDX-License-Identifier: Apache-2.0
"""Owns how MiniMax-M2 writes tool calls: invocations with tagged parameters in one section.

Does not know: anything but this data.
Source: the chat template of MiniMax-M2.
"""

from __future__ import annotations

from tools_schema.formats.base import HeaderBody, ParamStyle, ReasoningTags, ToolFormat

_SYSTEM = """\
{instructions}# Tools
You may call one or more tools to assist with the user query.
Here are the tools available in JSONSchema format:

<tools>
{tools}
</tools>

When making tool calls, use XML format to invoke tools and pass parameters:

<minimax:tool_call>
<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>
<parameter name="param-key-2">param-value-2</parameter>
...
</invoke>
</minimax:tool_call>"""

FORMAT = ToolFormat(
    name="minimax",
    body=HeaderBody(
        after_name='">\n',
        params=ParamStyle(begin='<parameter name="', after_key='">', end="</parameter>\n"),
    ),
    lead="\n",
    section_begin="<minimax:tool_call>\n",
    section_end="</minimax:tool_call>",
    call_begin='<invoke name="',
    call_end="</invoke>\n",
    reasoning=ReasoningTags(
        begin="<think>",
        end="</think>",
        layout_after_begin="\n",
        layout_before_end="\n",
        layout_after_end="\n\n",
    ),
    end_of_turn=("[e~[",),
    architectures=("MiniMaxM2ForCausalLM",),
    probes=(("<minimax:tool_call>",), ("minimax:tool_call",)),
    system_template=_SYSTEM,
    tools_one_per_line=True,
    result_role="tool",
    result_begin="<response>",
    result_end="</response>",
)
