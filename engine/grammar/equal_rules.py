# SPDX-License-Identifier: Apache-2.0
"""Writes each of a grammar's equal rules once, so that the engine masks its vocabulary once.

A structural tag of 24 tools has 1,700 rules of which 220 differ: every schema brings its own
strings, numbers and whitespace, and xgrammar 0.2.8 goes through the vocabulary for each of them.
Two rules are equal where their bodies are, up to the names of equal rules (of recursive ones too):
the coarsest partition that no body tells apart. Does not know: vocabularies, what a rule means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_RULE = re.compile(r"^([A-Za-z_][\w.-]*)((?:\[[^\]\n]*\])?) ::= ", re.MULTILINE)
# Quoted text, a class of characters, or a word: only words are names.
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|([A-Za-z_][\w.-]*)')
# It prints two digits behind \x and reads as many as there are: "\xe9" and "b" would be one letter.
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")


@dataclass(frozen=True, slots=True)
class _Rule:
    """`parts` is the body without the names in it, `names` what stood between them."""

    name: str
    attributes: str
    parts: tuple[str, ...]
    names: tuple[str, ...]


def merge_equal_rules(ebnf: str, root: str = "root") -> str:
    """The same grammar in the dialect that xgrammar prints, without repeated rules.

    Rules with a budget (`name[max_tokens=5]`) stay apart: their counts are their own.
    """
    rules = _parse(_ESCAPE.sub(_unambiguous, ebnf))
    classes = _classes(rules)
    chosen = {classes[root]: root} if root in classes else {}
    for rule in rules:
        chosen.setdefault(classes[rule.name], rule.name)
    names = {rule.name: chosen[classes[rule.name]] for rule in rules}
    return "".join(_written(rule, names) for rule in rules if names[rule.name] == rule.name)


def _unambiguous(escape: re.Match[str]) -> str:
    return f"\\u00{escape.group(1)}" if escape.group(1) else escape.group()


def _parse(ebnf: str) -> list[_Rule]:
    heads = list(_RULE.finditer(ebnf))
    ends = [head.start() for head in heads[1:]] + [len(ebnf)]
    known = {head.group(1) for head in heads}
    return [
        _rule(head.group(1), head.group(2), ebnf[head.end() : end], known)
        for head, end in zip(heads, ends, strict=True)
    ]


def _rule(name: str, attributes: str, body: str, known: set[str]) -> _Rule:
    parts, names, start = [], [], 0
    for word in _WORD.finditer(body):
        if word.group(1) in known:
            parts.append(body[start : word.start()])
            names.append(word.group(1))
            start = word.end()
    return _Rule(name, attributes, (*parts, body[start:].rstrip("\n")), tuple(names))


def _classes(rules: list[_Rule]) -> dict[str, int]:
    """The class of each rule: split what some body tells apart, until none does."""
    first: dict[object, int] = {}
    classes = {
        rule.name: first.setdefault(rule.parts if not rule.attributes else rule.name, len(first))
        for rule in rules
    }
    num_classes = 0
    while num_classes < len(first):
        num_classes, first = len(first), {}
        classes = {
            rule.name: first.setdefault(
                (classes[rule.name], *(classes[name] for name in rule.names)), len(first)
            )
            for rule in rules
        }
    return classes


def _written(rule: _Rule, names: dict[str, str]) -> str:
    between = [names[name] for name in rule.names]
    body = "".join(a + b for a, b in zip(rule.parts, [*between, ""], strict=True))
    return f"{rule.name}{rule.attributes} ::= {body}\n"
