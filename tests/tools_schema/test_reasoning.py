# SPDX-License-Identifier: Apache-2.0
"""What the end of a prompt says about reasoning."""

from __future__ import annotations

import pytest

from tools_schema.formats.registry import get_format
from tools_schema.reasoning import reasoning_of_prompt


@pytest.mark.parametrize(
    ("name", "tail", "mode"),
    [
        ("hermes", "<|im_start|>assistant\n", "auto"),
        ("hermes", "<|im_start|>assistant\n<think>\n", "on"),
        ("hermes", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "off"),
        ("deepseek_v3_1", "<\uff5cAssistant\uff5c></think>", "off"),
        ("deepseek_r1", "<\uff5cAssistant\uff5c><think>\n", "on"),
        ("harmony", "<|end|><|start|>assistant", "auto"),
        ("mistral", "hello[/INST]", "auto"),
        ("smollm2", "<|im_start|>assistant\n<think>\n", "off"),
        ("hermes", "", "auto"),
    ],
)
def test_the_prompt_decides(name: str, tail: str, mode: str) -> None:
    assert reasoning_of_prompt(get_format(name), tail) == mode
