# SPDX-License-Identifier: Apache-2.0
"""The rope settings of a config.json, in the forms that files have them. Torch-free.

Does not know: architectures, tables (engine/layers/rope.py makes them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.weights.config_fields import ROPE_FIELDS, ConfigFields
from engine.weights.errors import ModelFormatError, UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `factor` and those after it are used by some kinds only."""

    theta: float
    kind: str = "default"  # default | linear | llama3 | yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_len: int = 0
    # yarn: bounds of the ramp in rotations, and the factor on cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


def rope_spec(fields: ConfigFields) -> ConfigFields:
    """The rope settings in either form: `rope_parameters`, or `rope_scaling`."""
    return fields.table(*ROPE_FIELDS)


def rope_from_hf(fields: ConfigFields, path: Path, kinds: Sequence[str]) -> RopeConfig:
    """Read rope settings; what is of none of `kinds` is refused.

    Raises: UnsupportedModelError, ModelFormatError.
    """
    _refuse_two_ropes(fields, path)
    spec = rope_spec(fields)
    names = (spec.raw("rope_type"), spec.raw("type"), "default")
    kind = next(name for name in names if name is not None)
    if kind not in kinds:
        raise UnsupportedModelError(f"{path}: rope type is {kind!r}; supported: {', '.join(kinds)}")
    if spec.raw("partial_rotary_factor") not in (1, None):
        found = spec.raw("partial_rotary_factor")
        raise UnsupportedModelError(f"{path}: partial_rotary_factor is {found!r}; supported: 1.0")
    context_len = fields.whole("max_position_embeddings")
    rope = RopeConfig(
        theta=spec.number("rope_theta", default=fields.number("rope_theta", default=10000.0)),
        kind=kind,
        factor=spec.number("factor", default=1.0),
        low_freq_factor=spec.number("low_freq_factor", default=1.0),
        high_freq_factor=spec.number("high_freq_factor", default=4.0),
        original_context_len=spec.whole("original_max_position_embeddings", default=context_len),
    )
    return _yarn(rope, fields, path) if kind == "yarn" else rope


def _yarn(rope: RopeConfig, fields: ConfigFields, path: Path) -> RopeConfig:
    spec = rope_spec(fields)
    if rope.theta == 1:  # every wave is as long as the others
        raise UnsupportedModelError(f"{path}: rope_theta is 1.0; supported with yarn: others")
    if spec.raw("original_max_position_embeddings") is None:
        raise ModelFormatError(
            f"{path}: yarn rope needs original_max_position_embeddings, found None"
        )
    if spec.raw("truncate") not in (True, None):
        raise UnsupportedModelError(
            f"{path}: truncate is {spec.raw('truncate')!r}; supported: True"
        )
    # Where the rope settings do not say how far the context is stretched, its lengths do.
    stretch = fields.whole("max_position_embeddings") / rope.original_context_len
    factor = spec.number("factor", default=stretch)
    # Zero says the same as nothing, here and of the betas.
    mscale, all_dim = (
        spec.number(name, default=0.0, zero=0.0) for name in ("mscale", "mscale_all_dim")
    )
    on_rotation = yarn_mscale(factor, 1.0)
    if mscale and all_dim:
        on_rotation = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return replace(
        rope,
        factor=factor,
        beta_fast=spec.number("beta_fast", default=32.0, zero=32.0),
        beta_slow=spec.number("beta_slow", default=1.0, zero=1.0),
        attention_factor=spec.number("attention_factor", default=on_rotation),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's correction of the attention's temperature; 1 where the context is not stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _refuse_two_ropes(fields: ConfigFields, path: Path) -> None:
    """Readers differ in which of the two counts, so they must say the same."""
    for name in ROPE_FIELDS:
        fields.table(name)  # refuses what is no object
    new, old = (_said_of_rope(fields.raw(name)) for name in ROPE_FIELDS)
    if new and old and new != old:
        raise UnsupportedModelError(
            f"{path}: rope_scaling is {fields.raw('rope_scaling')!r} beside rope_parameters "
            f"{fields.raw('rope_parameters')!r}; supported: one of them, or the same in both"
        )


def _said_of_rope(spec: Mapping[str, Any] | None) -> dict[str, Any]:
    """Its settings by their newer names, but for the base, which one form has elsewhere."""
    if not spec:
        return {}
    said = {key: value for key, value in spec.items() if value is not None}
    said.setdefault("rope_type", said.get("type", "default"))
    return {key: value for key, value in said.items() if key not in ("type", "rope_theta")}
