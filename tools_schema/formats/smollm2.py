# SPDX-License-Identifier: Apache-2.0
"""Owns how SmolLM2 writes tool calls: a JSON list in one `<tool_call>` tag.

Its chat template (ChatML) knows no tools: the convention lives in the system prompt it was
trained on. Does not know: anything but this data.
Source: the function-calling section of the SmolLM2-1.7B-Instruct model card (Apache-2.0).
"""

from __future__ import annotations

from tools_schema.formats.base import JsonBody, ToolFormat

# The wording is the model's interface: it was trained on exactly this prompt.
_SYSTEM = """\
You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. \
If no function call is needed, please make the tool calls an empty list '[]'.
<tool_call>[
{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}},
... (more tool calls as required)
]</tool_call>{instructions}"""

FORMAT = ToolFormat(
    name="smollm2",
    body=JsonBody(),
    section_begin="<tool_call>",
    section_end="</tool_call>",
    calls_as_list=True,
    allows_empty_list=True,
    separator=", ",
    end_of_turn=("<|im_end|>",),
    probes=(("You are a helpful AI assistant named SmolLM",),),
    system_template=_SYSTEM,
)
