# SPDX-License-Identifier: Apache-2.0
"""What a scripted model says to a prompt: chosen by the prompt's own text, as a model would.

A user's message names its scenario as `[[name]]`; `scenarios/name.json` in the model's directory
holds the turns that follow it. A turn's command becomes a call of whatever tool of the prompt
runs shell commands, in the model family's format. Prompts of no scenario, and prompts without
tools to a scenario that needs them (titles, summaries), get a short text. Does not know: pages,
steps, logits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.text.assets import TextAssets
from tools_schema.formats.registry import guess_format
from tools_schema.rendering import CallText, render_calls

SIDE_ANSWER = "A short title"
SHELL_TOOLS = ("bash", "exec_command", "shell_command", "shell", "local_shell")
COMMAND_FIELDS = ("command", "cmd")
LAST_CHARS = 6000  # of what a prompt says last, for the transcript

Json = dict[str, Any]
_MARK = re.compile(r"\[\[([a-z0-9-]+)\]\]")
_TOOL = re.compile(r'\{"type": "function", "function": ')


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer. `calls` (a tool's name, its arguments) and `commands` all become calls in it."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Json], ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def needs_tools(self) -> bool:
        return bool(self.commands or self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`about`: what the transcript says of it."""

    token_ids: list[int]
    about: Json = field(default_factory=dict)


def write_scenario(directory: Path, name: str, turns: Sequence[Turn]) -> str:
    """Write a scenario into a model's directory; returns the mark that calls for it."""
    folder = directory / "scenarios"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_bytes(msgspec.json.encode(turns))
    return f"[[{name}]]"


class AnswerBook:
    """The scenarios of one model's directory."""

    def __init__(self, directory: Path, assets: TextAssets) -> None:
        self._folder = directory / "scenarios"
        self._assets = assets
        self._format = guess_format(assets.chat_template.source)

    def answer(self, prompt: str) -> Answer:
        """Return what to say to a rendered prompt. Raises AssertionError where no tool fits."""
        messages = _messages(prompt)
        tools = _tools(messages)
        name, place = _scenario(messages)
        turns = self._turns(name)
        index = sum(role == "assistant" for role, _ in messages[place + 1 :])
        is_main = index < len(turns) and (bool(tools) or not any(t.needs_tools for t in turns))
        turn = turns[index] if is_main else Turn(text=SIDE_ANSWER)
        last = max((i for i, (role, _) in enumerate(messages) if role == "assistant"), default=0)
        about = {
            "scenario": name if is_main else None,
            "side_of": None if is_main else name,
            "turn": index if is_main else None,
            "num_tools": len(tools),
            "said_last": "\n".join(text for _, text in messages[last + 1 :])[-LAST_CHARS:],
        }
        ids = self._assets.tokenizer.encode_with_control(self._spell(turn, tools))
        return Answer(token_ids=ids, about={**about, "num_answer": len(ids)})

    def _turns(self, name: str | None) -> list[Turn]:
        path = self._folder / f"{name}.json"
        if name is None or not path.exists():
            return []
        return msgspec.json.decode(path.read_bytes(), type=list[Turn])

    def _spell(self, turn: Turn, tools: Sequence[Json]) -> str:
        thought = ""
        if turn.reasoning:
            tags = self._format.reasoning
            assert tags is not None, "a format without reasoning"
            before = tags.begin + tags.layout_after_begin
            after = tags.layout_before_end + tags.end + tags.layout_after_end
            thought = before + turn.reasoning + after
        calls = [_call(tools, name, arguments) for name, arguments in turn.calls]
        calls += [_shell_call(tools, command) for command in turn.commands]
        between = "\n" if turn.text and calls else ""
        return thought + turn.text + between + render_calls(self._format, calls)


def _messages(prompt: str) -> list[tuple[str, str]]:
    """ChatML as (role, text); the open answer at the end is none."""
    parts = prompt.split("<|im_start|>")[1:-1]
    found = []
    for part in parts:
        role, _, text = part.partition("\n")
        found.append((role, text.removesuffix("\n").removesuffix("<|im_end|>")))
    return found


def _tools(messages: Sequence[tuple[str, str]]) -> list[Json]:
    """The tools that the system's message declares, however its family frames them."""
    system = messages[0][1] if messages and messages[0][0] == "system" else ""
    decoder = json.JSONDecoder()
    return [
        decoder.raw_decode(system, found.start())[0]["function"] for found in _TOOL.finditer(system)
    ]


def _scenario(messages: Sequence[tuple[str, str]]) -> tuple[str | None, int]:
    """The scenario that was asked for last, and in which message."""
    for index in range(len(messages) - 1, -1, -1):
        role, text = messages[index]
        found = _MARK.findall(text)
        if role == "user" and found:
            return found[-1], index
    return None, len(messages) - 1


def _call(tools: Sequence[Json], name: str, arguments: Json) -> CallText:
    """A call with its arguments in the schema's order, and blanks no client would write back."""
    schema = next(tool["parameters"] for tool in tools if tool["name"] == name)
    ordered = {field: arguments[field] for field in schema["properties"] if field in arguments}
    assert len(ordered) == len(arguments), (name, arguments)
    return CallText(name=name, arguments=json.dumps(ordered, separators=(", ", ":  ")))


def _shell_call(tools: Sequence[Json], command: str) -> CallText:
    for tool in tools:
        properties = tool["parameters"].get("properties", {})
        wanted = next((name for name in COMMAND_FIELDS if name in properties), None)
        if tool["name"].lower() in SHELL_TOOLS and wanted is not None:
            return _call(tools, tool["name"], _arguments(tool["parameters"], wanted, command))
    raise AssertionError(f"no tool runs a command: {[tool['name'] for tool in tools]}")


def _arguments(schema: Mapping[str, Any], wanted: str, command: str) -> Json:
    """The command and what else is required, in the order of the schema."""
    arguments: Json = {}
    for name, spec in schema["properties"].items():
        if name == wanted:
            is_list = spec.get("type") == "array"
            arguments[name] = ["bash", "-lc", command] if is_list else command
        elif name in schema.get("required", ()):
            arguments[name] = _any_value(spec)
    return arguments


def _any_value(spec: Mapping[str, Any]) -> Any:
    if "enum" in spec:
        return spec["enum"][0]
    values = {"string": "Run it", "boolean": False, "integer": 1000, "number": 1000, "array": []}
    return values.get(str(spec.get("type")), {})
