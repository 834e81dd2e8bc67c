# SPDX-License-Identifier: Apache-2.0
"""The `moorage sessions` commands: ask the running appliance, print.

Does not know: how the answers come about.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import click

from appliance.admin_client import AdminClient, AdminError
from appliance.cli_options import Settings, fail, with_settings

TAIL_LEFT_OUT = ("type", "session_id", "at", "sequence_number")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def ask(settings: Settings, method: str, path: str, **options: Any) -> dict[str, Any]:
    """Return the appliance's answer; exits with one line where there is none."""
    try:
        return AdminClient(settings.load().server.run_dir).call(method, path, **options)
    except AdminError as error:
        fail(str(error))


def path_of(session_id: str) -> str:
    """Return the path of a session, whatever was typed for its id."""
    return f"/v1/sessions/{quote(session_id, safe='')}"


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1))


def print_table(head: list[str], rows: list[list[Any]]) -> None:
    """Print columns, as wide as their widest cell."""
    cells = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


@click.group()
def sessions() -> None:
    """Look at sessions of the running appliance, and act on them."""


@sessions.command("ls")
@click.option("--status", help="Only sessions in this status.")
@click.option("--limit", default=50, show_default=True, help="Most sessions to list.")
@json_option
@with_settings
def sessions_ls(settings: Settings, status: str | None, limit: int, as_json: bool) -> None:
    """List sessions, newest first."""
    page = ask(settings, "GET", "/v1/sessions", params={"status": status, "limit": limit})
    if as_json:
        return print_json(page)
    print_table(
        ["session", "status", "revision", "tokens", "open calls", "cached", "input"],
        [
            [
                row["id"],
                row["status"],
                row["revision"],
                row["num_tokens"],
                len(row["open_calls"]),
                row["usage"]["cache_read"],
                row["usage"]["input"],
            ]
            for row in page["data"]
        ],
    )
    if page["has_more"]:
        click.echo("more sessions than shown; raise --limit", err=True)


@sessions.command("show")
@click.argument("session_id")
@json_option
@with_settings
def sessions_show(settings: Settings, session_id: str, as_json: bool) -> None:
    """Show a session and its turns."""
    session = ask(settings, "GET", path_of(session_id))
    turns = ask(settings, "GET", f"{path_of(session_id)}/turns")["data"]
    if as_json:
        return print_json({"session": session, "turns": turns})
    for name in ("id", "status", "revision", "model", "num_tokens", "num_items", "metadata"):
        click.echo(f"{name}: {_shown(session[name])}")
    rows = [[number, *_turn_cells(turn)] for number, turn in enumerate(turns, 1)]
    print_table(["n", "turn", "status", "input", "l1/l2/l3", "computed", "output", "miss"], rows)


@sessions.command("explain")
@click.argument("session_id")
@click.option(
    "--turn", "which", default="last", show_default=True,
    help="A turn's number (from 1; -1 is the last), its id, or last.",
)  # fmt: skip
@json_option
@with_settings
def sessions_explain(settings: Settings, session_id: str, which: str, as_json: bool) -> None:
    """Say what a turn reused of the cache, why not more, and where its wait went."""
    turns = ask(settings, "GET", f"{path_of(session_id)}/turns")["data"]
    turn = _pick(turns, which)
    cache = turn.get("cache", {})
    facts = {
        "turn": turn["id"],
        "status": turn["status"],
        "input_tokens": turn.get("usage", {}).get("input_tokens"),
        "expected_cached": cache.get("expected"),
        "cached": {tier: cache.get(f"cached_{tier}") for tier in ("l1", "l2", "l3")},
        "computed": cache.get("computed"),
        "miss": cache.get("miss"),
        "waited_ms": _waits(turn),
    }
    if as_json:
        return print_json(facts)
    for name, value in facts.items():
        click.echo(f"{name}: {_shown(value)}")
    if cache.get("computed") is None:
        click.echo("the engine has not said yet what it found, or the turn ended before it did")
    elif facts["miss"] is None:
        click.echo("everything that earlier turns computed was found")


@sessions.command("close")
@click.argument("session_id")
@click.option("--keep-cache", is_flag=True, help="Let its KV decay instead of dropping it.")
@json_option
@with_settings
def sessions_close(settings: Settings, session_id: str, keep_cache: bool, as_json: bool) -> None:
    """Close a session: its transcript is deleted."""
    params = {"cache": "decay" if keep_cache else "release"}
    reply = ask(settings, "DELETE", path_of(session_id), params=params)
    print_json(reply) if as_json else click.echo(f"closed {session_id}")


