# SPDX-License-Identifier: Apache-2.0
"""Everything about a model that is text: tokenizer, chat template, ids. Torch-free.

Does not know: weights, requests, HTTP. The API process loads this; the engine loads it too, for
the grammar's vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.text.byte_tokenizer import LEAST_VOCAB_SIZE, byte_tokenizer
from engine.text.chat_template import ChatTemplate
from engine.text.conformance import ConformanceReport, check_conformance
from engine.text.errors import ChatTemplateError
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_builders import (
    read_json,
    special_token_text,
    tokenizer_from_gguf,
    tokenizer_from_hf,
)
from engine.weights.config_fields import ConfigFields
from engine.weights.errors import ModelFormatError
from engine.weights.gguf import open_gguf
from engine.weights.source import ModelKind, ModelSource, resolve_model

logger = logging.getLogger(__name__)

# Used where a model brings no template: turns as ChatML, if its tokens exist, else as plain lines.
_CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAssets:
    """Loaded once, shared, never changed.

    `fingerprint` changes with the weights, the tokenizer or the template. `tool_format` is a
    guess at the family of tool-call markup ("smollm2", "hermes", "llama", ...), or None.
    """

    source: ModelSource
    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    fingerprint: str
    max_context_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    control_token_ids: tuple[int, ...]
    tool_format: str | None
    # Per id; control tokens and holes are b"".
    token_bytes: tuple[bytes, ...] = field(repr=False)
    # Whether appending renders as the whole does, per kind of item.
    conformance: ConformanceReport


def load_text_assets(model: str, *, load_format: str = "auto") -> TextAssets:
    """Load the text side of a model; log where its template cannot be appended to exactly.

    Args:
        model: "smollm2" / "default", a path to a .gguf file, or a Hugging Face directory.
        load_format: the engine's; "dummy" needs no tokenizer (engine/text/byte_tokenizer.py).

    Raises:
        ModelNotFoundError: there is no such model.
        ModelFormatError: a file of it is damaged.
        TokenizerError: its tokenizer is of a kind we cannot rebuild.
        ChatTemplateError: its template is missing or does not compile.
    """
    source = resolve_model(model)
    is_dummy = load_format == "dummy"
    assets = _from_gguf(source) if source.kind is ModelKind.GGUF else _from_hf(source, is_dummy)
    for case in assets.conformance.cases:
        if case.status == "differs":
            logger.log(
                logging.INFO if case.is_known else logging.WARNING,
                "the chat template of %s is not appendable for %s (%s): %s",
                assets.name,
                case.kind,
                case.detail,
                case.consequence,
            )
    return assets


def _from_gguf(source: ModelSource) -> TextAssets:
    metadata = open_gguf(source.path).metadata
    architecture = metadata.get("general.architecture")
    spellings = metadata.get("tokenizer.ggml.tokens")
    context_len = metadata.get(f"{architecture}.context_length")
    if not spellings or not context_len:
        raise ModelFormatError(f"{source.path}: no tokenizer or no context length in its metadata")
    vocab_size = int(metadata.get(f"{architecture}.vocab_size", len(spellings)))
    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in zip(_SPECIAL_NAMES, ("bos", "eos", "unknown", "padding"), strict=True)
    }
    variables = {name: spellings[i] for name, i in ids.items() if i is not None}
    end_ids = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return _assemble(
        source,
        name=str(metadata.get("general.basename") or metadata.get("general.name") or architecture),
        tokenizer=tokenizer_from_gguf(metadata, vocab_size),
        template=metadata.get("tokenizer.chat_template"),
        variables=variables,
        context_len=int(context_len),
        eos_ids=[i for i in end_ids if i is not None],
    )


def _from_hf(source: ModelSource, is_dummy: bool) -> TextAssets:
    path = source.path / "config.json"
    config = read_json(path)
    fields = ConfigFields(config, path)
    vocab_size = fields.whole("vocab_size")
    context_len = fields.context_len()
    if is_dummy and not (source.path / "tokenizer.json").exists():
        tokenizer = byte_tokenizer(fields.whole("vocab_size", low=LEAST_VOCAB_SIZE))
    else:
        tokenizer = tokenizer_from_hf(source.path, vocab_size)
    settings = _optional_json(source.path / "tokenizer_config.json")
    variables = {
        name: text for name in _SPECIAL_NAMES if (text := special_token_text(settings.get(name)))
    }
    generation = _optional_json(source.path / "generation_config.json")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = [i for i in (eos if isinstance(eos, list) else [eos]) if i is not None]
    for token_id in eos_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            allowed = f"ids from 0 to {vocab_size - 1}"
            raise ModelFormatError(f"{source.path}: eos_token_id is {eos!r}; allowed: {allowed}")
    named = tokenizer.token_id(variables.get("eos_token", ""))
    return _assemble(
        source,
        name=source.path.resolve().name,
        tokenizer=tokenizer,
        template=_hf_template(source.path, settings),
        variables=variables,
        context_len=context_len,
        eos_ids=eos_ids if named is None else [*eos_ids, named],
    )


def _assemble(
    source: ModelSource,
    *,
    name: str,
    tokenizer: Tokenizer,
    template: str | None,
    variables: Mapping[str, str],
    context_len: int,
    eos_ids: list[int],
) -> TextAssets:
    if template is None:
        template = _fallback_template(source, tokenizer)
    chat_template = ChatTemplate(template, tokenizer, variables, eos_ids)
    # A turn must stop at the tokens its template ends it with, listed as EOS or not; but one that
    # only parts the messages of a turn is no end of it.
    ends = chat_template.ends
    eos_ids = [*eos_ids, *(i for i in (ends.last, ends.call) if i is not None)]
    token_bytes = tuple(tokenizer.all_token_bytes())
    return TextAssets(
        source=source,
        name=name,
        tokenizer=tokenizer,
        chat_template=chat_template,
        fingerprint=_fingerprint(source, token_bytes, tokenizer, template, variables),
        max_context_len=context_len,
        vocab_size=tokenizer.vocab_size,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        control_token_ids=tuple(sorted(tokenizer.control_ids)),
        tool_format=_guess_tool_format(name, template),
        token_bytes=token_bytes,
        conformance=check_conformance(chat_template, tokenizer),
    )


def _fallback_template(source: ModelSource, tokenizer: Tokenizer) -> str:
    if tokenizer.token_id("<|im_start|>") is None or tokenizer.token_id("<|im_end|>") is None:
        raise ChatTemplateError(f"{source.path}: the model brings no chat template")
    return _CHATML


def _hf_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("tool_use") or named.get("default")
    return template


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _guess_tool_format(name: str, template: str) -> str | None:
    if "smollm2" in name.lower():
        return "smollm2"
    signs = (
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek"),
        ("<|channel|>", "harmony"),
        ("<arg_key>", "glm"),
        ("<function=", "qwen_xml"),
        ("<tool_call>", "hermes"),
        ("<|python_tag|>", "llama"),
        ("<|start_header_id|>", "llama"),
    )
    return next((family for sign, family in signs if sign in template), None)


def _fingerprint(
    source: ModelSource,
    token_bytes: tuple[bytes, ...],
    tokenizer: Tokenizer,
    template: str,
    variables: Mapping[str, str],
) -> str:
    digest = hashlib.sha256(source.fingerprint().encode())
    for spelled in token_bytes:
        digest.update(len(spelled).to_bytes(4, "little") + spelled)
    added = sorted((t.token_id, t.text, t.is_markup) for t in tokenizer.added_tokens.values())
    digest.update(json.dumps([added, template, dict(variables)], sort_keys=True).encode())
    return digest.hexdigest()[:32]
