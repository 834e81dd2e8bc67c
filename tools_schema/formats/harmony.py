# SPDX-License-Identifier: Apache-2.0
"""Owns how gpt-oss writes a turn: messages on channels, a tool call as one addressed to it.

Does not know: anything but this data. `<|call|>` and `<|return|>` end the turn: they are stop
tokens and no part of the grammar. Analysis is reasoning; commentary before a call and the final
message are text. All `<|...|>` markers are control tokens.
Source: the harmony response format guide of OpenAI.
"""

from __future__ import annotations

from tools_schema.formats.base import HeaderBody, ReasoningTags, ToolFormat

_MESSAGE = "<|message|>"
_NEXT = "<|start|>assistant"

FORMAT = ToolFormat(
    name="harmony",
    body=HeaderBody(
        after_name=f" <|constrain|>json{_MESSAGE}",
        also_after_name=(
            f"<|channel|>commentary <|constrain|>json{_MESSAGE}",
            f"<|channel|>commentary<|constrain|>json{_MESSAGE}",
            f"<|channel|>commentary json{_MESSAGE}",
            f"json{_MESSAGE}",
            _MESSAGE,
        ),
    ),
    call_begin="<|channel|>commentary to=functions.",
    also_call_begin="to=functions.",
    text_begin=f"<|channel|>final{_MESSAGE}",
    preamble=(f"<|channel|>commentary{_MESSAGE}", f"<|end|>{_NEXT}"),
    dropped=(_NEXT, "<|end|>", "<|return|>", "<|call|>"),
    reasoning=ReasoningTags(
        begin=f"<|channel|>analysis{_MESSAGE}", end="<|end|>", layout_after_end=_NEXT
    ),
    reasoning_anywhere=True,
    max_calls=1,
    end_of_turn=("<|return|>", "<|call|>"),
    architectures=("GptOssForCausalLM",),
    probes=(("<|channel|>", _MESSAGE),),
    system_template="{instructions}# Tools\n\n## functions\n\n{tools}",
    tools_one_per_line=True,
    result_role="tool",
    result_begin="",
    result_end="",
)
