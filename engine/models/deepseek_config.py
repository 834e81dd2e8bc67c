# SPDX-License-Identifier: Apache-2.0
"""The sizes of a DeepSeek-type decoder (V2, V3, R1, Kimi K2), from config.json. Torch-free.

Does not know: tensors, kernels. What a config asks for and we do not have is refused, not ignored.
Of the next-token-prediction layers behind the last one, the first may be used to draft.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.models.config import (
    RopeConfig,
    read_config,
    refuse_other_values,
    rope_from_hf,
    rope_spec,
)
from engine.weights.errors import ModelFormatError, UnsupportedModelError
from engine.weights.quant_config import quant_scheme

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
ARCHITECTURES = (V2, V3)
ROPE_KINDS = ("default", "yarn")
MAX_TOP_K = 16  # what routing kernels keep in registers

_PLAIN: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}
_METHODS: dict[str, tuple[Literal["softmax", "sigmoid"], Literal["max", "top2"]]] = {
    "greedy": ("softmax", "max"),
    "group_limited_greedy": ("softmax", "max"),
    "noaux_tc": ("sigmoid", "top2"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Routed and shared experts. `has_bias`: the router's choice is corrected by a bias."""

    num_experts: int
    top_k: int
    ffn: int
    num_shared: int
    score: Literal["softmax", "sigmoid"]
    num_groups: int
    groups_kept: int
    group_score: Literal["max", "top2"]
    renormalise: bool
    scale: float
    has_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """`q_rank` 0: queries are projected straight from the hidden state. `experts` None: dense."""

    architecture: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    q_rank: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    vocab_size: int
    max_context_len: int
    rms_eps: float
    rope: RopeConfig
    is_rope_interleaved: bool  # pairs (0, 1), (2, 3), ... in the checkpoint
    softmax_scale: float
    is_tied: bool
    experts: ExpertsConfig | None
    moe_layers: tuple[bool, ...]  # which layers have experts
    num_next_layers: int = 0  # behind the last: each guesses one token further

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.nope_dim + self.rope_dim


def deepseek_config_from_hf(directory: Path) -> DeepseekConfig:
    """Read config.json of a Hugging Face directory.

    Raises:
        UnsupportedModelError: a feature we do not have, named.
        ModelFormatError: the file is damaged, or a key is missing or not a number.
    """
    config, path = read_config(directory), directory / "config.json"
    refuse_other_values(config, path, _PLAIN)
    quant_scheme(config, directory)  # refuses what the weights' reader does not have
    try:
        return _config(config, path)
    except KeyError as error:
        raise ModelFormatError(f"{path}: key {error} is missing") from None
    except TypeError as error:
        raise ModelFormatError(f"{path}: a key has a value of the wrong type: {error}") from None


def _config(config: Mapping[str, Any], path: Path) -> DeepseekConfig:
    num_layers = int(config["num_hidden_layers"])
    num_heads = int(config["num_attention_heads"])
    if config.get("num_key_value_heads") not in (None, num_heads):
        raise UnsupportedModelError(
            f"{path}: num_key_value_heads is {config['num_key_value_heads']!r}; "
            f"supported: num_attention_heads ({num_heads})"
        )
    nope_dim, rope_dim = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    if rope_dim % 2:
        raise UnsupportedModelError(f"{path}: qk_rope_head_dim is {rope_dim}; supported: even")
    experts = _experts(config, path)
    rope, mscale = _rope(config, path)
    return DeepseekConfig(
        architecture=config["architectures"][0],
        num_layers=num_layers,
        hidden=int(config["hidden_size"]),
        ffn=int(config["intermediate_size"]),
        num_heads=num_heads,
        q_rank=int(config.get("q_lora_rank") or 0),
        latent_dim=int(config["kv_lora_rank"]),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=int(config["v_head_dim"]),
        vocab_size=int(config["vocab_size"]),
        max_context_len=int(config["max_position_embeddings"]),
        rms_eps=float(config["rms_norm_eps"]),
        rope=rope,
        is_rope_interleaved=bool(config.get("rope_interleave", True)),
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * mscale * mscale,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        moe_layers=_moe_layers(config, num_layers, experts is not None),
        num_next_layers=int(config.get("num_nextn_predict_layers") or 0),
    )


