# SPDX-License-Identifier: Apache-2.0
"""The `moorage leases` commands: who holds KV memory, and taking it back.

Does not know: how the answers come about.
"""

from __future__ import annotations

import click

from appliance.cli_options import Settings, fail, with_settings
from appliance.cli_sessions import ask, json_option, print_json, print_table


@click.group()
def leases() -> None:
    """Look at leases of KV memory, and revoke them."""


@leases.command("ls")
@json_option
@with_settings
def leases_ls(settings: Settings, as_json: bool) -> None:
    """List the live leases of every session."""
    reply = ask(settings, "GET", "/admin/leases")
    if as_json:
        return print_json(reply)
    names = ("id", "session_id", "tenant", "tier", "state", "tokens_granted", "reason")
    rows = [
        [row[name] if row[name] is not None else "-" for name in names] for row in reply["data"]
    ]
    print_table(["lease", "session", "tenant", "tier", "state", "tokens", "reason"], rows)


@leases.command("revoke")
@click.argument("lease_id")
@json_option
@with_settings
def leases_revoke(settings: Settings, lease_id: str, as_json: bool) -> None:
    """Let a lease go before its time."""
    rows = ask(settings, "GET", "/admin/leases")["data"]
    found = next((row for row in rows if row["id"] == lease_id), None)
    if found is None:
        fail(f"no lease {lease_id}")
    path = f"/v1/sessions/{found['session_id']}/leases/{lease_id}"
    reply = ask(settings, "DELETE", path)
    print_json(reply) if as_json else click.echo(f"revoked {lease_id}")
