# SPDX-License-Identifier: Apache-2.0
"""Owns which of a format's markers are control tokens of the model, and names them in a grammar.

A control token is no text: a grammar must name it by id, and may then write it nowhere else. All
else of a format stays text, so one format serves a model whose vocabulary has its markers and one
that spells them. Does not know: vocabularies (it is told the ids), formats, turns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools_schema.grammar_nodes import Node, const, sequence, token


@dataclass(frozen=True, slots=True)
class ControlMarkers:
    """Texts that are one control token of the model each, and their ids."""

    ids: tuple[tuple[str, int], ...] = ()

    @classmethod
    def among(cls, markers: Sequence[str], control_ids: Mapping[str, int]) -> ControlMarkers:
        """Those of the model's control tokens that these markers are made of."""
        found = [
            (text, token_id)
            for text, token_id in control_ids.items()
            if text and any(text in marker for marker in markers)
        ]
        return cls(tuple(sorted(found, key=lambda pair: (-len(pair[0]), pair[0]))))

    @property
    def token_ids(self) -> frozenset[int]:
        return frozenset(token_id for _, token_id in self.ids)

    def occur_in(self, *texts: str) -> bool:
        return any(marker in text for text in texts for marker, _ in self.ids)

    def place(self, node: Node) -> tuple[Node, tuple[int, ...]]:
        """The node with its constants split at the control tokens, and the ids it now names."""
        if not self.ids:
            return node, ()
        placed: set[int] = set()
        return self._placed(node, placed), tuple(sorted(placed))

    def _placed(self, node: Node, placed: set[int]) -> Node:
        if node["type"] == "const_string":
            return self._split(node["value"], placed)
        changed = dict(node)
        if "elements" in node:
            changed["elements"] = [self._placed(part, placed) for part in node["elements"]]
        if "content" in node:
            changed["content"] = self._placed(node["content"], placed)
        if "rules" in node:
            changed["rules"] = [[text, self._placed(rest, placed)] for text, rest in node["rules"]]
        return sequence(changed["elements"]) if node["type"] == "sequence" else changed

    def _split(self, text: str, placed: set[int]) -> Node:
        by_text = dict(self.ids)
        pattern = "(" + "|".join(re.escape(marker) for marker, _ in self.ids) + ")"
        parts: list[Node] = []
        for index, piece in enumerate(re.split(pattern, text)):
            if index % 2:
                placed.add(by_text[piece])
                parts.append(token(by_text[piece]))
            elif piece:
                parts.append(const(piece))
        return sequence(parts)
