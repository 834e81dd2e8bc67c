# SPDX-License-Identifier: Apache-2.0
"""The written contract and the drawn states are those of the built extension."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import _scheduler

ROOT = Path(__file__).resolve().parents[2]


def stub_members() -> dict[str, set[str]]:
    """Public names of every class of the stub; '' holds the functions."""
    tree = ast.parse((ROOT / "csrc" / "bindings" / "_scheduler.pyi").read_text())
    members: dict[str, set[str]] = {"": set()}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            members[""].add(node.name)
        if isinstance(node, ast.ClassDef):
            names = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            names |= {
                n.target.id
                for n in node.body
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            }
            members[node.name] = {name for name in names if not name.startswith("_")}
    return members


def built_members() -> dict[str, set[str]]:
    members: dict[str, set[str]] = {"": set()}
    for name, value in vars(_scheduler).items():
        if isinstance(value, type):
            members[name] = {
                attribute for attribute in vars(value) if not attribute.startswith("_")
            }
        elif callable(value) and not name.startswith("_"):
            members[""].add(name)
    return members


def test_the_stub_lists_exactly_what_the_extension_has() -> None:
    assert stub_members() == built_members()


def test_the_state_diagram_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location(
        "draw_states", ROOT / "csrc" / "requests" / "draw_states.py"
    )
    assert spec is not None and spec.loader is not None
    draw_states = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_states)
    assert draw_states.section_of(draw_states.DOC.read_text()) == draw_states.draw()


def test_every_state_can_end_and_nothing_leaves_the_end() -> None:
    table = _scheduler.fsm_table()
    reaches = {"Ended"}
    for _ in table:
        reaches |= {state for state, _, target in table if target in reaches}
    assert reaches == {state for state, _, _ in table}
    assert all(target == "" for state, _, target in table if state == "Ended")
