# SPDX-License-Identifier: Apache-2.0
"""Owns how Llama 3.1 / 3.2 write tool calls: the whole message is one JSON object.

Does not know: anything but this data. A JSON answer looks much the same, so an object is a call
only if its name is a declared tool; several calls in one message are joined by "; ".
Source: the Llama 3.1 and 3.2 prompt-format pages of Meta.
"""

from __future__ import annotations

from tools_schema.formats.base import JsonBody, ToolFormat

_SYSTEM = """\
{instructions}You have access to the following functions. To call a function, respond with JSON \
for a function call, in the format {"name": function name, "parameters": dictionary of argument \
name and its value}. Do not use variables.

{tools}"""

FORMAT = ToolFormat(
    name="llama",
    body=JsonBody(arguments_key="parameters"),
    separator="; ",
    optional_prefix="<|python_tag|>",
    end_of_turn=("<|eot_id|>", "<|eom_id|>"),
    probes=(("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
    system_template=_SYSTEM,
    tools_one_per_line=True,
    result_role="ipython",
    result_begin="",
    result_end="",
)
