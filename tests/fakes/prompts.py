# SPDX-License-Identifier: Apache-2.0
"""The prompts that a fake engine was given, as text."""

from __future__ import annotations

from sessions.token_codec import decode_ids
from tests.fakes.appliance import RunningApp, default_assets


def prompt_text(app: RunningApp) -> str:
    """The last one, control tokens spelled out."""
    prompt = decode_ids(app.engine.requests[-1].token_ids)
    return default_assets().tokenizer.decode(prompt, with_control=True)
