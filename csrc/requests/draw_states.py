# SPDX-License-Identifier: Apache-2.0
"""Draws the request states in docs/scheduler.md from the table the compiler checked.

    python csrc/requests/draw_states.py          print the section
    python csrc/requests/draw_states.py --write  put it into docs/scheduler.md

Does not know the states: `_scheduler.fsm_table()` lists them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import _scheduler

DOC = Path(__file__).resolve().parents[2] / "docs" / "scheduler.md"
BEGIN, END = "<!-- states: generated -->", "<!-- states: end -->"


def draw() -> str:
    """The diagram and the table of legal and illegal pairs, as markdown."""
    table = _scheduler.fsm_table()
    first = table[0][0]
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}: submit"]
    lines += [f"    {state} --> {target}: {event}" for state, event, target in table if target]
    lines += [f"    {table[-1][0]} --> [*]", "```", ""]
    events = list(dict.fromkeys(event for _, event, _ in table))
    lines += [f"| state | {' | '.join(events)} |", "|---" * (len(events) + 1) + "|"]
    for state in dict.fromkeys(state for state, _, _ in table):
        targets = [target or "-" for name, _, target in table if name == state]
        lines.append(f"| {state} | {' | '.join(targets)} |")
    return "\n".join(lines)


def section_of(text: str) -> str:
    """What stands between the markers of a document."""
    found = re.search(f"{re.escape(BEGIN)}\n(.*)\n{re.escape(END)}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"{DOC}: the markers {BEGIN!r} and {END!r} are missing")
    return found.group(1)


def main() -> None:
    if "--write" not in sys.argv[1:]:
        print(draw())
        return
    text = DOC.read_text()
    old = f"{BEGIN}\n{section_of(text)}\n{END}"
    DOC.write_text(text.replace(old, f"{BEGIN}\n{draw()}\n{END}"))


if __name__ == "__main__":
    main()
