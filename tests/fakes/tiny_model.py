# SPDX-License-Identifier: Apache-2.0
"""A llama of 0.1 M random parameters with a byte tokenizer and ChatML, as a Hugging Face directory.

Everything is real but the size: config.json, safetensors, tokenizer.json, chat template. The same
seed gives the same weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
VOCAB_SIZE = 288  # 3 control tokens, 256 bytes, and holes

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
}
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """Write the model into `directory` (made if missing) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    save_file(_weights(seed), directory / "model.safetensors")
    _tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": CONTROL[1],
        "eos_token": CONTROL[2],
        "chat_template": _TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def byte_ids(text: str) -> list[int]:
    """The ids of `text`, byte by byte."""
    return _tokenizer().encode(text, add_special_tokens=False).ids


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values: torch.Tensor = torch.randn((rows, columns), generator=generator)
        return values.mul_(scale / columns**0.5)

    hidden, ffn, kv = 64, 128, 32
    weights = {
        # A wide embedding and head: logits with clear winners, not a flat haze.
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, hidden, 8.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCAB_SIZE, hidden, 4.0),
    }
    for layer in range(2):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_proj.weight": matrix(hidden, hidden, 2.0),
            f"{name}.self_attn.k_proj.weight": matrix(kv, hidden, 2.0),
            f"{name}.self_attn.v_proj.weight": matrix(kv, hidden, 2.0),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, hidden, 2.0),
            f"{name}.mlp.gate_proj.weight": matrix(ffn, hidden, 2.0),
            f"{name}.mlp.up_proj.weight": matrix(ffn, hidden, 2.0),
            f"{name}.mlp.down_proj.weight": matrix(hidden, ffn, 2.0),
        }
    return weights


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: len(CONTROL) + place for place, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab={**_control_ids(), **vocabulary}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    return tokenizer


def _control_ids() -> dict[str, int]:
    return {text: place for place, text in enumerate(CONTROL)}
