# SPDX-License-Identifier: Apache-2.0
"""Parse events of one answer -> the content-block events of Anthropic's dialect.

Does not know: tokens, usage, transport.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tools_schema import events as parsed

WireEvent = dict[str, Any]


@dataclass(slots=True)
class MessageBlocks:
    """One answer: blocks follow each other, one is open at a time."""

    _index: int = -1
    _kind: str = ""  # of the open block; empty: none is open
    _thought: list[str] = field(default_factory=list)

    def take(self, events: Iterable[parsed.Event]) -> list[WireEvent]:
        """Return the wire events of these parse events."""
        out: list[WireEvent] = []
        for event in events:
            match event:
                case parsed.TextDelta():
                    self._open("text", {"type": "text", "text": ""}, out)
                    self._delta({"type": "text_delta", "text": event.text}, out)
                case parsed.ReasoningDelta():
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    self._open("thinking", block, out)
                    self._thought.append(event.text)
                    self._delta({"type": "thinking_delta", "thinking": event.text}, out)
                case parsed.ToolCallStart():
                    out += self.finish()
                    block = {"type": "tool_use", "id": event.call_id, "name": event.name}
                    self._open("tool_use", {**block, "input": {}}, out)
                case parsed.ToolCallArgs():
                    self._delta({"type": "input_json_delta", "partial_json": event.delta}, out)
                case parsed.ToolCallEnd():
                    out += self.finish()
                case parsed.ParseProblem(index=int()):
                    out += self.finish()
        return out

    def finish(self) -> list[WireEvent]:
        """Close the open block, if there is one."""
        out: list[WireEvent] = []
        if self._kind == "thinking":
            signature = signature_of("".join(self._thought))
            self._thought.clear()
            self._delta({"type": "signature_delta", "signature": signature}, out)
        if self._kind:
            self._kind = ""
            out.append({"type": "content_block_stop", "index": self._index})
        return out

    def _open(self, kind: str, block: dict[str, Any], out: list[WireEvent]) -> None:
        if self._kind == kind:
            return
        out += self.finish()
        self._index += 1
        self._kind = kind
        out.append({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any], out: list[WireEvent]) -> None:
        out.append({"type": "content_block_delta", "index": self._index, "delta": delta})


def signature_of(thought: str) -> str:
    """What stands for a signature: clients drop thinking without one. Nobody checks it."""
    digest = hashlib.sha256(thought.encode()).digest()
    return "moorage.v1." + base64.urlsafe_b64encode(digest[:24]).decode()
