# SPDX-License-Identifier: Apache-2.0
"""The sizes of a dense decoder, read from GGUF metadata or a Hugging Face config.json. Torch-free.

Does not know: tensors, kernels. What a config asks for and we do not have is refused, not ignored.
What config files share between architectures is read here too, but for rope (rope_config.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.rope_config import RopeConfig, rope_from_hf
from engine.weights.config_fields import ConfigFields
from engine.weights.errors import UnsupportedModelError
from engine.weights.quant_config import quant_scheme, read_json_object

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_SHARED_PLAIN: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
}
# Their sliding_window counts only where this is set.
_QWEN_PLAIN: dict[str, tuple[object, ...]] = {
    **_SHARED_PLAIN,
    "use_sliding_window": (False, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecoderForm:
    """What an architecture has beyond its sizes, and which values of other fields we have."""

    gguf_name: str
    plain: Mapping[str, Sequence[object]]
    has_qkv_bias: bool = False
    has_head_norms: bool = False
    # Readers take another default than hidden / heads, so the file must say it.
    says_head_dim: bool = False


_LLAMA = _DecoderForm(
    gguf_name="llama",
    plain={**_SHARED_PLAIN, "attention_bias": (False, None), "sliding_window": (None,)},
)
_FORMS = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _DecoderForm(
        gguf_name="qwen2",
        plain={**_QWEN_PLAIN, "attention_bias": (True, None), "qkv_bias": (True, None)},
        has_qkv_bias=True,
    ),
    "Qwen3ForCausalLM": _DecoderForm(
        gguf_name="qwen3",
        plain={**_QWEN_PLAIN, "attention_bias": (False, None)},
        has_head_norms=True,
        says_head_dim=True,
    ),
}
DECODER_ARCHITECTURES = tuple(_FORMS)
_GGUF_ARCHITECTURES = {
    form.gguf_name: name for name, form in _FORMS.items() if name != "MistralForCausalLM"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A dense llama-type decoder."""

    architecture: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_len: int
    rms_eps: float
    rope: RopeConfig
    is_tied: bool  # the output head is the embedding
    has_qkv_bias: bool = False
    has_head_norms: bool = False  # RMSNorm over each head of q and of k, before rope


