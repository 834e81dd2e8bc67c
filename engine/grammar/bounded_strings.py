# SPDX-License-Identifier: Apache-2.0
r"""Lets JSON strings with a length hold escapes: to xgrammar 0.2.8 their characters are raw ones.

It writes `minLength` and `maxLength` as a count of one rule, `[^"\\\r\n]`. Such a string could hold
no quote, no backslash and no line break (so hardly any file or command), but a raw tab, which is no
JSON. Here it becomes a chain of rules of the engine's own shape for strings, one for each count, in
which a pair of escaped surrogates is one character. Does not know: schemas, vocabularies.
Source: RFC 8259, section 7.
"""

from __future__ import annotations

import re

_STRING = re.compile(r'"\\"" \w+_characters(?:_\d+)*\{(\d+), (-?\d+)\} "\\""')
_CHARACTER = re.compile(r'^\w+_characters(?:_\d+)* ::= \(\(\[\^\\"\\\\\\r\\n\]\)\)\n', re.MULTILINE)
# A longer chain is left as the engine wrote it.
MAX_COUNT = 64
_UNBOUNDED = -1
_HEX = "[0-9A-Fa-f]"
_ESCAPE = " | ".join(
    (
        r"([\"\\/bfnrt])",
        f'("u" [0-9A-Ca-cEFef] {_HEX} {_HEX} {_HEX})',
        f'("u" [Dd] [0-7] {_HEX} {_HEX})',
        rf'("u" [Dd] [89ABab] {_HEX} {_HEX} "\\u" [Dd] [C-Fc-f] {_HEX} {_HEX})',
    )
)


def with_escapes(ebnf: str) -> str:
    """The same grammar, whose counted characters are those of JSON strings."""
    chains: dict[str, str] = {}

    def counted(found: re.Match[str]) -> str:
        low, high = int(found.group(1)), int(found.group(2))
        if max(low, high) > MAX_COUNT:
            return found.group()
        return rf'"\"" {_chain(low, high, chains)}'

    changed = _STRING.sub(counted, ebnf)
    if not chains:
        return ebnf
    if "_characters{" not in changed:
        changed = _CHARACTER.sub("", changed)
    chains["counted_escape"] = f"({_ESCAPE})"
    return "".join(f"{name} ::= {body}\n" for name, body in chains.items()) + changed


def _chain(low: int, high: int, chains: dict[str, str]) -> str:
    """The rule for `low` to `high` more characters and the closing quote."""
    name = f"counted_{low}_{'more' if high == _UNBOUNDED else high}"
    if name in chains:
        return name
    chains[name] = ""  # it may lead to itself
    parts = [] if low else [r'("\"")']
    if high:
        rest = _chain(max(low - 1, 0), high if high == _UNBOUNDED else high - 1, chains)
        parts += [rf"([^\0-\x1f\"\\\r\n] {rest})", rf'("\\" counted_escape {rest})']
    chains[name] = f"({' | '.join(parts)})"
    return name
