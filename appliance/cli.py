# SPDX-License-Identifier: Apache-2.0
"""The `moorage` command: thin click commands over the modules that do the work.

stdout carries data, stderr everything else; exit status 0 ok, 1 failed, 2 usage. Does not know:
how anything is done.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import click

from appliance.cli_admin import doctor, quota, top
from appliance.cli_cache import cache
from appliance.cli_leases import leases
from appliance.cli_options import VERSION, Settings, fail, with_settings
from appliance.cli_sessions import sessions
from appliance.cli_tiers import tiers
from appliance.typed_toml import to_plain


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="moorage")
def main() -> None:
    """Moorage: a serving appliance for coding agents; the session is the unit it serves."""


@main.command()
@with_settings
def serve(settings: Settings) -> None:
    """Start the appliance and keep it running until it is asked to stop."""
    from appliance import logs
    from appliance.check import find_problems
    from appliance.supervisor import StartError, Supervisor

    config = settings.load()
    logs.configure("supervisor", config.server.log_level)
    problems = find_problems(config, port_is_ours=True)
    if problems:
        fail(problems[0])
    try:
        status = Supervisor(config).run()
    except StartError as error:
        fail(str(error))
    raise SystemExit(status)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@with_settings
def check(settings: Settings, as_json: bool) -> None:
    """Say everything that is wrong before anything starts; exit 1 if something is."""
    from appliance.check import find_problems, model_problem

    config = settings.load(validate=False)
    problems = find_problems(config)
    if not any(config.problems()) and (problem := model_problem(config)):
        problems.append(problem)
    if as_json:
        click.echo(json.dumps({"ok": not problems, "problems": problems}, indent=1))
    else:
        for problem in problems:
            click.echo(problem)
        if not problems:
            click.echo("ok")
    raise SystemExit(1 if problems else 0)


@main.command()
@click.argument("src", type=click.Path(exists=True, file_okay=False))
@click.argument("dst", type=click.Path(file_okay=False))
@click.option(
    "--format", "weight_format", required=True,
    type=click.Choice(["nvfp4", "mxfp4", "mxint4", "fp8"]), help="Of the decoder's linear layers.",
)  # fmt: skip
@click.option("--exclude", multiple=True, help="Leave tensors whose name matches this alone.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
def quantize(src: str, dst: str, weight_format: str, exclude: tuple[str, ...], device: str) -> None:
    """Convert a checkpoint to low-bit weights; prints a JSON line per tensor with its error."""
    # The converter needs torch, which nothing here may load.
    patterns = [f"--exclude={pattern}" for pattern in exclude]
    options = ["--format", weight_format, "--device", device, *patterns]
    command = [sys.executable, "-m", "engine.quantize", *options, "--", src, dst]
    os.execv(sys.executable, command)  # what ends this process ends the converter


@main.group()
def config() -> None:
    """Show the settings, or their documentation."""


@config.command("show")
@with_settings
def config_show(settings: Settings) -> None:
    """Print every setting with its value, as JSON (API keys masked)."""
    plain = to_plain(settings.load())
    keys = plain["server"]["api_keys"]
    plain["server"]["api_keys"] = {f"{key[:3]}...": tenant for key, tenant in keys.items()}
    click.echo(json.dumps(plain, indent=1))


@config.command("docs")
def config_docs() -> None:
    """Print docs/configuration.md."""
    from appliance.docs import configuration_page

    click.echo(configuration_page(), nl=False)


@main.command()
@click.option("--base-url", help="Server to drive; default: the appliance of this config.")
@click.option(
    "--api",
    type=click.Choice(["session", "chat", "completions"]),
    default="session",
    show_default=True,
    help="Which API to drive; chat and completions work with any OpenAI-compatible server.",
)
@click.option("--model", default="default", show_default=True, help="Model name to send.")
@click.option("--api-key", default="", help="Bearer key of the server.")
@click.option("--sessions", default=1, show_default=True, help="Sessions at the same time.")
@click.option("--turns", default=4, show_default=True, help="Turns of each session.")
@click.option("--system", default=200, show_default=True, help="Words all sessions share.")
@click.option("--context", default=1000, show_default=True, help="Words of a session's own.")
@click.option("--new", default=80, show_default=True, help="Words each later turn adds.")
@click.option("--output", default=64, show_default=True, help="Tokens each turn generates.")
@click.option("--seed", default=0, show_default=True, help="Seed of the words.")
@with_settings
def bench(settings: Settings, base_url: str | None, **options: Any) -> None:
    """Drive seeded agent sessions against a server; print the figures as JSON."""
    from appliance.bench import BenchParams, run_bench

    if base_url is None:
        from appliance.admin_client import AdminClient, AdminError

        try:
            base_url = AdminClient(settings.load().server.run_dir).url
        except AdminError as error:
            fail(str(error))
    try:
        result = asyncio.run(run_bench(BenchParams(base_url=str(base_url), **options)))
    except (RuntimeError, OSError) as error:
        fail(str(error))
    click.echo(json.dumps(result, indent=1))


main.add_command(sessions)
main.add_command(cache)
main.add_command(leases)
main.add_command(tiers)
main.add_command(quota)
main.add_command(doctor)
main.add_command(top)

if __name__ == "__main__":
    main()