def decoder_config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Mapping[str, Any]
) -> DecoderConfig:
    """Read the metadata of a `llama`, `qwen2` or `qwen3` file.

    Raises:
        UnsupportedModelError: another architecture, or a rope scaling, bias or norm that we do not
            have.
        ModelFormatError: a key is missing or has no fitting value.
    """
    prefix = metadata.get("general.architecture")
    if prefix not in _GGUF_ARCHITECTURES:
        names = ", ".join(map(repr, _GGUF_ARCHITECTURES))
        raise UnsupportedModelError(f"general.architecture is {prefix!r}; supported: {names}")
    architecture = _GGUF_ARCHITECTURES[prefix]
    form = _FORMS[architecture]
    _refuse_other_tensors(tensor_names, form)
    fields = ConfigFields(metadata, Path("GGUF metadata"))
    hidden, num_heads = (
        fields.whole(f"{prefix}.{key}") for key in ("embedding_length", "attention.head_count")
    )
    num_kv_heads = fields.whole(f"{prefix}.attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"{prefix}.attention.head_count_kv is {num_kv_heads}; "
            f"supported: a divisor of {prefix}.attention.head_count ({num_heads})"
        )
    usual_dim = max(1, hidden // num_heads)
    head_dim = fields.whole(f"{prefix}.attention.key_length", default=usual_dim)
    rope_dim = fields.whole(f"{prefix}.rope.dimension_count", default=head_dim)
    if rope_dim != head_dim:
        raise UnsupportedModelError(
            f"{prefix}.rope.dimension_count is {rope_dim}; supported: head_dim ({head_dim})"
        )
    num_tokens = len(metadata.get("tokenizer.ggml.tokens", ())) or None
    return DecoderConfig(
        architecture=architecture,
        num_layers=fields.whole(f"{prefix}.block_count"),
        hidden=hidden,
        ffn=fields.whole(f"{prefix}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.whole(f"{prefix}.vocab_size", default=num_tokens),
        max_context_len=fields.whole(f"{prefix}.context_length"),
        # Stored as fp32: 9.999999747378752e-06 is meant as 1e-05.
        rms_eps=float(f"{fields.number(f'{prefix}.attention.layer_norm_rms_epsilon'):.6g}"),
        rope=_gguf_rope(fields, f"{prefix}.rope"),
        is_tied="output.weight" not in tensor_names,
        has_qkv_bias=form.has_qkv_bias,
        has_head_norms=form.has_head_norms,
    )


def decoder_config_from_hf(directory: Path) -> DecoderConfig:
    """Read config.json of a Hugging Face directory.

    Raises:
        UnsupportedModelError: an architecture or feature we do not have, named.
        ModelFormatError: the file is damaged or a key is missing.
    """
    path = directory / "config.json"
    config = read_config(directory)
    name = architecture_name(config)
    form = _FORMS.get(name) if isinstance(name, str) else None
    if form is None:
        raise UnsupportedModelError(
            f"{path}: architectures is {config.get('architectures')!r}; "
            f"supported: {', '.join(_FORMS)}"
        )
    refuse_other_values(config, path, form.plain)
    _refuse_other_layers(config, path)
    quant_scheme(config, directory)  # refuses what the weights' reader does not have
    fields = ConfigFields(config, path)
    num_heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    num_kv_heads = fields.whole("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"{path}: num_key_value_heads is {num_kv_heads}; "
            f"supported: a divisor of num_attention_heads ({num_heads})"
        )
    usual_dim = None if form.says_head_dim else max(1, hidden // num_heads)
    head_dim = fields.whole("head_dim", default=usual_dim)
    if head_dim % 2:
        raise UnsupportedModelError(f"{path}: head_dim is {head_dim}; supported: even")
    return DecoderConfig(
        architecture=_GGUF_ARCHITECTURES[form.gguf_name],
        num_layers=fields.whole("num_hidden_layers"),
        hidden=hidden,
        ffn=fields.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.whole("vocab_size"),
        max_context_len=fields.context_len(),
        rms_eps=fields.number("rms_norm_eps"),
        rope=rope_from_hf(fields, path, _ROPE_KINDS),
        is_tied=fields.flag("tie_word_embeddings", False),
        has_qkv_bias=form.has_qkv_bias,
        has_head_norms=form.has_head_norms,
    )


def _refuse_other_layers(config: Mapping[str, Any], path: Path) -> None:
    kinds = config.get("layer_types")
    allowed = "full_attention"
    if kinds is not None and (
        not isinstance(kinds, list) or any(kind != allowed for kind in kinds)
    ):
        raise UnsupportedModelError(f"{path}: layer_types is {kinds!r}; supported: {allowed!r}")


def _refuse_other_tensors(names: Iterable[str], form: _DecoderForm) -> None:
    """A bias or a norm of heads that the form has not is never asked for: it would be left out."""
    norms = {f"attn_{part}_norm.weight" for part in "qk"}
    wanted = {f"attn_{part}.bias" for part in "qkv"} if form.has_qkv_bias else set()
    wanted |= norms if form.has_head_norms else set()
    for name in names:
        part = name.split(".", 2)[-1] if name.startswith("blk.") else name
        if (part in norms or part.endswith(".bias")) and part not in wanted:
            raise UnsupportedModelError(
                f"GGUF tensors: found {name!r}; supported of biases and norms of heads in "
                f"{form.gguf_name}: {', '.join(sorted(wanted)) or 'none'}"
            )


def _gguf_rope(fields: ConfigFields, prefix: str) -> RopeConfig:
    """A factor without a kind is of the linear one, and 0 is none, as llama.cpp has it."""
    kind = fields.raw(f"{prefix}.scaling.type")
    if kind not in ("none", "linear", None):
        raise UnsupportedModelError(
            f"{prefix}.scaling.type is {kind!r}; supported: 'none', 'linear', "
            "and the factors of a rope_freqs tensor"
        )
    old_factor = fields.number(f"{prefix}.scale_linear", default=1.0, zero=1.0)
    factor = fields.number(f"{prefix}.scaling.factor", default=old_factor, zero=1.0)
    is_linear = kind == "linear" or (kind is None and factor != 1.0)
    return RopeConfig(
        theta=fields.number(f"{prefix}.freq_base", default=10000.0),
        kind="linear" if is_linear else "default",
        factor=factor,
    )


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ModelFormatError."""
    return read_json_object(directory / "config.json")


def architecture_name(config: Mapping[str, Any]) -> object:
    """What `architectures` says; of several the first. None where it says nothing."""
    names = config.get("architectures")
    if isinstance(names, list):
        return names[0] if names else None
    return names


def refuse_other_values(
    config: Mapping[str, Any], path: Path, plain: Mapping[str, Sequence[object]]
) -> None:
    """Raises UnsupportedModelError for the first key whose value is not one of those listed."""
    for key, allowed in plain.items():
        if config.get(key) not in allowed:
            raise UnsupportedModelError(
                f"{path}: {key} is {config[key]!r}; supported: {allowed[0]!r}"
            )
