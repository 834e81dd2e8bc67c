# SPDX-License-Identifier: Apache-2.0
"""How each coding agent is run without a person: its command, its settings, its own home.

Settings are those of examples/agents, with the server's address. An agent gets a process group of
its own, which is ended with it, and a proxy that refuses whatever is not on this machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "agents"
EXAMPLE_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 120.0
CLAUDE_TOOLS = "Bash,Read,Write,Edit,Agent"
NOWHERE = "http://127.0.0.1:9"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of an agent left."""

    code: int
    output: str
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One agent in one working directory. `home` holds all that it keeps."""

    name: str
    programs: Path
    url: str
    home: Path
    work: Path

    def prepare(self) -> None:
        """Lay its settings where it looks for them."""
        self.work.mkdir(parents=True)
        self.home.mkdir(parents=True)
        subprocess.run(["git", "init", "-q", str(self.work)], check=True, timeout=30)
        example, target = {
            "opencode": ("opencode.json", self.work / "opencode.json"),
            "codex": ("codex.toml", self.home / ".codex" / "config.toml"),
            "claude": ("claude-code.json", self.home / ".claude" / "settings.json"),
            "mini": ("mini-swe-agent.yaml", self.home / "moorage.yaml"),
            "aider": ("aider.conf.yml", self.home / "aider.conf.yml"),
        }[self.name]
        text = (EXAMPLES / example).read_text()
        assert EXAMPLE_URL in text, example
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace(EXAMPLE_URL, self.url))

    @property
    def program(self) -> Path:
        folder = "python/bin" if self.name in ("mini", "aider") else "node/node_modules/.bin"
        return self.programs / folder / self.name

    def run(self, task: str, *more: str, goes_on: bool = False) -> Run:
        """Give it a task, and `more` arguments; `goes_on`: in the conversation it had last."""
        command = [str(self.program), *self._arguments(task, goes_on), *more]
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self.work,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += b"\n[ended after its time]"
        finally:
            _end_group(process)
        took_s = time.monotonic() - began
        return Run(code=process.returncode, output=output.decode(errors="replace"), took_s=took_s)

    def _arguments(self, task: str, goes_on: bool) -> list[str]:
        match self.name:
            case "opencode":
                return ["run", "--format", "json", "--auto", *(["-c"] if goes_on else []), task]
            case "codex":
                options = ["--json", "--skip-git-repo-check"]
                options += ["--dangerously-bypass-approvals-and-sandbox"]
                return ["exec", *options, *(["resume", "--last"] if goes_on else []), task]
            case "claude":
                options = ["--output-format", "json", "--allowedTools", CLAUDE_TOOLS]
                return [*(["-c"] if goes_on else []), "-p", task, *options]
            case "mini":
                config = ["-c", "mini.yaml", "-c", str(self.home / "moorage.yaml")]
                return ["-y", "--exit-immediately", "-l", "0", *config, "-t", task]
        config = ["--config", str(self.home / "aider.conf.yml"), "--yes-always"]
        return [*config, "--no-auto-commits", "--no-stream", "--message", task]

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1,localhost",
            "CODEX_HOME": str(self.home / ".codex"),
            "DISABLE_AUTOUPDATER": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
        }


def _end_group(process: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(10)
