# SPDX-License-Identifier: Apache-2.0
"""Write what the clients are generated from and to: `python clients/generate.py [--check]`.

    clients/openapi.json                          the server's OpenAPI document
    clients/typescript/src/schema.ts              its types, by openapi-typescript
    clients/python/moorage_client/types.py        its types, by datamodel-code-generator
    clients/python/moorage_client/client.py       async_client.py without its awaits

The two generators are run as they are installed (`npm ci` in clients/typescript;
`pip install datamodel-code-generator`). --check needs neither: it compares the document and
client.py, and looks for the document's digest in the two files of types.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "clients/openapi.json"
TYPESCRIPT = ROOT / "clients/typescript"
SCHEMA_TS = TYPESCRIPT / "src/schema.ts"
PACKAGE = ROOT / "clients/python/moorage_client"
TYPES_PY = PACKAGE / "types.py"
NOTE = "Generated from openapi.json (sha256 {digest}) by clients/generate.py; do not edit."
# In this order; what is left of an asyncio module is one of plain calls.
WITHOUT_ASYNC = (
    ("The session API for asyncio. Same calls as `moorage_client.client`.",
     "The session API, a method an endpoint. Made from async_client.py by clients/generate.py."),
    ("A client for asyncio, as an async context manager.",
     "A client, as a context manager. Threads may share it."),
    ("import asyncio", "import time"),
    ("asyncio.sleep", "time.sleep"),
    ("AsyncGenerator, AsyncIterator, Mapping", "Generator, Iterator, Mapping"),
    (r"AsyncGenerator\[(.*), None\]", r"Generator[\1, None, None]"),
    ("AsyncIterator", "Iterator"),
    ("AsyncMoorage", "Moorage"),
    ("AsyncTurnStream", "TurnStream"),
    ("AsyncClient", "Client"),
    (r"\basync (def|for|with)", r"\1"),
    (r"\bawait ", ""),
    (r"__a(enter|exit|iter)__", r"__\1__"),
    (r"\.a(close|read|iter_bytes)\b", r".\1"),
)  # fmt: skip


def main() -> int:
    """Write, or with --check say what is stale; returns the exit code."""
    sys.path.insert(0, str(ROOT))
    from appliance.openapi import openapi_text

    document = openapi_text()
    if "--check" in sys.argv[1:]:
        stale = stale_files(document)
        for path in stale:
            print(f"stale: {path.relative_to(ROOT)} (run python clients/generate.py)")
        return 1 if stale else 0
    DOCUMENT.write_text(document)
    write_typescript(document)
    write_python(document)
    (PACKAGE / "client.py").write_text(client_text())
    return 0


def stale_files(document: str) -> list[Path]:
    """Files that are not what this document and async_client.py give."""
    digest = digest_of(document)
    stale = [path for path in (SCHEMA_TS, TYPES_PY) if digest not in path.read_text()[:500]]
    if DOCUMENT.read_text() != document:
        stale.append(DOCUMENT)
    if (PACKAGE / "client.py").read_text() != client_text():
        stale.append(PACKAGE / "client.py")
    return stale


def client_text() -> str:
    """The client of plain calls."""
    text = (PACKAGE / "async_client.py").read_text()
    for pattern, replacement in WITHOUT_ASYNC:
        text = re.sub(pattern, replacement, text)
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-", "--stdin-filename", "client.py"],
        input=text, capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return formatted.stdout


def write_typescript(document: str) -> None:
    """clients/typescript/src/schema.ts."""
    subprocess.run(["npm", "run", "--silent", "generate"], cwd=TYPESCRIPT, check=True)
    note = f"// SPDX-License-Identifier: Apache-2.0\n// {NOTE.format(digest=digest_of(document))}\n"
    SCHEMA_TS.write_text(note + SCHEMA_TS.read_text())


def write_python(document: str) -> None:
    """clients/python/moorage_client/types.py."""
    note = f"# SPDX-License-Identifier: Apache-2.0\n# {NOTE.format(digest=digest_of(document))}"
    command = [
        sys.executable, "-m", "datamodel_code_generator",
        "--input", str(DOCUMENT), "--input-file-type", "openapi", "--output", str(TYPES_PY),
        "--output-model-type", "typing.TypedDict", "--target-python-version", "3.11",
        "--disable-timestamp", "--no-use-closed-typed-dict", "--use-schema-description",
        "--formatters", "builtin", "--custom-file-header", note,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(TYPES_PY)], cwd=ROOT)
    subprocess.run([sys.executable, "-m", "ruff", "check", "-q", "--fix", str(TYPES_PY)], cwd=ROOT)


def digest_of(document: str) -> str:
    """Names a version of the document."""
    return hashlib.sha256(document.encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
