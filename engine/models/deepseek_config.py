# SPDX-License-Identifier: Apache-2.0
"""The sizes of a DeepSeek-type decoder (V2, V3, R1, Kimi K2), from config.json. Torch-free.

Does not know: tensors, kernels. What a config asks for and we do not have is refused, not ignored.
Of the next-token-prediction layers behind the last one, the first may be used to draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.models.config import architecture_name, read_config, refuse_other_values
from engine.models.rope_config import RopeConfig, rope_from_hf, rope_spec, yarn_mscale
from engine.weights.config_fields import ConfigFields
from engine.weights.errors import UnsupportedModelError
from engine.weights.quant_config import quant_scheme
from kvtiers.layout import FP8_GROUP

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
ARCHITECTURES = (V2, V3)
ROPE_KINDS = ("default", "yarn")
MAX_TOP_K = 16  # what routing kernels keep in registers
GPU_ROW_MULTIPLE = 8  # rows of bf16 begin at multiples of 16 bytes, as grouped products want them
LEAST_GPU_SIZE = 16  # the shortest side of a tile that tensor cores multiply

_PLAIN: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "partial_rotary_factor": (1.0, None),
    "index_topk": (None,),  # sparse attention
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

    @property
    def takes_fp8_kv(self) -> bool:
        """Whether the latents divide into the groups that share a scale."""
        return self.latent_dim % FP8_GROUP == 0


def deepseek_config_from_hf(directory: Path) -> DeepseekConfig:
    """Read config.json of a Hugging Face directory.

    Raises:
        UnsupportedModelError: a feature we do not have, named.
        ModelFormatError: the file is damaged, or a field is missing or has no value it can have.
    """
    config, path = read_config(directory), directory / "config.json"
    refuse_other_values(config, path, _PLAIN)
    quant_scheme(config, directory)  # refuses what the weights' reader does not have
    return _config(ConfigFields(config, path), path, is_v3=architecture_name(config) == V3)


def check_for_gpu(config: DeepseekConfig) -> None:
    """Refuse sizes that no captured step on a GPU has kernels for.

    Raises:
        UnsupportedModelError: naming the field, the value and what is supported.
    """
    powers = {"kv_lora_rank": config.latent_dim, "qk_rope_head_dim": config.rope_dim}
    rows = {"hidden_size": config.hidden}
    if config.experts is not None:
        rows["moe_intermediate_size"] = config.experts.ffn
    wrong = [
        (name, size, f"powers of two from {LEAST_GPU_SIZE} on")
        for name, size in powers.items()
        if size < LEAST_GPU_SIZE or size & (size - 1)
    ]
    wrong += [
        (name, size, f"multiples of {GPU_ROW_MULTIPLE}")
        for name, size in rows.items()
        if size % GPU_ROW_MULTIPLE
    ]
    for name, size, allowed in wrong:
        raise UnsupportedModelError(
            f"config.json: {name} is {size}; supported on a GPU: {allowed} "
            "(hint: engine.device=cpu)"
        )


def _config(fields: ConfigFields, path: Path, *, is_v3: bool) -> DeepseekConfig:
    num_layers, num_heads = fields.whole("num_hidden_layers"), fields.whole("num_attention_heads")
    if fields.whole("num_key_value_heads", default=num_heads) != num_heads:
        raise UnsupportedModelError(
            f"{path}: num_key_value_heads is {fields.raw('num_key_value_heads')!r}; "
            f"supported: num_attention_heads ({num_heads})"
        )
    nope_dim, rope_dim = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    if rope_dim % 2:
        raise UnsupportedModelError(f"{path}: qk_rope_head_dim is {rope_dim}; supported: even")
    experts = _experts(fields, path, is_v3=is_v3)
    rope, mscale = _rope(fields, path)
    # Null is read as either by others.
    is_interleaved = not fields.has("rope_interleave") or fields.flag("rope_interleave")
    if not is_interleaved and not is_v3:  # nobody else reads the field there
        raise UnsupportedModelError(f"{path}: rope_interleave is False; supported in a V2: True")
    return DeepseekConfig(
        architecture=V3 if is_v3 else V2,
        num_layers=num_layers,
        hidden=fields.whole("hidden_size"),
        ffn=fields.whole("intermediate_size"),
        num_heads=num_heads,
        q_rank=fields.whole("q_lora_rank", low=0, default=0),
        latent_dim=fields.whole("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=fields.whole("v_head_dim"),
        vocab_size=fields.whole("vocab_size"),
        max_context_len=fields.whole("max_position_embeddings"),
        rms_eps=fields.number("rms_norm_eps"),
        rope=rope,
        is_rope_interleaved=is_interleaved,
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * mscale * mscale,
        is_tied=fields.flag("tie_word_embeddings", False),
        experts=experts,
        moe_layers=_moe_layers(fields, num_layers, experts is not None),
        num_next_layers=fields.whole("num_nextn_predict_layers", low=0, default=0),
    )


def _moe_layers(fields: ConfigFields, num_layers: int, has_experts: bool) -> tuple[bool, ...]:
    first = fields.whole("first_k_dense_replace", low=0, default=0)
    every = fields.whole("moe_layer_freq", default=1)
    return tuple(
        has_experts and index >= first and index % every == 0 for index in range(num_layers)
    )


def _experts(fields: ConfigFields, path: Path, *, is_v3: bool) -> ExpertsConfig | None:
    num_experts = fields.whole("n_routed_experts", low=0, default=0)
    if not num_experts:
        return None
    method = fields.raw("topk_method")
    if method is None:
        method = "noaux_tc" if is_v3 else "greedy"
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModelError(
            f"{path}: topk_method is {method!r}; supported: {', '.join(_METHODS)}"
        )
    score, group_score = _METHODS[method]
    if fields.raw("scoring_func") not in (score, None):
        raise UnsupportedModelError(
            f"{path}: scoring_func is {fields.raw('scoring_func')!r}; "
            f"supported with topk_method {method!r}: {score!r}"
        )
    # What a file means that says nothing of these, the released readers disagree on.
    fields.expect("n_shared_experts", *(("routed_scaling_factor",) if is_v3 else ()))
    renormalise = fields.flag("norm_topk_prob", None if is_v3 else False)
    if renormalise and score == "softmax":
        # The released code of the two families disagrees on whether the scale then applies.
        raise UnsupportedModelError(
            f"{path}: norm_topk_prob is True; supported with scoring_func 'softmax': False"
        )
    is_grouped = method != "greedy"
    fields.expect(*(("n_group", "topk_group") if is_grouped else ()))
    num_groups = fields.whole("n_group", default=1) if is_grouped else 1
    groups_kept = fields.whole("topk_group", default=1) if is_grouped else 1
    top_k = fields.whole("num_experts_per_tok")
    _check_groups(path, num_experts, num_groups, groups_kept, top_k)
    if group_score == "top2" and 1 < num_groups == num_experts:
        raise UnsupportedModelError(
            f"{path}: n_group is {num_groups}; supported with topk_method {method!r}: "
            f"groups of at least 2 of the {num_experts} experts"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        ffn=fields.whole("moe_intermediate_size"),
        num_shared=fields.whole("n_shared_experts", low=0, default=0),
        score=score,
        num_groups=num_groups,
        groups_kept=groups_kept,
        group_score=group_score,
        renormalise=renormalise,
        scale=fields.number("routed_scaling_factor", default=1.0),
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


def _rope(fields: ConfigFields, path: Path) -> tuple[RopeConfig, float]:
    """The rope, and YaRN's factor on queries and keys (its square scales the softmax)."""
    rope = rope_from_hf(fields, path, ROPE_KINDS)
    all_dim = rope_spec(fields).number("mscale_all_dim", default=0.0, zero=0.0)
    if rope.kind != "yarn" or not all_dim:
        return rope, 1.0
    return rope, yarn_mscale(rope.factor, all_dim)
