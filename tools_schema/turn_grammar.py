# SPDX-License-Identifier: Apache-2.0
"""Owns the grammar of a whole turn: reasoning, then text, then calls.

Once calls have begun only calls follow, so the turn ends with the last of them. Does not know: how
a call is written (`call_grammar`), plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from tools_schema.call_grammar import CallGrammar
from tools_schema.control_markers import ControlMarkers
from tools_schema.formats.base import ToolFormat
from tools_schema.grammar_nodes import (
    Node,
    any_of,
    const,
    optional,
    regex,
    sequence,
    text,
    without_prefix,
)
from tools_schema.reasoning import Reasoning
from tools_schema.response_format import ResponseFormat
from tools_schema.tool_choice import ToolChoice
from tools_schema.tool_spec import ToolSpec


class TurnGrammar:
    """Builds the nodes of one turn's grammar.

    Args:
        markers: those of the format's markers that are control tokens. Text cannot hold them, so
            what they begin needs no trigger: it just may come.
    """

    def __init__(
        self, tool_format: ToolFormat, calls: CallGrammar, markers: ControlMarkers
    ) -> None:
        self._format = tool_format
        self._call_grammar = calls
        self._markers = markers

    # -- text ------------------------------------------------------------------------------

    def answer(self, response_format: ResponseFormat | None, *, has_tools: bool) -> Node | None:
        """What a turn without calls says; None: anything."""
        begin = const(self._format.text_begin)
        if response_format is not None:
            return sequence([begin, self._call_grammar.response(response_format)])
        if has_tools or self._markers.occur_in(self._format.text_begin):
            return sequence([begin, self._free_text()])
        return None

    def _free_text(self) -> Node:
        """Text that spells no marker: a call would be read out of it."""
        return text(self._text_excludes())

    def _text_excludes(self) -> list[str]:
        fmt = self._format
        excludes = [fmt.open_marker, fmt.call_marker, fmt.also_call_begin, fmt.optional_prefix]
        excludes += [fmt.text_begin, *(fmt.preamble or ()), *fmt.dropped]
        # Their ends too: alone in a text they mean nothing, and clients would see markup.
        excludes += [fmt.section_end.strip(), fmt.call_end.strip()]
        if fmt.reasoning is not None:
            excludes += [fmt.reasoning.begin.strip(), fmt.reasoning.end.strip()]
        return list(dict.fromkeys(marker for marker in excludes if len(marker) > 1))

    # -- calls -----------------------------------------------------------------------------

    def turn(self, tools: Sequence[ToolSpec], choice: ToolChoice, answer: Node | None) -> Node:
        """A turn that may call, or must."""
        fmt = self._format
        calls = self._call_grammar.calls(tools, choice)
        whole = sequence([const(fmt.section_begin), calls, const(fmt.section_end)])
        if fmt.preamble is not None:
            begin, end = fmt.preamble
            said = sequence([const(begin), self._free_text(), const(end)])
            whole = sequence([optional(said), whole])
        with_lead = sequence([const(fmt.lead), whole])
        if choice.is_forced:
            return with_lead
        if fmt.is_bare:
            return any_of([whole, self._not_a_call() if _is_free(answer) else answer or text()])
        if not _is_free(answer):
            return any_of([with_lead, answer or text()])
        if self._markers.occur_in(fmt.open_marker):
            return sequence([self._free_text(), optional(whole)])
        return self._triggered(calls)

    def _not_a_call(self) -> Node:
        """A bare call starts with a brace, so text does not; leading blanks would hide one."""
        return optional(sequence([regex(r"[^{\s]"), self._free_text()]))

    def _triggered(self, calls: Node) -> Node:
        """Free text until the marker; from there on calls."""
        fmt = self._format
        marker = fmt.open_marker
        if fmt.section_begin:
            layout = fmt.section_begin.partition(marker)[2]
            rest = sequence([const(layout), calls, const(fmt.section_end)])
        else:
            rest = without_prefix(calls, marker)
        if fmt.allows_empty_list:
            none = sequence([const("[]" + fmt.section_end), self._free_text()])
            rest = any_of([rest, none])
        return {
            "type": "dispatch",
            "rules": [[marker, rest]],
            "loop": False,
            "excludes": [e for e in self._text_excludes() if e != marker],
        }

    # -- reasoning -------------------------------------------------------------------------

    def with_reasoning(
        self, turn: Node | None, reasoning: Reasoning, budget: int | None
    ) -> Node | None:
        """The turn behind its reasoning: open already (`on`), or opened by the model or not."""
        tags = self._format.reasoning
        if tags is None or reasoning == "off":
            return turn
        is_control = self._markers.occur_in(tags.begin, tags.end)
        if turn is None and budget is None and not is_control:
            return None
        thought = text([tags.begin.strip(), tags.end.strip()], max_tokens=budget)
        rest = turn
        if rest is None:
            rest = self._free_text() if is_control else text()
        closed = [thought, const(tags.end + tags.layout_after_end), rest]
        if reasoning == "on":
            return sequence(closed)
        return any_of([sequence([const(tags.begin + tags.layout_after_begin), *closed]), rest])


def _is_free(answer: Node | None) -> bool:
    """Whether any text is an answer."""
    return answer is None or answer["type"] == "any_text"
