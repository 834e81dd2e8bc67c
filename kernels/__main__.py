# SPDX-License-Identifier: Apache-2.0
"""`python -m kernels`: list kernels, explain a selection, verify against the reference, time.

Does not know: the appliance. stdout carries data (JSON with --json), exit 1 means a failed check.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict

import click
import torch

from kernels import ops  # noqa: F401 - registers every kernel
from kernels.bench import time_family
from kernels.errors import KernelError
from kernels.platform import capability_of
from kernels.registry import REGISTRY, KernelSpec
from kernels.selection import explain_selection
from kernels.signature import CallSignature
from kernels.verify import Verdict, all_cases, verify_family


@click.group()
def main() -> None:
    """Kernels of this machine: what there is, what is chosen, whether it is right."""


@main.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def list_kernels(as_json: bool) -> None:
    """List every registered kernel, best first."""
    REGISTRY.load_plugins()
    for family in REGISTRY.families():
        for spec in REGISTRY.specs(family):
            missing = _missing(spec)
            if as_json:
                record = {
                    "family": family,
                    "name": spec.name,
                    "priority": spec.priority.name,
                    "device": spec.device,
                    "missing": missing,
                }
                click.echo(json.dumps(record))
            else:
                note = f"  ({missing})" if missing else ""
                click.echo(
                    f"{family:18} {spec.name:18} {spec.priority.name:12} {spec.device}{note}"
                )


def _missing(spec: KernelSpec) -> str | None:
    """What this machine lacks to run a kernel at all."""
    if spec.device == "any":
        return None
    if spec.device == "cuda" and not torch.cuda.is_available():
        return "torch finds no GPU"
    return capability_of(spec.device).lacks(spec.features, spec.min_sm)


def _pairs(values: tuple[str, ...], option: str) -> Iterator[tuple[str, str]]:
    seen = set()
    for value in values:
        name, separator, content = value.partition("=")
        if not separator or not name or not content:
            raise click.BadParameter(f"got {value!r}; allowed: NAME=VALUE", param_hint=option)
        if name in seen:
            raise click.BadParameter(f"got {name!r} twice; allowed: once", param_hint=option)
        seen.add(name)
        yield name, content


def _trait(value: str) -> int | bool | str:
    if value in ("true", "false"):
        return value == "true"
    return int(value) if re.fullmatch("-?[0-9]{1,18}", value) else value


@main.command()
@click.argument("family")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--format", "formats", multiple=True, help="ARGUMENT=FORMAT, e.g. weight=q4_1.")
@click.option("--trait", "traits", multiple=True, help="NAME=VALUE, e.g. head_dim=64.")
def explain(family: str, device: str, formats: tuple[str, ...], traits: tuple[str, ...]) -> None:
    """Say which kernel of FAMILY would run a call, and why not the others."""
    REGISTRY.load_plugins()
    if family not in REGISTRY.families():
        known = ", ".join(REGISTRY.families())
        raise click.BadParameter(f"got {family!r}; allowed: {known}", param_hint="FAMILY")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter(
            "got cuda; allowed: cpu, as torch finds no GPU", param_hint="--device"
        )
    given = dict(_pairs(formats, "--format"))
    signature = CallSignature(
        family,
        device,
        tuple(given.items()),
        tuple((name, _trait(value)) for name, value in _pairs(traits, "--trait")),
    )
    try:
        explanation = explain_selection(signature)
    except (ArithmeticError, TypeError, ValueError) as error:
        # Kernels ask for traits that ops give them; here anybody does.
        if isinstance(error, KernelError) or not traits:
            raise
        given_traits = ", ".join(traits)
        raise click.BadParameter(
            f"got {given_traits}; allowed: what the op {family} would say ({error})",
            param_hint="--trait",
        ) from None
    click.echo(str(explanation))
    asked = {argument for item in explanation.candidates for argument in item.spec.formats}
    if not asked.issuperset(given):
        names = ", ".join(sorted(given.keys() - asked))
        click.echo(f"note: no kernel of {family} looks at the format of {names}", err=True)
    if explanation.chosen is None:
        sys.exit(1)


def _line(verdict: Verdict) -> str:
    if verdict.error is None:
        return f"skip  {verdict.family} {verdict.kernel}: {verdict.case}"
    word = "ok  " if verdict.passes else "FAIL"
    if verdict.raised is not None:
        return f"{word}  {verdict.family} {verdict.kernel}: {verdict.case} raised {verdict.raised}"
    return (
        f"{word}  {verdict.family} {verdict.kernel}: {verdict.case} "
        f"error {verdict.error:.2e} <= {verdict.allowed:.0e}"
    )


@main.command()
@click.argument("families", nargs=-1)
@click.option("--verbose", is_flag=True, help="Print passing cases too.")
def verify(families: tuple[str, ...], verbose: bool) -> None:
    """Compare kernels with the reference on random calls (all FAMILIES that have cases)."""
    known = all_cases()
    for family in families:
        if family not in known:
            raise click.BadParameter(
                f"got {family!r}; allowed: {', '.join(known)}", param_hint="FAMILIES"
            )
    num_failed = num_run = 0
    for family in families or known:
        for verdict in verify_family(family):
            num_run += verdict.error is not None
            num_failed += not verdict.passes
            if verbose or not verdict.passes:
                click.echo(_line(verdict))
    click.echo(f"{num_run} comparisons, {num_failed} failed")
    if num_failed:
        sys.exit(1)


@main.command()
@click.argument("families", nargs=-1)
@click.option("--repeats", default=20, show_default=True, help="Timed runs of each case.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def bench(families: tuple[str, ...], repeats: int, as_json: bool) -> None:
    """Time every kernel of FAMILIES (all that have cases) on the cases of verify."""
    known = all_cases()
    for family in families:
        if family not in known:
            raise click.BadParameter(
                f"got {family!r}; allowed: {', '.join(known)}", param_hint="FAMILIES"
            )
    if repeats < 1:
        raise click.BadParameter(f"got {repeats}; allowed: 1 or more", param_hint="--repeats")
    REGISTRY.load_plugins()
    num_raised = 0
    for family in families or known:
        for timing in time_family(family, repeats):
            num_raised += timing.raised is not None
            if as_json:
                click.echo(json.dumps(asdict(timing)))
            elif timing.us is not None:
                click.echo(f"{timing.us:10.1f} us  {timing.family} {timing.kernel}: {timing.case}")
            elif timing.raised is not None:
                where = f"{timing.family} {timing.kernel}: {timing.case}"
                click.echo(f"FAIL  {where} raised {timing.raised}")
    if num_raised:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(prog_name="python -m kernels")
    except KernelError as error:
        click.echo(f"{error.code}: {error}", err=True)
        sys.exit(1)
