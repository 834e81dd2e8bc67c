# SPDX-License-Identifier: Apache-2.0
"""`moorage quota`, `doctor` and `top`: limits of tenants, what is wrong, what goes on now.

Does not know: how the answers come about.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any
from urllib.parse import quote

import click

from appliance.cli_options import Settings, fail, with_settings
from appliance.cli_sessions import ask, json_option, print_json, print_table

LIMITS = ("sessions", "tokens")


@click.group()
def quota() -> None:
    """Look at the limits of tenants, and set them."""


@quota.command("get")
@click.argument("tenant")
@json_option
@with_settings
def quota_get(settings: Settings, tenant: str, as_json: bool) -> None:
    """Show a tenant's limits and what it has used."""
    _show(ask(settings, "GET", _path(tenant)), as_json)


@quota.command("set")
@click.argument("tenant")
@click.option("--sessions", help="Most sessions; 0: no limit, default: as configured for all.")
@click.option("--tokens", help="Most tokens of history; 0: no limit, default: as configured.")
@json_option
@with_settings
def quota_set(
    settings: Settings, tenant: str, sessions: str | None, tokens: str | None, as_json: bool
) -> None:
    """Set limits of a tenant; one that is not named stays as it is."""
    if sessions is None and tokens is None:
        fail("quota set: give --sessions or --tokens")
    now = ask(settings, "GET", _path(tenant))
    body = {f"max_{name}": now[f"max_{name}"] if now["is_own"][f"max_{name}"] else None
            for name in LIMITS}  # fmt: skip
    for name, text in (("sessions", sessions), ("tokens", tokens)):
        if text is not None:
            body[f"max_{name}"] = _limit(name, text)
    _show(ask(settings, "PUT", _path(tenant), body=body), as_json)


@click.command()
@json_option
@with_settings
def doctor(settings: Settings, as_json: bool) -> None:
    """Look the running appliance over; exit 1 if something has failed."""
    report = ask(settings, "GET", "/admin/doctor")
    if as_json:
        print_json(report)
    else:
        for found in report["findings"]:
            hint = f" ({found['hint']})" if found.get("hint") else ""
            click.echo(f"{found['level']:8} {found['part']}: {found['text']}{hint}")
    raise SystemExit(1 if report["status"] == "failed" else 0)


@click.command()
@click.option("--every", default=2.0, show_default=True, help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Look once, do not refresh.")
@json_option
@with_settings
def top(settings: Settings, every: float, once: bool, as_json: bool) -> None:
    """Watch what runs now: requests, pages, tokens a second, and the sessions in a turn."""
    before: dict[str, Any] | None = None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            stats = ask(settings, "GET", "/admin/engine/stats")["stats"]
            running = ask(settings, "GET", "/v1/sessions", params={"status": "running"})["data"]
            _print_top(stats, before, running, every, as_json)
            before = stats
            if once:
                return
            time.sleep(every)
            if not as_json:
                click.clear()


def _print_top(
    stats: dict[str, Any],
    before: dict[str, Any] | None,
    running: list[dict[str, Any]],
    every_s: float,
    as_json: bool,
) -> None:
    rate = (stats["output_tokens"] - before["output_tokens"]) / every_s if before else None
    if as_json:
        shown = {"stats": stats, "tokens_per_s": rate, "running": running}
        return click.echo(json.dumps(shown))
    click.echo(
        f"{stats['running']:.0f} running, {stats['waiting']:.0f} waiting, "
        f"{'-' if rate is None else f'{rate:.0f}'} tokens/s, "
        f"{stats['free_pages']:.0f} of {stats['num_pages']:.0f} pages free"
    )
    if drafted := stats.get("draft_tokens"):
        accepted = stats["draft_tokens_accepted"]
        click.echo(f"{accepted:.0f} of {drafted:.0f} drafts kept ({accepted / drafted:.0%})")
    rows = [[s["id"], s["current_turn"], s["num_tokens"], s["usage"]["output"]] for s in running]
    print_table(["session", "turn", "tokens", "output so far"], rows)


def _path(tenant: str) -> str:
    return f"/admin/quotas/{quote(tenant, safe='')}"


def _limit(name: str, text: str) -> int | None:
    if text == "default":
        return None
    if not text.isdigit():
        fail(f"--{name}: expected a number or `default`, got {text!r}")
    return int(text)


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return print_json(answer)
    rows = [
        [
            name,
            answer[name],
            answer[f"max_{name}"] or "no limit",
            "its own" if answer["is_own"][f"max_{name}"] else "as configured",
        ]
        for name in LIMITS
    ]
    print_table([answer["tenant"], "used", "limit", "set by"], rows)
