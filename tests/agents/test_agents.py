# SPDX-License-Identifier: Apache-2.0
"""Real coding agents, run to their end against a real server with a scripted model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

import pytest

from tests.agents.conftest import Json, ScriptedAppliance
from tests.agents.running_agents import Agent, Run
from tests.fakes.scripted_answers import Turn

AgentOf = Callable[[str], Agent]
Report = Callable[[str], None]

TOOL_AGENTS = ("opencode", "codex", "claude", "mini")
END_MINI = ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",)  # what ends a run of mini-swe-agent


TASK = """\
Please make two files in this directory, and tell me what is in them. The first one says what the
first berth holds, the second one what the second berth holds; both are read by the harbour's own
programs, so write them just as I say, byte for byte, with nothing in front and nothing behind.
Look at what is there before you write anything, use the shell for all of it, one command at a
time, and read both files back when you are done. Do not install anything, do not start anything
that goes on running, and do not look outside of this directory. """


def last_turn(agent: str, text: str) -> Turn:
    return Turn(text=text, commands=END_MINI if agent == "mini" else ())


def shares(asked: Sequence[Json]) -> list[float]:
    return [record["num_cached"] / record["num_prompt"] for record in asked]


def line(name: str, asked: Sequence[Json], run: Run) -> str:
    found = " ".join(f"{share:.1%}" for share in shares(asked))
    return f"{name:<22}{len(asked):>6}{found:>24}{run.took_s:>10.1f}"


def assert_history_was_cached(before: Json, after: Json) -> None:
    """The next prompt goes on from all that the one before it had computed or sampled."""
    known = before["num_prompt"] + before["num_answer"]
    assert after["num_cached"] >= 0.99 * known, (before, after)


def assert_server_says_so(session: Json, asked: Sequence[Json], *, is_named: bool) -> None:
    """Its own account of the conversation agrees with what its model had to compute."""
    assert session["named_by"] == ("client" if is_named else "opening")
    turns = [one for one in session["recent"] if one["recalled_messages"]]
    assert [one["usage"]["input_tokens"] for one in turns] == [r["num_prompt"] for r in asked[1:]]
    assert [one["usage"]["cached_tokens"] for one in turns] == [r["num_cached"] for r in asked[1:]]
    assert all(one["branches_at"] is None for one in turns)
    for before, one in zip(asked, turns, strict=False):
        # With the token that ends an answer, which the script does not count.
        known = before["num_prompt"] + before["num_answer"] + 1
        assert one["usage"]["recalled_tokens"] == known


@pytest.mark.parametrize("name", TOOL_AGENTS)
def test_an_agent_uses_tools_over_several_turns_on_a_cached_history(
    served: ScriptedAppliance, agent_of: AgentOf, report: Report, name: str
) -> None:
    mark = served.scenario(
        f"tools-{name}",
        [
            Turn(
                reasoning="There may be a file.",
                text="I look first.",
                commands=("echo 'one \"1\"' > one.txt; echo seen-one",),
            ),
            Turn(commands=("printf 'two\\n\\ttab \\\\ slash' > two.txt; echo seen-two",)),
            Turn(text="And both:", commands=("cat one.txt two.txt; echo seen-three",)),
            last_turn(name, "All is done."),
        ],
    )
    agent = agent_of(name)
    run = agent.run(TASK + mark)
    assert run.code == 0, run.output
    assert (agent.work / "one.txt").read_text() == 'one "1"\n'
    assert (agent.work / "two.txt").read_text() == "two\n\ttab \\ slash"
    asked = served.asked(f"tools-{name}")
    report(line(name, asked, run))
    assert [record["turn"] for record in asked] == [0, 1, 2, 3]
    for record, said in zip(asked[1:], ("seen-one", "seen-two", "seen-three"), strict=True):
        assert said in record["said_last"]
    for before, after in zip(asked, asked[1:], strict=False):
        assert_history_was_cached(before, after)
    assert min(shares(asked)[1:]) >= 0.95, asked
    assert_server_says_so(served.last_session(), asked, is_named=name != "mini")
    # opencode asks for a title at the same time, under the same name: a branch of its own.
    side = served.side_requests(f"tools-{name}")
    assert [record["num_tools"] for record in side] == ([0] if name == "opencode" else [])


@pytest.mark.parametrize("name", ["opencode", "codex", "claude"])
def test_a_conversation_that_goes_on_later_is_still_cached(
    served: ScriptedAppliance, agent_of: AgentOf, report: Report, name: str
) -> None:
    first = served.scenario(
        f"first-{name}", [Turn(commands=("echo seen-first",)), Turn(text="Done.")]
    )
    then = served.scenario(
        f"then-{name}", [Turn(commands=("echo seen-then",)), Turn(text="Done too.")]
    )
    agent = agent_of(name)
    for task in (first, then):
        run = agent.run(f"Do this. {task}", goes_on=task is then)
        assert run.code == 0, run.output
    asked = [*served.asked(f"first-{name}"), *served.asked(f"then-{name}")]
    report(line(f"{name}, resumed", asked, run))
    assert len(asked) == 4 and "seen-then" in asked[3]["said_last"]
    for before, after in zip(asked, asked[1:], strict=False):
        assert_history_was_cached(before, after)
    assert min(shares(asked)[1:]) >= 0.95, asked


def field(agent: Agent, snake: str) -> str:
    """A tool's argument in the agent's own spelling."""
    if agent.name == "claude":
        return snake
    first, *rest = snake.split("_")
    return first + "".join(word.capitalize() for word in rest)


def tool(agent: Agent, name: str, **arguments: str) -> tuple[str, Json]:
    spelled = {field(agent, key): value for key, value in arguments.items()}
    return (name.capitalize() if agent.name == "claude" else name), spelled


@pytest.mark.parametrize("name", ["opencode", "claude"])
def test_an_agent_s_own_tools_and_several_calls_in_one_turn_work(
    served: ScriptedAppliance, agent_of: AgentOf, report: Report, name: str
) -> None:
    agent = agent_of(name)
    path = str(agent.work / "ship.py")
    source = 'def name():\n\treturn "Hope"  # \\n is no line end, \u00e9 \u2693\n'
    calls = (
        tool(agent, "write", file_path=path, content=source),
        tool(agent, "edit", file_path=path, old_string='"Hope"', new_string='"Faith"'),
        tool(agent, "read", file_path=path),
    )
    mark = served.scenario(
        f"own-{name}",
        [
            Turn(calls=calls[:1]),
            Turn(calls=calls[1:2]),
            Turn(text="Both:", calls=calls[2:], commands=("wc -l ship.py",)),
            Turn(text="Done."),
        ],
    )
    run = agent.run(f"Name the ship. {mark}")
    assert run.code == 0, run.output
    assert (agent.work / "ship.py").read_text() == source.replace("Hope", "Faith")
    asked = served.asked(f"own-{name}")
    report(line(f"{name}, own tools", asked, run))
    assert "Faith" in asked[3]["said_last"] and "2 ship.py" in asked[3]["said_last"]
    for before, after in zip(asked, asked[1:], strict=False):
        assert_history_was_cached(before, after)


def test_a_sub_agent_is_a_branch_under_the_same_name(
    served: ScriptedAppliance, agent_of: AgentOf
) -> None:
    sub = served.scenario(
        "sub-agent", [Turn(commands=("echo seen-by-sub",)), Turn(text="The sub-agent says 42.")]
    )
    given = {
        "description": "Look it up",
        "prompt": f"Look it up. {sub}",
        "run_in_background": False,
    }
    mark = served.scenario(
        "main-agent",
        [Turn(commands=("echo a",)), Turn(calls=(("Agent", given),)), Turn(text="It is 42.")],
    )
    run = agent_of("claude").run(f"Ask somebody. {mark}")
    assert run.code == 0 and "It is 42." in run.output, run.output
    asked, below = served.asked("main-agent"), served.asked("sub-agent")
    assert len(below) == 2 and "seen-by-sub" in below[1]["said_last"]
    assert len(asked) == 3 and "The sub-agent says 42." in asked[2]["said_last"]
    for before, after in (*zip(asked, asked[1:], strict=False), below):
        assert_history_was_cached(before, after)
    session = served.last_session()
    assert session["named_by"] == "client" and session["branches"] == 2
    assert session["requests"] == 5


@pytest.mark.parametrize("name", ["codex", "claude"])
def test_an_agent_outlives_the_server_s_api_process(
    served: ScriptedAppliance, agent_of: AgentOf, name: str
) -> None:
    """Killed while the agent runs a tool: its next request waits for the process that follows."""
    kill = f"import json,os; os.kill(json.load(open('{served.state}'))['pids']['api'], 9)"
    mark = served.scenario(
        f"killed-{name}",
        [
            Turn(commands=("echo before",)),
            Turn(commands=(f'{sys.executable} -c "{kill}"',)),
            Turn(commands=("echo after > after.txt",)),
            Turn(text="Still here."),
        ],
    )
    agent = agent_of(name)
    run = agent.run(f"Do it. {mark}")
    assert run.code == 0 and "Still here." in run.output, run.output
    assert (agent.work / "after.txt").read_text() == "after\n"
    asked = served.asked(f"killed-{name}")
    assert [record["turn"] for record in asked] == [0, 1, 2, 3]
    for before, after in zip(asked, asked[1:], strict=False):
        assert_history_was_cached(before, after)


@pytest.mark.parametrize("name", ["codex", "claude"])
def test_an_agent_that_wants_its_last_word_in_a_schema_gets_it(
    served: ScriptedAppliance, agent_of: AgentOf, name: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"berth": {"type": "string"}, "depth": {"type": "integer"}},
        "required": ["berth", "depth"],
        "additionalProperties": False,
    }
    said = {"berth": "north", "depth": 12}
    last = {  # Claude Code gives the model a tool for it
        "codex": [Turn(text=json.dumps(said))],
        "claude": [Turn(calls=(("StructuredOutput", said),)), Turn(text="Said.")],
    }[name]
    mark = served.scenario(f"schema-{name}", [Turn(commands=("echo a",)), *last])
    agent = agent_of(name)
    (agent.home / "schema.json").write_text(json.dumps(schema))
    option = {
        "codex": ("--output-schema", str(agent.home / "schema.json")),
        "claude": ("--json-schema", json.dumps(schema)),
    }[name]
    run = agent.run(f"Where? {mark}", *option)
    assert run.code == 0, run.output
    events = [json.loads(line) for line in run.output.splitlines() if line.startswith("{")]
    if name == "codex":
        messages = [e["item"]["text"] for e in events if e.get("item", {}).get("text")]
        assert json.loads(messages[-1]) == said
    else:
        assert events[-1]["structured_output"] == said


def test_aider_edits_a_file_without_tools(
    served: ScriptedAppliance, agent_of: AgentOf, report: Report
) -> None:
    edit = "I change the word.\n\nf.py\n```\nprint('moored')\n```\n"
    mark = served.scenario("edit-aider", [Turn(text=edit)])
    agent = agent_of("aider")
    (agent.work / "f.py").write_text("print('adrift')\n")
    run = agent.run(f"Say moored. {mark}", "f.py")
    assert run.code == 0, run.output
    assert (agent.work / "f.py").read_text() == "print('moored')\n"
    asked = served.asked("edit-aider")
    report(line("aider", asked, run))
    assert len(asked) == 1 and asked[0]["num_tools"] == 0
