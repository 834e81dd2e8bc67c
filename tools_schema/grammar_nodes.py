# SPDX-License-Identifier: Apache-2.0
"""Owns the nodes of the structural-tag dialect: one function per kind, and tidy sequences.

Does not know: tools, formats. The dialect is that of xgrammar 0.2.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Node = dict[str, Any]

MAX_WHITESPACE = 2  # inside JSON; unbounded, a model can loop on it for ever


def text(excludes: Sequence[str] = (), *, max_tokens: int | None = None) -> Node:
    """Any text without the given strings in it."""
    node: Node = {"type": "any_text"}
    if excludes:
        node["excludes"] = list(excludes)
    if max_tokens is not None:
        node["max_tokens"] = max_tokens
    return node


def const(value: str) -> Node:
    return {"type": "const_string", "value": value}


def token(token_id: int) -> Node:
    """One control token of the model; nothing that spells it."""
    return {"type": "token", "token": token_id}


def regex(pattern: str) -> Node:
    return {"type": "regex", "pattern": pattern}


def optional(content: Node) -> Node:
    return {"type": "optional", "content": content}


def repeat(content: Node, least: int, most: int | None) -> Node:
    return {
        "type": "repeat",
        "min": least,
        "max": -1 if most is None else most,
        "content": content,
    }


def json_value(schema: dict[str, Any]) -> Node:
    """JSON of a lowered schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def any_of(nodes: Sequence[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": list(nodes)}


def sequence(nodes: Sequence[Node]) -> Node:
    """Neighbouring constants joined, empty ones dropped, sequences flattened."""
    joined: list[Node] = []
    for node in nodes:
        for part in node["elements"] if node["type"] == "sequence" else [node]:
            if part["type"] == "const_string" and joined and joined[-1]["type"] == "const_string":
                joined[-1] = const(joined[-1]["value"] + part["value"])
            else:
                joined.append(part)
    joined = [n for n in joined if n["type"] != "const_string" or n["value"]]
    if not joined:
        return const("")
    return joined[0] if len(joined) == 1 else {"type": "sequence", "elements": joined}


def without_prefix(node: Node, prefix: str) -> Node:
    """The node without the constant text that it starts with."""
    if node["type"] == "const_string":
        return const(node["value"].removeprefix(prefix))
    if node["type"] == "or":
        return any_of([without_prefix(n, prefix) for n in node["elements"]])
    first, *rest = node["elements"]
    return sequence([without_prefix(first, prefix), *rest])
