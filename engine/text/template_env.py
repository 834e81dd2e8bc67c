# SPDX-License-Identifier: Apache-2.0
"""The Jinja environment chat templates expect: sandboxed, with the usual extras.

Does not know: tokens, messages' meaning.
Source: the template contract of Hugging Face chat templates (trimmed blocks, loop controls, tojson
that keeps non-ASCII, raise_exception, strftime_now, the generation block).
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.text.errors import ChatTemplateError


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusal(Exception):
    """The template called raise_exception."""


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template. Raises ChatTemplateError with the line of a syntax error."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat_template line {error.lineno}: {error.message}") from error


def variables_of(source: str) -> frozenset[str]:
    """The names that a template that compiles takes from outside."""
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja's own filter: that one escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
