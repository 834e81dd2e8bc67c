# SPDX-License-Identifier: Apache-2.0
"""Owns the shape of a tool format: plain data that says how a model family writes tool calls.

Does not know: any one family, grammars, streams. A family is one `ToolFormat` value in a file of
its own; rendering (`tools_schema.rendering`), the grammar (`tools_schema.structural_tag`) and the
parse (`tools_schema.stream_parser`) all read the same value.

A turn of a model is: [reasoning] text [calls]. The calls are written as::

    lead section_begin ( call_begin HEADER ARGUMENTS call_end ) separator ( ... ) section_end

with HEADER and ARGUMENTS by `body`. Leading and trailing whitespace of every marker is layout:
rendering and grammar write it exactly, the parser takes any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """`layout_*`: the whitespace the family writes around its reasoning."""

    begin: str
    end: str
    layout_after_begin: str = ""
    layout_before_end: str = ""
    layout_after_end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBody:
    """A call is one JSON object that holds the name and the arguments, in this order."""

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str | None = None
    id_pattern: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamStyle:
    """Arguments as tagged parameters: `begin` KEY `after_key` VALUE `end`, for each one.

    Strings are raw text, everything else is JSON. Which of the two a value is says its schema,
    or, where the family writes it (`type_mark`), the parameter itself: then `after_key` follows
    `type_mark` and "true" or "false" (is it a string).
    """

    begin: str
    after_key: str
    end: str
    type_mark: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderBody:
    """A call is `before_name` NAME [`id_mark` ID] `after_name`, then its arguments.

    `params` None: the arguments are one JSON object.
    """

    before_name: str = ""
    after_name: str
    also_after_name: tuple[str, ...] = ()  # what some outputs have there; read, never written
    id_mark: str = ""
    id_pattern: str = ""
    id_has_name: bool = False  # the id in history is `before_name` NAME `id_mark` ID
    params: ParamStyle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How one family writes tool calls. See the module's docstring for the order of the parts.

    call_begin: empty only for formats whose calls are bare JSON, a whole message of it.
    calls_as_list: the calls are the elements of one JSON list inside the section.
    probes: what in a chat template gives this format away: any group, all texts of the group.
    """

    name: str
    body: JsonBody | HeaderBody
    call_begin: str = ""
    call_end: str = ""
    separator: str = ""
    lead: str = ""
    section_begin: str = ""
    section_end: str = ""
    calls_as_list: bool = False
    allows_empty_list: bool = False  # `[]` says that no call is needed; text may follow
    optional_prefix: str = ""  # a marker some models put before a bare call
    also_call_begin: str = ""  # another beginning of a call; read, never written
    text_begin: str = ""  # what stands before a turn's text, in families that mark it
    preamble: tuple[str, str] | None = None  # around text that is followed by a call
    dropped: tuple[str, ...] = ()  # markers between messages of one turn: neither text nor call
    reasoning_anywhere: bool = False  # reasoning may come again later in the turn
    max_calls: int | None = None  # more calls than this the family cannot write in one turn
    reasoning: ReasoningTags | None = None
    end_of_turn: tuple[str, ...] = ()
    id_style: Literal["minted", "sampled"] = "minted"
    architectures: tuple[str, ...] = ()
    probes: tuple[tuple[str, ...], ...] = ()
    system_template: str = ""  # {tools} and {instructions}; empty: the chat template renders tools
    tools_one_per_line: bool = False  # in {tools}: one JSON object a line, else one JSON list
    result_role: str = "user"
    result_begin: str = "<tool_response>\n"
    result_end: str = "\n</tool_response>"
    result_separator: str = "\n"

    @property
    def is_bare(self) -> bool:
        """Calls have no marker of their own: a whole message of JSON is a call."""
        return not self.open_marker

    @property
    def bare_begin(self) -> str:
        """What a bare call begins with; empty where the arguments are no JSON beside a name."""
        return f'{{"{self.body.name_key}": "' if isinstance(self.body, JsonBody) else ""

    @property
    def call_marker(self) -> str:
        """What a call begins with, without its layout."""
        return self.call_begin.strip().split("\n")[0]

    @property
    def open_marker(self) -> str:
        """What gives the first call away, without its layout."""
        return self.section_begin.strip().split("\n")[0] or self.call_marker

    def markers(self) -> tuple[str, ...]:
        """Every marker a model writes that is no text, without layout."""
        found = [self.section_begin, self.section_end, self.call_begin, self.call_end]
        if isinstance(self.body, HeaderBody):
            found += [self.body.before_name, self.body.id_mark, self.body.after_name]
        if self.reasoning is not None:
            found += [self.reasoning.begin, self.reasoning.end]
        found += [self.optional_prefix, self.text_begin, *self.dropped]
        return tuple(dict.fromkeys(m.strip() for m in found if m.strip()))

    def grammar_texts(self) -> tuple[str, ...]:
        """Every text of this format that its grammar writes: where control tokens may be."""
        found = [*self.markers(), *(self.preamble or ()), self.lead, self.separator]
        if isinstance(self.body, HeaderBody) and self.body.params is not None:
            style = self.body.params
            found += [style.begin, style.after_key, style.end, style.type_mark or ""]
        if self.reasoning is not None:
            found += [self.reasoning.layout_after_begin, self.reasoning.layout_after_end]
        return tuple(found)
