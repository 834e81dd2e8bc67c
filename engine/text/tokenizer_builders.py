# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a model's tokenizer from GGUF metadata or from a Hugging Face directory.

Does not know: chat templates, weights.
Source of the splitting rules: the tokenizer.json files of the model families they are named by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE

from engine.text.errors import TokenizerError
from engine.text.tokenizer import AddedToken, Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
# Some vocabularies list steering tokens as if they were words: the roles and tool markers of
# DeepSeek, the fill-in-the-middle markers of Qwen. Their bars give them away.
_BARRED = re.compile("<[|\uff5c]|[|\uff5c]>|^\uff5c.+\uff5c$")
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_from_gguf(metadata: Mapping[str, Any], vocab_size: int) -> Tokenizer:
    """Rebuild the tokenizer a GGUF file describes.

    Raises:
        TokenizerError: another model than byte-level BPE, or splitting rules we do not have.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(f"tokenizer.ggml.model is {kind!r}; supported: 'gpt2' (BPE)")
    spellings: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(spellings)
    added = [
        AddedToken(
            token_id=i,
            text=spellings[i],
            is_markup=kind_of == _USER_DEFINED and not _BARRED.search(spellings[i]),
        )
        for i, kind_of in enumerate(kinds)
        if kind_of in (_CONTROL, _USER_DEFINED)
    ]
    added_texts = {token.text for token in added}
    vocabulary = {s: i for i, s in enumerate(spellings) if s not in added_texts}
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    plain = _gguf_pipeline(str(metadata.get("tokenizer.ggml.pre", "default")), vocabulary, merges)
    wants_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", False))
    return Tokenizer(
        plain,
        added,
        vocab_size=vocab_size,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id") if wants_bos else None,
    )


def tokenizer_from_hf(directory: Path, vocab_size: int) -> Tokenizer:
    """Read tokenizer.json (and tokenizer_config.json) of a Hugging Face directory.

    Raises:
        TokenizerError: a file is missing or damaged, or the tokenizer is not byte-level BPE.
    """
    spec = read_json(directory / "tokenizer.json")
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    added = [_added_from_hf(entry, directory) for entry in spec.get("added_tokens", [])]
    added = [token for token in added if token.text.strip()]
    plain = _plain_pipeline(spec, {token.text for token in added}, directory)
    ids = {token.text: token.token_id for token in added}
    return Tokenizer(
        plain, added, vocab_size=vocab_size, bos_id=ids.get(_bos_text(spec, config, ids) or "")
    )


def special_token_text(entry: Any) -> str | None:
    """The text of a `bos_token`-like entry: a string, or an object with `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model. Raises TokenizerError naming the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise TokenizerError(f"tokenizer: no file {path}") from None
    except ValueError as error:
        raise TokenizerError(f"tokenizer: {path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"tokenizer: {path} does not hold a JSON object")
    return value


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _gguf_pipeline(
    rules: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]
) -> BpeTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split_first = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known: dict[str, Any] = {
        "default": byte_level,
        "gpt-2": byte_level,
        # Digits before the byte-level split: several spaces before a digit depend on it.
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        ),
        "llama-bpe": _split_then(_LLAMA3_SPLIT, split_first),
        "qwen2": _split_then(_QWEN2_SPLIT, split_first),
    }
    if rules not in known:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {rules!r}; supported: {', '.join(sorted(known))}"
        )
    tokenizer = BpeTokenizer(
        BPE(vocab=vocabulary, merges=merges, ignore_merges=rules == "llama-bpe")
    )
    tokenizer.pre_tokenizer = known[rules]
    if rules == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _split_then(pattern: str, byte_level: Any) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, byte_level])


def _added_from_hf(entry: Mapping[str, Any], directory: Path) -> AddedToken:
    if entry.get("single_word"):
        raise TokenizerError(
            f"tokenizer: {directory}/tokenizer.json: added token {entry['content']!r} is "
            "single_word, which is not supported"
        )
    return AddedToken(
        token_id=int(entry["id"]),
        text=entry["content"],
        is_markup=not entry.get("special", False) and not _BARRED.search(entry["content"]),
        eats_space_before=bool(entry.get("lstrip")),
        eats_space_after=bool(entry.get("rstrip")),
    )


def _plain_pipeline(spec: Mapping[str, Any], added: set[str], directory: Path) -> BpeTokenizer:
    """The tokenizer without its added tokens: they cannot come out of it."""
    model = spec.get("model", {})
    if model.get("type") != "BPE" or not _is_byte_level(spec.get("pre_tokenizer")):
        raise TokenizerError(
            f"tokenizer: {directory}/tokenizer.json is {model.get('type')!r} without a "
            "byte-level split; supported: byte-level BPE"
        )
    vocabulary = {text: i for text, i in model["vocab"].items() if text not in added}
    merges = [pair for pair in map(_pair, model["merges"]) if "".join(pair) not in added]
    plain = {
        **spec,
        # An added token of blanks (runs of spaces) is text, and stays.
        "added_tokens": [e for e in spec.get("added_tokens", []) if not e["content"].strip()],
        "model": {**model, "vocab": vocabulary, "merges": merges, "unk_token": None},
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    try:
        return BpeTokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"tokenizer: {directory}/tokenizer.json: {error}") from error


def _is_byte_level(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer.get("type") == "ByteLevel":
        return True
    return any(_is_byte_level(part) for part in pre_tokenizer.get("pretokenizers", []))


def _bos_text(
    spec: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int]
) -> str | None:
    """The token the post-processor puts first, else what the configuration asks for."""
    for processor in _processors(spec.get("post_processor")):
        if processor.get("type") == "TemplateProcessing":
            first: Mapping[str, Any] = next(iter(processor.get("single", [])), {})
            text: str | None = first.get("SpecialToken", {}).get("id")
            if text in ids:
                return text
    return special_token_text(config.get("bos_token")) if config.get("add_bos_token") else None


def _processors(processor: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if processor is None:
        return []
    return [processor, *processor.get("processors", [])]
