# SPDX-License-Identifier: Apache-2.0
"""Owns following `#/a/b` references inside one schema (RFC 6901).

Does not know: other documents, anchors.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


def resolve_local(root: Any, reference: str) -> Any:
    """The part of `root` that `#` or `#/...` names; None where there is none."""
    if reference in ("#", "#/"):
        return root if reference == "#" else (root.get("") if isinstance(root, dict) else None)
    if not reference.startswith("#/"):
        return None
    node = root
    for token in unquote(reference[2:]).split("/"):
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            if key not in node:
                return None
            node = node[key]
        elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node
