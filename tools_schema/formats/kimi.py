# SPDX-License-Identifier: Apache-2.0
"""Owns how Kimi K2 writes tool calls: a section of calls, each with an id that names its function.

Does not know: anything but this data. The id IS `functions.NAME:INDEX`, the index counts over the
whole conversation, and history must show it as sampled. The markers are control tokens.
Source: the tool-call guide and chat template of Kimi-K2.
"""

from __future__ import annotations

from tools_schema.formats.base import HeaderBody, ReasoningTags, ToolFormat

FORMAT = ToolFormat(
    name="kimi",
    body=HeaderBody(
        before_name="functions.",
        id_mark=":",
        id_pattern=r"\d{1,6}",
        id_has_name=True,
        after_name="<|tool_call_argument_begin|>",
    ),
    section_begin="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>",
    call_end="<|tool_call_end|>",
    reasoning=ReasoningTags(begin="<think>", end="</think>"),
    id_style="sampled",
    end_of_turn=("<|im_end|>",),
    architectures=("KimiK2ForCausalLM", "KimiK25ForConditionalGeneration"),
    probes=(("<|tool_calls_section_begin|>",),),
    system_template="{instructions}# Tools\n{tools}",
    result_role="tool",
    result_begin="## Return of {call_id}\n",
    result_end="",
)
