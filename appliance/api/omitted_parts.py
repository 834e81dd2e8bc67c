# SPDX-License-Identifier: Apache-2.0
"""What stands where a tool's result had a part that is no text, and who is told of it.

A tool's result stays in its conversation for good: refusing an image there would end the
conversation, so the model reads that something was left out. In a message of the user's own it is
refused. Does not know: dialects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from appliance.api.dialect import log_ignored_once

_NAMES = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "input_file": "file",
}


@dataclass(slots=True)
class OmittedParts:
    """Of one request. `found`: the path and type of each."""

    found: list[dict[str, str]] = field(default_factory=list)

    def placeholder(self, kind: Any, path: str) -> str:
        """Note a part and return the text in its place."""
        name = _NAMES.get(str(kind), str(kind))[:64]
        self.found.append({"path": path, "type": name})
        log_ignored_once("part of a tool's result, which the model cannot read:", name)
        return f"[{name} omitted: this model reads text only]"

    def as_wire(self) -> dict[str, Any]:
        """Return the field of an answer that says so; none where nothing was left out."""
        return {"x_omitted": self.found} if self.found else {}
