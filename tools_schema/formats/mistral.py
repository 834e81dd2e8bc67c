# SPDX-License-Identifier: Apache-2.0
"""Owns how Mistral models write tool calls, in three tokenizer generations.

Does not know: anything but this data. Ids are nine letters or digits. The bracketed markers are
control tokens.
Source: mistral-common, instruct tokenizers v3 to v13.
"""

from __future__ import annotations

from tools_schema.formats.base import HeaderBody, JsonBody, ReasoningTags, ToolFormat

_ID = "[a-zA-Z0-9]{9}"
_MARK = "[TOOL_CALLS]"
_SYSTEM = "{instructions}[AVAILABLE_TOOLS]{tools}[/AVAILABLE_TOOLS]"
_END_OF_TURN = ("</s>",)

LIST = ToolFormat(
    name="mistral_list",
    body=JsonBody(id_key="id", id_pattern=_ID),
    section_begin=_MARK,
    calls_as_list=True,
    separator=", ",
    end_of_turn=_END_OF_TURN,
    probes=((_MARK, '"[TOOL_CALLS] ["'), (_MARK, '"[TOOL_CALLS]["')),
    system_template=_SYSTEM,
    result_role="tool",
    result_begin="[TOOL_RESULTS]{call_id}[TOOL_CONTENT]",
    result_end="[/TOOL_RESULTS]",
    result_separator="",
)

WITH_IDS = ToolFormat(
    name="mistral_ids",
    body=HeaderBody(id_mark="[CALL_ID]", id_pattern=_ID, after_name="[ARGS]"),
    call_begin=_MARK,
    id_style="sampled",
    end_of_turn=_END_OF_TURN,
    probes=(("[CALL_ID]",),),
    system_template=_SYSTEM,
    result_role="tool",
    result_begin="[TOOL_RESULTS]{call_id}[TOOL_CONTENT]",
    result_end="[/TOOL_RESULTS]",
    result_separator="",
)

FORMAT = ToolFormat(
    name="mistral",
    body=HeaderBody(after_name="[ARGS]"),
    call_begin=_MARK,
    reasoning=ReasoningTags(begin="[THINK]", end="[/THINK]"),
    end_of_turn=_END_OF_TURN,
    architectures=("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
    probes=(("[ARGS]",),),
    system_template=_SYSTEM,
    result_role="tool",
    result_begin="[TOOL_RESULTS]",
    result_end="[/TOOL_RESULTS]",
    result_separator="",
)
