# SPDX-License-Identifier: Apache-2.0
"""Writes small Hugging Face directories whose text side is real: tokenizer, template, config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
_CONTROL = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "hermes_like": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama_like": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ],
}
MARKUP = {"hermes_like": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]}
_EOS = {"chatml": "<|im_end|>", "hermes_like": "<|im_end|>", "llama_like": "<|eot_id|>"}
FAMILIES = tuple(_CONTROL)


def write_hf_text(directory: Path, family: str, vocab_size: int = 640) -> Path:
    """A directory with tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train(vocab_size - 16)
    tokenizer.add_special_tokens(_CONTROL[family])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP.get(family, [])])
    tokenizer.save(str(directory / "tokenizer.json"))
    bos = "<|begin_of_text|>" if family == "llama_like" else None
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": _EOS[family],
            "model_max_length": 512,
            "clean_up_tokenization_spaces": False,
        },
    )
    (directory / "chat_template.jinja").write_text((TEMPLATES / f"{family}.jinja").read_text())
    eos_id = tokenizer.token_to_id(_EOS[family])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "eos_token_id": eos_id,
    }
    _write_json(directory / "config.json", config)
    return directory


def _train(vocab_size: int) -> Tokenizer:
    """Byte-level BPE over the text of the templates: no file from elsewhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))]
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))
