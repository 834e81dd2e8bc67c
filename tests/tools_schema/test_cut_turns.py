# SPDX-License-Identifier: Apache-2.0
"""A turn cut anywhere: what is kept of it reads as exactly what its reader was told."""

from __future__ import annotations

import pytest

from tests.fakes.tool_samples import (
    FLAGS,
    LIST,
    TOOLS,
    calls_of,
    check_event_rules,
    parse,
    parser_for,
    problems_of,
    reasoning_of,
    text_of,
    turn_text,
)
from tools_schema.formats.base import ToolFormat
from tools_schema.formats.registry import FORMATS
from tools_schema.tool_choice import parse_tool_choice

CHOICES = {name: parse_tool_choice(name, TOOLS) for name in ("auto", "required")}


def turns_of(fmt: ToolFormat) -> list[tuple[str, bytes]]:
    """Turns of a family: their choice, their bytes."""
    calls = [LIST, FLAGS][: fmt.max_calls]
    said = "" if fmt.is_bare else "See \u00e9 <a>."
    found = [("auto", turn_text(fmt, said, calls)), ("required", turn_text(fmt, "", calls))]
    if fmt.reasoning is not None:
        tags = fmt.reasoning
        thought = f"{tags.begin}{tags.layout_after_begin}hm {{<"
        thought += f"{tags.layout_before_end}{tags.end}{tags.layout_after_end}"
        found.append(("auto", thought + turn_text(fmt, "", calls)))
        found.append(("auto", thought + turn_text(fmt, said, calls)))
    return [(choice, text.encode()) for choice, text in found]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_what_is_kept_of_a_cut_turn_reads_as_what_its_reader_was_told(fmt: ToolFormat) -> None:
    for name, whole in turns_of(fmt):
        choice = CHOICES[name]
        read, again = b"", parse(fmt, [b""], choice=choice)
        for end in range(len(whole) + 1):
            parser = parser_for(fmt, choice=choice)
            told = [*parser.feed(whole[:end]), *parser.finish("length")]
            check_event_rules(told)
            part = parser.whole_part
            kept = whole[:end]
            if part is not None:
                assert part.num_bytes <= end
                kept = whole[: part.num_bytes] + part.closing.encode()
            if kept != read:
                read, again = kept, parse(fmt, [kept], choice=choice)
            assert calls_of(again) == calls_of(told), kept
            assert problems_of(again) == [], kept
            if part is not None:
                shown = text_of(told), reasoning_of(told)
                assert (text_of(again), reasoning_of(again)) == shown, kept
            before = parser.before_calls
            if before is not None and name == "auto" and end % 7 == 0:
                text_only = parse(fmt, [whole[: before.num_bytes]], choice=choice)
                assert calls_of(text_only) == [] and problems_of(text_only) == []
                assert text_of(text_only) == text_of(told)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_turn_cut_behind_its_last_marker_is_kept_as_it_is(fmt: ToolFormat) -> None:
    for name, whole in turns_of(fmt):
        parser = parser_for(fmt, choice=CHOICES[name])
        parser.feed(whole)
        parser.finish("length")
        part = parser.whole_part
        assert part is None or (whole[: part.num_bytes].strip(), part.closing) == (
            whole.strip(),
            "",
        )


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_turn_that_ended_by_itself_is_kept_as_it_is(fmt: ToolFormat) -> None:
    for name, whole in turns_of(fmt):
        parser = parser_for(fmt, choice=CHOICES[name])
        parser.feed(whole)
        parser.finish("stop")
        assert parser.whole_part is None


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_reader_of_a_cut_turn_never_sees_four_bytes_of_a_marker(fmt: ToolFormat) -> None:
    for name, whole in turns_of(fmt):
        for end in range(len(whole)):
            text = text_of(parse(fmt, [whole[:end]], reason="length", choice=CHOICES[name]))
            for marker in (fmt.open_marker, fmt.call_marker, fmt.text_begin):
                tail = text[-len(marker) :] if marker else ""
                sizes = range(4, len(marker) + 1)
                assert not any(tail.endswith(marker[:size]) for size in sizes), text
