# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of real models for the grammar benchmarks: token bytes and control tokens.

Does not know: grammars. Where a model's own vocabulary is not to be had, one of its size is made of
a real one's most frequent tokens (byte-pair ids are in the order of their merges), which keeps
lengths and scripts as real ones have them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from engine.text.tokenizer_builders import read_json, tokenizer_from_hf
from tests.fakes.grammar_walks import WalkVocabulary
from tests.fakes.marker_model import markers_of
from tools_schema.formats.base import ToolFormat

_TEKKEN_CONTROL = 1000  # ids in front of the text of Mistral's vocabularies
_TEKKEN_ROWS = 131_072


def of_folder(folder: Path, rows: int | None = None) -> WalkVocabulary:
    """That of a Hugging Face directory; `rows` of the model's output (a multiple of 128)."""
    spec = read_json(folder / "tokenizer.json")
    ids = [*spec["model"]["vocab"].values(), *(entry["id"] for entry in spec["added_tokens"])]
    tokenizer = tokenizer_from_hf(folder, rows or -(-(max(ids) + 1) // 128) * 128)
    control = {
        token.text: token.token_id
        for token in tokenizer.added_tokens.values()
        if not token.is_markup
    }
    eos_id = min(control.values())
    without_eos = {text: token_id for text, token_id in control.items() if token_id != eos_id}
    return WalkVocabulary(tokenizer.all_token_bytes(), without_eos, eos_id)


def of_tekken(path: Path, formats: Sequence[ToolFormat]) -> WalkVocabulary:
    """That of a tekken file: these formats' markers are the first of its control tokens."""
    words = json.loads(path.read_text())["vocab"][: _TEKKEN_ROWS - _TEKKEN_CONTROL]
    spelled = [b""] * _TEKKEN_CONTROL + [base64.b64decode(word["token_bytes"]) for word in words]
    return WalkVocabulary(spelled, _placed(formats, 3), eos_id=2)


def like(real: WalkVocabulary, rows: int, formats: Sequence[ToolFormat]) -> WalkVocabulary:
    """`rows` tokens: the first ones of a real vocabulary, then these formats' markers."""
    control = _placed(formats, rows - 256)
    spelled = [bytes(token) for token in real.token_bytes[: rows - 256]]
    return WalkVocabulary([*spelled, *[b""] * 256], control, eos_id=rows - 1)


def _placed(formats: Sequence[ToolFormat], first: int) -> dict[str, int]:
    markers = dict.fromkeys(marker for fmt in formats for marker in markers_of(fmt))
    return {marker: first + place for place, marker in enumerate(markers)}
