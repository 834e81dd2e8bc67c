# SPDX-License-Identifier: Apache-2.0
"""Owns how the DeepSeek models write tool calls: fenced JSON, plain JSON, then DSML.

Does not know: anything but this data. The markers are control tokens of these models: a sampling
mask must leave them in. The bars are U+FF5C, the blanks in them U+2581.
Source: the chat templates of DeepSeek-R1, V3-0324 and V3.1; the encoding code of V3.2 and V4.
"""

from __future__ import annotations

from tools_schema.formats.base import HeaderBody, ParamStyle, ReasoningTags, ToolFormat

_CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEP = "<\uff5ctool\u2581sep\uff5c>"
_DSML = "\uff5cDSML\uff5c"
_END_OF_TURN = ("<\uff5cend\u2581of\u2581sentence\uff5c>",)
_THINK = ReasoningTags(begin="<think>", end="</think>")
_OUTPUT_BEGIN = "<\uff5ctool\u2581output\u2581begin\uff5c>"
_OUTPUT_END = "<\uff5ctool\u2581output\u2581end\uff5c>"

_SYSTEM_JSON = """\
{instructions}## Tools
You have access to the following tools:

{tools}"""

FORMAT = ToolFormat(
    name="deepseek_r1",
    body=HeaderBody(before_name=f"function{_SEP}", after_name="\n```json\n"),
    section_begin=_CALLS_BEGIN,
    section_end=_CALLS_END,
    call_begin=_CALL_BEGIN,
    call_end=f"\n```{_CALL_END}",
    separator="\n",
    reasoning=ReasoningTags(
        begin="<think>", end="</think>", layout_after_begin="\n", layout_after_end="\n\n"
    ),
    end_of_turn=_END_OF_TURN,
    architectures=("DeepseekV3ForCausalLM",),
    probes=((_SEP, "```json"),),
    system_template=_SYSTEM_JSON,
    result_role="tool",
    result_begin=_OUTPUT_BEGIN,
    result_end=_OUTPUT_END,
)

PLAIN = ToolFormat(
    name="deepseek_v3_1",
    body=HeaderBody(after_name=_SEP),
    section_begin=_CALLS_BEGIN,
    section_end=_CALLS_END,
    call_begin=_CALL_BEGIN,
    call_end=_CALL_END,
    reasoning=_THINK,
    end_of_turn=_END_OF_TURN,
    probes=((_SEP,),),
    system_template=_SYSTEM_JSON,
    result_role="tool",
    result_begin=_OUTPUT_BEGIN,
    result_end=_OUTPUT_END,
)


def _dsml(name: str, section: str, result_tag: str, architecture: str) -> ToolFormat:
    begin, end = f"<{_DSML}{section}>", f"</{_DSML}{section}>"
    return ToolFormat(
        name=name,
        body=HeaderBody(
            after_name='">\n',
            params=ParamStyle(
                begin=f'<{_DSML}parameter name="',
                type_mark='" string="',
                after_key='">',
                end=f"</{_DSML}parameter>\n",
            ),
        ),
        lead="\n\n",
        section_begin=f"{begin}\n",
        section_end=end,
        call_begin=f'<{_DSML}invoke name="',
        call_end=f"</{_DSML}invoke>\n",
        reasoning=_THINK,
        end_of_turn=_END_OF_TURN,
        architectures=(architecture,),
        probes=((begin,), (section, "DSML")),
        system_template=_SYSTEM_JSON
        + f"""

You can invoke functions by writing a "{begin}" block like the following:
{begin}
<{_DSML}invoke name="$FUNCTION_NAME">
<{_DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{_DSML}parameter>
...
</{_DSML}invoke>
{end}

String parameters are written as they are with string="true"; all others as JSON with \
string="false".""",
        tools_one_per_line=True,
        result_begin=f"<{result_tag}>",
        result_end=f"</{result_tag}>",
    )


DSML = _dsml("deepseek_v3_2", "function_calls", "result", "DeepseekV32ForCausalLM")
DSML_TOOLS = _dsml("deepseek_v4", "tool_calls", "tool_result", "DeepseekV4ForCausalLM")
