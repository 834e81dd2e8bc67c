# SPDX-License-Identifier: Apache-2.0
"""A vocabulary with the markers of every tool format, and models that are text alone.

Each marker is there twice: as a control token and as a token that is text. A model of kind
`control` or `markup` has the one or the other, one of kind `plain` spells its markers in bytes.
One engine serves them all.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import pre_tokenizers
from tokenizers.models import BPE

from engine.loop.server import Vocabulary
from engine.text.assets import TextAssets
from engine.text.byte_alphabet import CHAR_OF_BYTE
from engine.text.chat_template import ChatTemplate
from engine.text.conformance import check_conformance
from engine.text.tokenizer import AddedToken, Tokenizer
from tests.fakes.appliance import default_assets
from tools_schema.formats.base import ToolFormat
from tools_schema.formats.registry import FORMATS

KINDS = ("control", "markup", "plain")
TURN, STOP = "<|turn|>", "<|stop|>"
MERGES = ('"}', "}}", "</", '{"', '":', "\n<", ">\n", "\n\n")

_MARKER = re.compile('<(?!/?\uff5cDSML)[^<>\\s"=]+>|\\[/?[A-Z_]+\\]|\uff5cDSML\uff5c')
_TEMPLATE = """\
{%- for message in messages %}<|turn|>{{ message.role }}
{{ message.content }}<|stop|>
{% endfor %}
{%- if add_generation_prompt %}<|turn|>assistant
{% if thinking %}OPEN{% endif %}{% endif %}"""


def markers_of(fmt: ToolFormat) -> list[str]:
    """The parts of a format's markers that some model has as tokens."""
    texts = [*fmt.grammar_texts(), *fmt.end_of_turn]
    found = dict.fromkeys(marker for text in texts for marker in _MARKER.findall(text))
    return list(found)


@functools.cache
def _ids() -> dict[tuple[str, str], int]:
    """By (kind, marker): its id. Bytes are 0 to 255, then the merges, then these."""
    texts = dict.fromkeys([TURN, STOP, *(m for fmt in FORMATS for m in markers_of(fmt))])
    pairs = [(kind, text) for text in texts for kind in ("control", "markup")]
    return {pair: 256 + len(MERGES) + place for place, pair in enumerate(pairs)}


def vocab_size() -> int:
    return -(-(256 + len(MERGES) + len(_ids())) // 32) * 32


@functools.cache
def vocabulary() -> Vocabulary:
    """What the engine knows of all these models together."""
    spelled = [bytes([i]) for i in range(256)] + [text.encode() for text in MERGES]
    spelled += [b"" if kind == "control" else text.encode() for kind, text in _ids()]
    spelled += [b""] * (vocab_size() - len(spelled))
    control = tuple(i for (kind, _), i in _ids().items() if kind == "control")
    return Vocabulary(
        token_bytes=tuple(spelled), eos_ids=(_ids()["control", STOP],), control_ids=control
    )


@functools.cache
def marker_assets(fmt: ToolFormat, kind: str) -> TextAssets:
    """The text side of a model of this family, whose chat template knows no tools."""
    texts = [] if kind == "plain" else [m for m in markers_of(fmt) if m not in fmt.end_of_turn]
    added = [AddedToken(token_id=_ids()["control", text], text=text) for text in (TURN, STOP)]
    added += [
        AddedToken(token_id=_ids()[kind, text], text=text, is_markup=kind == "markup")
        for text in texts
    ]
    tokenizer = Tokenizer(_plain(), added, vocab_size=vocab_size())
    thought = fmt.reasoning.begin if fmt.reasoning is not None else ""
    eos_ids = vocabulary().eos_ids
    template = ChatTemplate(_TEMPLATE.replace("OPEN", thought), tokenizer, {}, eos_ids)
    return replace(
        default_assets(),
        name=f"{fmt.name}-{kind}",
        tokenizer=tokenizer,
        chat_template=template,
        fingerprint=f"{fmt.name}-{kind}",
        vocab_size=vocab_size(),
        eos_ids=eos_ids,
        control_token_ids=tuple(sorted(tokenizer.control_ids)),
        tool_format=fmt.name,
        token_bytes=tuple(tokenizer.all_token_bytes()),
        conformance=check_conformance(template, tokenizer),
    )


def foreign_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the vocabulary that are no text of this model, nor its markers."""
    own = tokenizer.control_ids | tokenizer.markup_ids
    return [i for i in _ids().values() if i not in own]


@functools.cache
def _plain() -> BpeTokenizer:
    spelled = {CHAR_OF_BYTE[i]: i for i in range(256)}
    merges = []
    for place, text in enumerate(MERGES):
        left, right = (CHAR_OF_BYTE[byte] for byte in text.encode())
        spelled[left + right] = 256 + place
        merges.append((left, right))
    plain = BpeTokenizer(BPE(vocab=spelled, merges=merges))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return plain
