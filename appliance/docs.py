# SPDX-License-Identifier: Apache-2.0
"""Generates reference pages from the code: configuration, metrics, error codes; writes them all.

Does not know: guides and concepts; those are written by hand.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from pathlib import Path
from typing import Any

from appliance.config import ApplianceConfig, _default_state_dir
from appliance.docs_http import NOTE, WRITE, http_api_page
from appliance.typed_toml import to_plain


def configuration_page() -> str:
    """Return docs/configuration.md."""
    lines = [
        NOTE.format(how="moorage config docs"),
        "# Configuration\n",
        "One TOML file (`--config`), and `--set section.name=value` for single settings. Every",
        "setting has a default; an unknown name is an error that says the closest one. `moorage",
        "config show` prints what holds, `moorage check` says what is wrong before a start.\n",
    ]
    for section in dataclasses.fields(ApplianceConfig):
        lines += _config_section(section.name, _type_of(ApplianceConfig, section.name))
    return "\n".join(lines).rstrip() + "\n"


def _config_section(path: str, cls: type[Any]) -> list[str]:
    docs = _field_docs(cls)
    nested: list[str] = []
    intro = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    lines = [
        f"## [{path}]\n",
        f"{intro}\n",
        "| setting | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for field in dataclasses.fields(cls):
        hint = _type_of(cls, field.name)
        if dataclasses.is_dataclass(hint):
            nested += _config_section(f"{path}.{field.name}", typing.cast(type[Any], hint))
            continue
        default = f"`{_default_text(field)}`"
        meaning = docs.get(field.name, "").replace("|", "\\|")
        lines.append(f"| {field.name} | {_type_name(hint)} | {default} | {meaning} |")
    return [*lines, "", *nested]


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is _default_state_dir:
        return "~/.local/state/moorage"
    elif field.default_factory is not dataclasses.MISSING:
        name = getattr(field.default_factory, "__name__", "")
        if name == "default_run_dir":
            return "server.run_dir"
        value = field.default_factory()
    else:
        return "required"
    text = str(to_plain(value))
    return text if text not in ("", ".") else "(empty)"


def _type_of(cls: type[Any], name: str) -> Any:
    return typing.get_type_hints(cls)[name]


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " \\| ".join(map(str, typing.get_args(hint)))
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return str(hint).replace("|", "\\|")


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """Return field -> meaning: from the string under the field, or from `name: meaning` lines."""
    docs: dict[str, str] = {}
    for line in re.findall(r"^(\w+): (.+(?:\n\s+.+)*)", inspect.cleandoc(cls.__doc__ or ""), re.M):
        docs[line[0]] = " ".join(line[1].split())
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    for statement, after in zip(body, body[1:], strict=False):
        is_doc = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and is_doc
        ):
            text = str(typing.cast(ast.Constant, typing.cast(ast.Expr, after).value).value)
            docs[statement.target.id] = " ".join(text.split())
    return docs


def errors_page() -> str:
    """Return docs/errors.md."""
    from appliance.errors import STATUS_BY_CODE, type_of_status
    from appliance.remedies import REMEDY_BY_CODE

    lines = [
        NOTE.format(how=WRITE),
        "# Error codes\n",
        "The HTTP status follows from the code. `param` is the path of the field at fault. 429 and",
        "503 come with `Retry-After`. The message says what was wrong this time, the last column",
        "what to do.\n",
        "| code | status | type | what to do |",
        "|---|---|---|---|",
    ]
    for code, status in sorted(STATUS_BY_CODE.items(), key=lambda entry: (entry[1], entry[0])):
        lines.append(f"| {code} | {status} | {type_of_status(status)} | {REMEDY_BY_CODE[code]} |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Return docs/metrics.md."""
    from appliance.metrics import Metrics
    from appliance.turn_watchdog import declare_stalls

    lines = [
        NOTE.format(how=WRITE),
        "# Metrics\n",
        "`GET /metrics` answers in Prometheus' text format. The engine's own counters follow as",
        "`moorage_engine_<name>`.\n",
        "| name | type | meaning |",
        "|---|---|---|",
    ]
    registry = Metrics().registry
    declare_stalls(registry)
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"| {name} | {family.type} | {family.documentation} |")
    return "\n".join(lines) + "\n"


PAGES = {
    "configuration.md": configuration_page,
    "http-api.md": http_api_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
}


def main(folder: Path) -> None:
    """Write every generated page."""
    for name, page in PAGES.items():
        (folder / name).write_text(page())


if __name__ == "__main__":
    import sys

    main(Path(sys.argv[1]))
