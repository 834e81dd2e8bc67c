# SPDX-License-Identifier: Apache-2.0
"""The `moorage tiers` commands and `moorage cache verify`: where KV pages are, and are they whole.

Does not know: how the answers come about.
"""

from __future__ import annotations

from typing import Any

import click

from appliance.cli_cache import cache
from appliance.cli_options import Settings, with_settings
from appliance.cli_sessions import ask, json_option, print_json, print_table

MIB = 1 << 20


@click.group()
def tiers() -> None:
    """Look at the KV tiers: device (L1), host memory (L2), store (L3)."""


@tiers.command("status")
@json_option
@with_settings
def tiers_status(settings: Settings, as_json: bool) -> None:
    """Show state, size and traffic of each tier."""
    reply = ask(settings, "GET", "/admin/tiers")
    if as_json:
        return print_json(reply)
    rows = [
        [
            row["tier"],
            row["kind"],
            row["state"],
            f"{row['used_bytes'] / MIB:.1f}",
            f"{row['capacity_bytes'] / MIB:.1f}",
            row["num_pages"],
            _traffic(row["counters"]),
            _gone(row["counters"]),
            row["reason"] or "-",
        ]
        for row in reply["data"]
    ]
    columns = ["tier", "kind", "state", "MiB", "of", "pages", "came in (lost)", "made room"]
    print_table([*columns, "reason"], rows)


@tiers.command("drain")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait at most.")
@json_option
@with_settings
def tiers_drain(settings: Settings, timeout: float, as_json: bool) -> None:
    """Write back what L1 and L2 hold and lower tiers lack."""
    reply = ask(settings, "POST", "/admin/tiers/drain", params={"timeout_s": timeout})
    if as_json:
        return print_json(reply)
    click.echo(
        f"{reply['num_pages']} pages came down, {reply['num_lost']} were lost, "
        f"{reply['num_pending']} are still on their way"
        + ("" if reply["is_flushed"] else "; the store did not make them safe (see tiers status)")
    )


@cache.command("verify")
@click.option("--max-pages", default=4096, show_default=True, help="Most pages to read, per tier.")
@json_option
@with_settings
def cache_verify(settings: Settings, max_pages: int, as_json: bool) -> None:
    """Read pages of L2 and L3 back and check every byte; exit status 1 if one is bad."""
    reply = ask(settings, "POST", "/admin/cache/verify", params={"max_pages": max_pages})
    if as_json:
        print_json(reply)
    else:
        for tier, num_checked in reply["checked"].items():
            click.echo(f"{tier}: {num_checked} pages checked, {reply['bad'][tier]} bad")
    if any(reply["bad"].values()):
        raise SystemExit(1)


def _traffic(counters: dict[str, Any]) -> str:
    """Pages that came into a tier, by kind of move, with those lost on the way."""
    shown = []
    for kind in ("load_back", "write_back", "fetch", "store"):
        if f"{kind}_pages" in counters:
            lost = int(counters[f"{kind}_lost"])
            text = f"{kind} {int(counters[f'{kind}_pages'])}"
            shown.append(f"{text} ({lost})" if lost else text)
    return ", ".join(shown) or "-"


def _gone(counters: dict[str, Any]) -> str:
    """Pages that made room for others, and those dropped as the page before them was gone."""
    evicted = [counters[name] for name in ("evicted_pages", "evicted") if name in counters]
    text = f"{int(sum(evicted))}" if evicted else "-"
    num_orphaned = int(counters.get("orphaned", 0))
    return f"{text}, orphaned {num_orphaned}" if num_orphaned else text
