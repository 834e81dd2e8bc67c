# SPDX-License-Identifier: Apache-2.0
"""Owns the list of formats: by name, or guessed from a model's chat template.

Does not know: what is in a format. A new family is one file beside this one and one line here.
"""

from __future__ import annotations

from tools_schema.errors import UnknownFormatError
from tools_schema.formats import (
    deepseek,
    glm,
    harmony,
    hermes,
    kimi,
    llama,
    minimax,
    mistral,
    qwen_xml,
    smollm2,
)
from tools_schema.formats.base import ToolFormat

# In the order in which they are guessed: the more telling probes first.
FORMATS: tuple[ToolFormat, ...] = (
    harmony.FORMAT,
    kimi.FORMAT,
    deepseek.DSML,
    deepseek.DSML_TOOLS,
    deepseek.FORMAT,
    deepseek.PLAIN,
    minimax.FORMAT,
    qwen_xml.FORMAT,
    qwen_xml.COMPACT,
    glm.FORMAT,
    glm.COMPACT,
    mistral.WITH_IDS,
    mistral.FORMAT,
    mistral.LIST,
    hermes.FORMAT,
    smollm2.FORMAT,
    llama.FORMAT,
)
DEFAULT_FORMAT = hermes.FORMAT

_BY_NAME = {tool_format.name: tool_format for tool_format in FORMATS}


def format_names() -> tuple[str, ...]:
    return tuple(_BY_NAME)


def get_format(name: str) -> ToolFormat:
    """Raises UnknownFormatError with the names there are."""
    found = _BY_NAME.get(name)
    if found is None:
        raise UnknownFormatError(
            param="tool_format",
            message="no such tool format",
            value=name,
            allowed=", ".join(_BY_NAME),
        )
    return found


def guess_format(template_text: str | None, architecture: str | None = None) -> ToolFormat:
    """The format of a model: by its chat template, else by its architecture, else hermes.

    A template says more than an architecture: fine-tunes keep the second and change the first.
    """
    for tool_format in FORMATS:
        if template_text and _gives_away(template_text, tool_format):
            return tool_format
    for tool_format in FORMATS:
        if architecture is not None and architecture in tool_format.architectures:
            return tool_format
    return DEFAULT_FORMAT


def _gives_away(template_text: str, tool_format: ToolFormat) -> bool:
    return any(all(text in template_text for text in group) for group in tool_format.probes)
