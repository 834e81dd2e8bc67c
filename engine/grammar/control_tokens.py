# SPDX-License-Identifier: Apache-2.0
"""Keeps control tokens out of whatever a grammar calls text, and in where it names them by id.

xgrammar 0.2.8 never accepts a token without bytes, not even one that a grammar names
(`{"type": "token"}`), and matches one with bytes wherever its bytes may come. So a control token
gets bytes that no rule for bytes can match: an 0xFF, which is no UTF-8 and stops every rule but
"any text", then a mark that every "any text" excludes. Does not know: which tokens those are.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

MARK = "\ufdd0"  # a noncharacter: in no text that anybody interchanges
_FREE = frozenset({"any_text", "dispatch", "triggered_tags"})


def grammar_vocabulary(
    token_bytes: Sequence[bytes],
    control_ids: Collection[int],
    stop_ids: Collection[int],
    vocab_size: int,
) -> list[bytes]:
    """The vocabulary as the grammar engine gets it [vocab_size]; b"" can never be taken.

    Stop ids and holes stay b"": the first end a complete grammar, the others are nothing.
    """
    spelled = [*token_bytes, *[b""] * (vocab_size - len(token_bytes))]
    for token_id in control_ids:
        is_stop = token_id in stop_ids
        spelled[token_id] = b"" if is_stop else b"\xff" + MARK.encode() + str(token_id).encode()
    return spelled


def without_control_in_text(structural_tag: str) -> str:
    """The same structural tag, whose free text excludes the mark; what is no JSON as it is."""
    try:
        tag = json.loads(structural_tag)
    except ValueError:
        return structural_tag
    _exclude_mark(tag)
    return json.dumps(tag, ensure_ascii=False, separators=(",", ":"))


def _exclude_mark(node: Any) -> None:
    stack = [node]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack.extend(part)
        elif isinstance(part, dict):
            excludes = part.get("excludes", [])
            if part.get("type") in _FREE and isinstance(excludes, list):
                part["excludes"] = [*excludes, MARK]
            # What a schema calls a type is none of ours.
            stack.extend(value for key, value in part.items() if key != "json_schema")