@sessions.command("fork")
@click.argument("session_id")
@click.option("--at", default="head", show_default=True, help="A turn, an item, or head.")
@click.option("-n", "count", default=1, show_default=True, help="How many children.")
@json_option
@with_settings
def sessions_fork(settings: Settings, session_id: str, at: str, count: int, as_json: bool) -> None:
    """Fork a session; prints the children's ids."""
    body = {"at": at, "n": count}
    reply = ask(settings, "POST", f"{path_of(session_id)}/fork", body=body)
    if as_json:
        return print_json(reply)
    for child in reply["data"]:
        click.echo(child["id"])


@sessions.command("cancel")
@click.argument("session_id")
@json_option
@with_settings
def sessions_cancel(settings: Settings, session_id: str, as_json: bool) -> None:
    """Stop the turn that runs in a session."""
    session = ask(settings, "GET", path_of(session_id))
    turn_id = session["current_turn"]
    if turn_id is None:
        fail(f"no turn runs in {session_id}")
    turn = ask(settings, "POST", f"{path_of(session_id)}/turns/{turn_id}/cancel")
    if as_json:
        return print_json(turn)
    click.echo(f"{turn_id}: {turn['status']}, {turn.get('committed_tokens', 0)} tokens kept")


@sessions.command("suspend")
@click.argument("session_id")
@json_option
@with_settings
def sessions_suspend(settings: Settings, session_id: str, as_json: bool) -> None:
    """Give up a session's KV in L1 and L2; what L3 keeps comes back with its next turn."""
    reply = ask(settings, "POST", f"{path_of(session_id)}/suspend")
    if as_json:
        return print_json(reply)
    where = f"{reply['kept_tokens']} tokens kept in {reply['tier']}" if reply["tier"] else "no tier"
    click.echo(f"suspended {session_id}: {where}, {reply['dropped_tokens']} dropped")


@sessions.command("resume")
@click.argument("session_id")
@json_option
@with_settings
def sessions_resume(settings: Settings, session_id: str, as_json: bool) -> None:
    """Bring a session's KV back to L1."""
    reply = ask(settings, "POST", f"{path_of(session_id)}/resume")
    if as_json:
        return print_json(reply)
    click.echo(
        f"resumed {session_id}: {reply['restored_tokens']} tokens restored, "
        f"{reply['recompute_tokens']} to compute"
    )


@sessions.command("tail")
@click.argument("session_id")
@json_option
@with_settings
def sessions_tail(settings: Settings, session_id: str, as_json: bool) -> None:
    """Follow what happens to a session until it is closed (or Ctrl-C)."""
    try:
        client = AdminClient(settings.load().server.run_dir)
        for event in client.events(f"{path_of(session_id)}/events"):
            if as_json:
                click.echo(json.dumps(event))
                continue
            rest = {k: v for k, v in event.items() if k not in TAIL_LEFT_OUT and v is not None}
            facts = " ".join(f"{name}={value}" for name, value in rest.items())
            click.echo(f"{event['type']}  {facts}")
    except AdminError as error:
        fail(str(error))
    except KeyboardInterrupt:
        click.echo("", err=True)


def _shown(value: Any) -> str:
    """A value in a line for people: `l1 64, l2 0` for an object, `-` for none."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items()) or "-"
    return "-" if value is None else str(value)


def _waits(turn: dict[str, Any]) -> dict[str, float]:
    """Where the time of a turn went: until it was admitted, its prompt, its answer."""
    timings = turn.get("timings", {})
    queued, first = timings.get("queued_ms"), timings.get("first_token_ms")
    waits = {} if queued is None else {"queued": round(queued, 1)}
    if first is not None:
        waits["prefill"] = round(first - (queued or 0.0), 1)
    if "finished_at" in turn:
        total = 1000 * (turn["finished_at"] - turn["created_at"])
        waits["answer"] = round(max(0.0, total - (first or 0.0)), 1)
    return waits


def _turn_cells(turn: dict[str, Any]) -> list[Any]:
    usage, cache_view = turn.get("usage", {}), turn.get("cache", {})
    tiers = "/".join(str(cache_view.get(f"cached_{tier}", "-")) for tier in ("l1", "l2", "l3"))
    miss = cache_view.get("miss")
    return [
        turn["id"],
        turn["status"],
        usage.get("input_tokens", "-"),
        tiers,
        cache_view.get("computed", "-"),
        usage.get("output_tokens", "-"),
        f"{miss['reason']} ({miss['missed_tokens']})" if miss else "-",
    ]


def _pick(turns: list[dict[str, Any]], which: str) -> dict[str, Any]:
    if not turns:
        fail("the session has no turns")
    if which == "last":
        return turns[-1]
    if which.lstrip("-").isdigit():
        number = int(which)
        if number == 0 or abs(number) > len(turns):
            fail(f"--turn: {which}: the session has {len(turns)} turns, numbered from 1")
        return turns[number - 1 if number > 0 else number]
    for turn in turns:
        if turn["id"] == which:
            return turn
    fail(f"--turn: {which!r} is no number, not `last`, and no turn in the session's history")
