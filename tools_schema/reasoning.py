# SPDX-License-Identifier: Apache-2.0
"""Owns what a rendered prompt says about reasoning. Does not know: requests, templates, tokens.

The prompt decides, never the request's flags: templates open reasoning, close it at once, or
leave it to the model, each by rules of its own.
"""

from __future__ import annotations

from typing import Literal

from tools_schema.formats.base import ToolFormat

Reasoning = Literal["off", "auto", "on"]


def reasoning_of_prompt(tool_format: ToolFormat, prompt_tail: str) -> Reasoning:
    """`on`: the prompt ends inside open reasoning; `off`: right behind it; else `auto`.

    `off` too where the family has none. `on` is the parser's `reasoning_open`.

    Args:
        prompt_tail: the last characters of the prompt as text, control tokens spelled out.
    """
    tags = tool_format.reasoning
    if tags is None:
        return "off"
    tail = prompt_tail.rstrip()
    if tail.endswith(tags.begin.strip()):
        return "on"
    return "off" if tail.endswith(tags.end.strip()) else "auto"
