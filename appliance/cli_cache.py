# SPDX-License-Identifier: Apache-2.0
"""The `moorage cache` commands: the radix tree, and who has taken how much KV.

Does not know: how the answers come about.
"""

from __future__ import annotations

from typing import Any

import click

from appliance.cli_options import Settings, with_settings
from appliance.cli_sessions import ask, json_option, print_json, print_table

TIERS = ("l1", "l2", "l3")


@click.group()
def cache() -> None:
    """Look at the KV cache of the running appliance."""


@cache.command("tree")
@click.option("--max-nodes", default=256, show_default=True, help="Most nodes to look at.")
@click.option("--depth", type=int, help="Levels to show, from the root.")
@click.option("--session", "session_id", help="Only the path of this session.")
@click.option("--tenant", help="Only the paths of this tenant's sessions.")
@json_option
@with_settings
def cache_tree(
    settings: Settings,
    max_nodes: int,
    depth: int | None,
    session_id: str | None,
    tenant: str | None,
    as_json: bool,
) -> None:
    """Show the prefixes that are cached, as a tree, and in how many pages of which tier.

    What only lower tiers have is shown without its text: they know pages by name.
    """
    narrowed = {"depth": depth, "session_id": session_id, "tenant": tenant}
    params = {"max_nodes": max_nodes, **narrowed}
    reply = ask(settings, "GET", "/admin/cache/tree", params=params)
    if as_json:
        return print_json(reply)
    children: dict[int, list[dict[str, Any]]] = {}
    for node in reply["nodes"]:
        children.setdefault(node["parent_id"], []).append(node)
    known = {node["node_id"] for node in reply["nodes"]}
    for parent_id in sorted(set(children) - known):
        _print_nodes(children, parent_id, 0)
    if not children:
        click.echo("nothing is resident")
    if reply["truncated"]:
        click.echo("more nodes than shown; raise --max-nodes", err=True)


@cache.command("top")
@click.option(
    "--by", type=click.Choice(["session", "tenant"]), default="session", show_default=True,
    help="Whose byte-seconds to add up.",
)  # fmt: skip
@click.option("--limit", default=20, show_default=True, help="Most rows to show.")
@json_option
@with_settings
def cache_top(settings: Settings, by: str, limit: int, as_json: bool) -> None:
    """Show who has taken the most KV: byte-seconds by tier, most first.

    l1, l2, l3: where a turn would find the tokens. What a lower tier has a copy of besides costs
    as well; --json has those under `copies`.
    """
    reply = ask(settings, "GET", "/admin/cache/top", params={"by": by, "limit": limit})
    if as_json:
        return print_json(reply)
    costs = [f"{tier}_byte_s" for tier in TIERS]
    head = ["tenant", "sessions", "tokens", *(f"{tier} MB s" for tier in TIERS)]
    if by == "session":
        head = ["session", "tenant", "status", "tokens", *TIERS, *head[3:]]
    rows = []
    for row in reply["data"]:
        cells = [row["tenant"], row.get("sessions"), row["tokens_total"]]
        if by == "session":
            at = row["resident"] or dict.fromkeys(TIERS, "-")
            cells = [row["session_id"], row["tenant"], row["status"], row["tokens_total"]]
            cells += [at[tier] for tier in TIERS]
        rows.append([*cells, *(f"{row['cost'][name] / 1e6:.1f}" for name in costs)])
    print_table(head, rows)


def _print_nodes(children: dict[int, list[dict[str, Any]]], parent_id: int, depth: int) -> None:
    for node in children.get(parent_id, ()):
        users = f", {node['num_users']} in use" if node["num_users"] else ""
        text = node["text"].replace("\n", "\\n")[:48]
        tiers = ", ".join(f"{tier} {num}" for tier, num in node["tiers"].items() if num)
        where = f" ({tiers})" if tiers else ""
        click.echo(
            f"{'  ' * depth}{node['node_id']}: {node['num_tokens']} tokens, "
            f"{node['num_pages']} pages{where}{users}  {text}".rstrip()
        )
        _print_nodes(children, node["node_id"], depth + 1)