def _moe_layers(config: Mapping[str, Any], num_layers: int, has_experts: bool) -> tuple[bool, ...]:
    first, every = (
        int(config.get("first_k_dense_replace") or 0),
        int(config.get("moe_layer_freq") or 1),
    )
    return tuple(
        has_experts and index >= first and index % every == 0 for index in range(num_layers)
    )


def _experts(config: Mapping[str, Any], path: Path) -> ExpertsConfig | None:
    num_experts = int(config.get("n_routed_experts") or 0)
    if not num_experts:
        return None
    is_v3 = config["architectures"][0] == V3
    method = config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"{path}: topk_method is {method!r}; supported: {', '.join(_METHODS)}"
        )
    score, group_score = _METHODS[method]
    if config.get("scoring_func", score) != score:
        raise UnsupportedModelError(
            f"{path}: scoring_func is {config['scoring_func']!r}; "
            f"supported with topk_method {method!r}: {score!r}"
        )
    renormalise = bool(config.get("norm_topk_prob", is_v3))
    if renormalise and score == "softmax":
        # The released code of the two families disagrees on whether the scale then applies.
        raise UnsupportedModelError(
            f"{path}: norm_topk_prob is True; supported with scoring_func 'softmax': False"
        )
    is_grouped = method != "greedy"
    num_groups = int(config.get("n_group") or 1) if is_grouped else 1
    groups_kept = int(config.get("topk_group") or 1) if is_grouped else 1
    top_k = int(config["num_experts_per_tok"])
    _check_groups(path, num_experts, num_groups, groups_kept, top_k)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        ffn=int(config["moe_intermediate_size"]),
        num_shared=int(config.get("n_shared_experts") or 0),
        score=score,
        num_groups=num_groups,
        groups_kept=groups_kept,
        group_score=group_score,
        renormalise=renormalise,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        has_bias=score == "sigmoid",
    )


def _check_groups(path: Path, num_experts: int, groups: int, kept: int, top_k: int) -> None:
    if num_experts % groups:
        raise UnsupportedModelError(
            f"{path}: n_group is {groups}; supported: a divisor of n_routed_experts ({num_experts})"
        )
    if not 1 <= kept <= groups:
        raise UnsupportedModelError(f"{path}: topk_group is {kept}; supported: 1 to {groups}")
    most = min(MAX_TOP_K, num_experts // groups * kept)
    if not 1 <= top_k <= most:
        raise UnsupportedModelError(
            f"{path}: num_experts_per_tok is {top_k}; supported: 1 to {most}"
        )


def _rope(config: Mapping[str, Any], path: Path) -> tuple[RopeConfig, float]:
    """The rope, and YaRN's factor on queries and keys (its square scales the softmax)."""
    rope = rope_from_hf(config, path, ROPE_KINDS)
    if rope.kind != "yarn":
        return rope, 1.0
    spec = rope_spec(config)
    original = spec.get("original_max_position_embeddings")
    if not original:
        raise ModelFormatError(
            f"{path}: yarn rope needs original_max_position_embeddings, found {original!r}"
        )
    factor = float(spec.get("factor") or _stretch(config, original))
    mscale, all_dim = spec.get("mscale"), spec.get("mscale_all_dim")
    on_rotation = _mscale(factor, 1.0)
    if mscale and all_dim:
        on_rotation = _mscale(factor, float(mscale)) / _mscale(factor, float(all_dim))
    if spec.get("attention_factor") is not None:
        on_rotation = float(spec["attention_factor"])
    yarn = replace(
        rope,
        factor=factor,
        beta_fast=float(spec.get("beta_fast") or 32),
        beta_slow=float(spec.get("beta_slow") or 1),
        attention_factor=on_rotation,
    )
    return yarn, _mscale(factor, float(all_dim)) if all_dim else 1.0


def _stretch(config: Mapping[str, Any], original_context_len: int) -> float:
    """How far the context is stretched, where the rope settings do not say."""
    return float(config["max_position_embeddings"]) / original_context_len


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's correction of the attention's temperature; 1 where the context is not stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
