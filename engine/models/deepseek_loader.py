# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint to the weights of a DeepSeek decoder, in the order its layers take them.

Does not know: files (a WeightReader), what a step is. Released checkpoints rotate the pairs (0, 1),
(2, 3), ...; kernels rotate (i, i + rope_dim / 2), so the rows of rope parts are put in order here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.layers.mla_weights import MlaWeights
from engine.layers.moe import DenseExperts, FfnWeights, MoeWeights, W4Experts
from engine.layers.rope import rope_table
from engine.models.deepseek_config import MAX_TOP_K, DeepseekConfig, ExpertsConfig
from engine.models.model import LoadOptions
from engine.weights.reader import CheckingReader, WeightReader
from kernels.fp8_weight import Fp8Weight, concat_fp8
from kernels.moe_routing import MoeRouting
from kernels.ops.linear import LinearWeight
from kernels.reference.quant import W4Weight
from kernels.w4_layout import (
    stack_w4,
    tile_w4,
    tile_w4_gate_up,
    tile_w4_linear,
    tile_w4_swiglu,
)

_Part = tuple[str, Sequence[int], torch.Tensor | None]  # name, shape, order of its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekLayer:
    input_norm: torch.Tensor  # [hidden]
    attention: MlaWeights
    post_norm: torch.Tensor  # [hidden]
    feed_forward: FfnWeights | MoeWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class NextLayer:
    """Guesses the token behind the next one; embedding and head are the model's."""

    embed_norm: torch.Tensor  # [hidden]
    hidden_norm: torch.Tensor  # [hidden]
    project: LinearWeight  # [hidden, 2 * hidden]: the embedding's half, then the hidden state's
    layer: DeepseekLayer
    final_norm: torch.Tensor  # [hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekStack:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[DeepseekLayer, ...]
    final_norm: torch.Tensor  # [hidden]
    lm_head: LinearWeight  # [vocab, hidden]
    cos_sin: torch.Tensor  # fp32 [max_pos, rope_dim]
    next_layer: NextLayer | None = None


def load_stack(config: DeepseekConfig, reader: WeightReader, options: LoadOptions) -> DeepseekStack:
    """Check every tensor the model needs, then read them all.

    Raises:
        WeightMismatchError: a tensor is missing or of another shape; before any is read.
    """
    check_stack(config, reader, options)
    return _Loader(config, reader, options).stack()


def check_stack(config: DeepseekConfig, reader: WeightReader, options: LoadOptions) -> None:
    """Check every tensor the model needs; none is read.

    Raises:
        WeightMismatchError: a tensor is missing, or of another shape or dtype.
    """
    nowhere = replace(options, device=torch.device("meta"))
    _Loader(config, CheckingReader(reader), nowhere).stack()


class _Loader:
    def __init__(self, config: DeepseekConfig, reader: WeightReader, options: LoadOptions) -> None:
        self._config = config
        self._reader = reader
        self._options = options

    def stack(self) -> DeepseekStack:
        config = self._config
        vocab_shape = (config.vocab_size, config.hidden)
        embedding = self._dense("model.embed_tokens", vocab_shape)
        table = rope_table(config.rope, config.rope_dim, self._options.max_positions)
        return DeepseekStack(
            embedding=embedding,
            layers=tuple(self._layer(index) for index in range(config.num_layers)),
            final_norm=self._norm("model.norm", config.hidden),
            lm_head=embedding if config.is_tied else self._linear("lm_head", vocab_shape),
            cos_sin=table.to(self._options.device),
            next_layer=self._next_layer() if self._options.drafts else None,
        )

    def _next_layer(self) -> NextLayer:
        index, hidden = self._config.num_layers, self._config.hidden
        prefix = f"model.layers.{index}"
        return NextLayer(
            embed_norm=self._norm(f"{prefix}.enorm", hidden),
            hidden_norm=self._norm(f"{prefix}.hnorm", hidden),
            project=self._dense(f"{prefix}.eh_proj", (hidden, 2 * hidden)),
            layer=self._layer(index),
            final_norm=self._norm(f"{prefix}.shared_head.norm", hidden),
        )

    def _layer(self, index: int) -> DeepseekLayer:
        prefix, hidden = f"model.layers.{index}", self._config.hidden
        experts = self._config.experts
        moe_layers = self._config.moe_layers
        is_moe = moe_layers[index] if index < len(moe_layers) else any(moe_layers)
        has_experts = experts is not None and is_moe
        return DeepseekLayer(
            input_norm=self._norm(f"{prefix}.input_layernorm", hidden),
            attention=self._attention(f"{prefix}.self_attn"),
            post_norm=self._norm(f"{prefix}.post_attention_layernorm", hidden),
            feed_forward=self._moe(f"{prefix}.mlp", experts)
            if has_experts and experts is not None
            else self._ffn(f"{prefix}.mlp", self._config.ffn),
        )

    def _attention(self, prefix: str) -> MlaWeights:
        config = self._config
        latent_dim, num_heads = config.latent_dim, config.num_heads
        kv_rows = (latent_dim + config.rope_dim, config.hidden)
        kv_down = (f"{prefix}.kv_a_proj_with_mqa", kv_rows, self._row_order(1, latent_dim))
        q_rows, q_order = num_heads * config.head_dim, self._row_order(num_heads, config.nope_dim)
        q_up = q_norm = None
        if config.q_rank:
            q_down = (f"{prefix}.q_a_proj", (config.q_rank, config.hidden), None)
            q_norm = self._norm(f"{prefix}.q_a_layernorm", config.q_rank)
            q_up = self._rows((f"{prefix}.q_b_proj", (q_rows, config.q_rank), q_order))
            down = self._rows(q_down, kv_down)
        else:
            down = self._rows((f"{prefix}.q_proj", (q_rows, config.hidden), q_order), kv_down)
        kv_up_rows = num_heads * (config.nope_dim + config.v_dim)
        kv_up = self._dense(f"{prefix}.kv_b_proj", (kv_up_rows, latent_dim))
        kv_up = kv_up.view(num_heads, -1, latent_dim)
        return MlaWeights(
            q_kv_down=down,
            q_norm=q_norm,
            q_up=q_up,
            kv_norm=self._norm(f"{prefix}.kv_a_layernorm", latent_dim),
            w_uk=kv_up[:, : config.nope_dim].contiguous(),
            w_uv=kv_up[:, config.nope_dim :].contiguous(),
            out=self._linear(f"{prefix}.o_proj", (config.hidden, num_heads * config.v_dim)),
        )

    def _row_order(self, num_heads: int, kept: int) -> torch.Tensor:
        """Row i of the result is row order[i] of the file: the first `kept` of a head stay."""
        rope = torch.arange(self._config.rope_dim)
        if self._config.is_rope_interleaved:
            rope = rope.view(-1, 2).T.reshape(-1)
        head = torch.cat((torch.arange(kept), kept + rope))
        starts = torch.arange(num_heads)[:, None] * head.numel()
        return (starts + head).view(-1).to(self._options.device)

    def _ffn(self, prefix: str, width: int) -> FfnWeights:
        hidden = self._config.hidden
        gate = self._one_w4(f"{prefix}.gate_proj", (width, hidden))
        up = self._one_w4(f"{prefix}.up_proj", (width, hidden))
        gate_up: LinearWeight
        if gate is not None and up is not None and gate.format == up.format:
            gate_up = tile_w4_swiglu(gate, up)
        else:
            names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
            gate_up = self._fp8_or_dense([(name, (width, hidden), None) for name in names])
        return FfnWeights(
            gate_up=gate_up, down=self._linear(f"{prefix}.down_proj", (hidden, width))
        )

    def _moe(self, prefix: str, experts: ExpertsConfig) -> MoeWeights:
        router_shape = (experts.num_experts, self._config.hidden)
        bias_name = f"{prefix}.gate.e_score_correction_bias"
        shared_width = experts.num_shared * experts.ffn
        held, num_shared = self._experts(prefix, experts)
        return MoeWeights(
            router=self._tensor(f"{prefix}.gate.weight", router_shape, torch.float32),
            bias=self._tensor(bias_name, (experts.num_experts,), torch.float32)
            if experts.has_bias
            else None,
            routing=MoeRouting(
                num_experts=experts.num_experts,
                top_k=experts.top_k,
                score=experts.score,
                num_groups=experts.num_groups,
                groups_kept=experts.groups_kept,
                group_score=experts.group_score,
                renormalise=experts.renormalise,
                scale=experts.scale,
            ),
            experts=held,
            shared=self._ffn(f"{prefix}.shared_experts", shared_width)
            if shared_width and not num_shared
            else None,
            num_shared_in_experts=num_shared,
        )

    def _experts(self, prefix: str, experts: ExpertsConfig) -> tuple[DenseExperts | W4Experts, int]:
        """The routed experts, and how many shared ones lie behind them."""
        count, hidden, width = experts.num_experts, self._config.hidden, experts.ffn
        name = f"{prefix}.experts"
        if self._takes_w4((width, hidden)):
            gate = self._w4(name, "gate_proj", count, (width, hidden))
            up = self._w4(name, "up_proj", count, (width, hidden))
            down = self._w4(name, "down_proj", count, (hidden, width))
            if gate is not None and up is not None and down is not None:
                num_shared = 0
                shared = self._shared_w4(f"{prefix}.shared_experts", experts, gate.format)
                if shared is not None:
                    num_shared = experts.num_shared
                    gate, up, down = (
                        _join(routed, part)
                        for routed, part in zip((gate, up, down), shared, strict=True)
                    )
                return (
                    W4Experts(gate_up=tile_w4_gate_up(gate, up), down=tile_w4(down)),
                    num_shared,
                )
        device, dtype = self._options.device, self._options.dtype
        gate_up_EIX = torch.empty(count, 2 * width, hidden, dtype=dtype, device=device)
        down_EXI = torch.empty(count, hidden, width, dtype=dtype, device=device)
        for index in range(count):
            expert = f"{name}.{index}"
            gate_up_EIX[index, :width] = self._dense(f"{expert}.gate_proj", (width, hidden))
            gate_up_EIX[index, width:] = self._dense(f"{expert}.up_proj", (width, hidden))
            down_EXI[index] = self._dense(f"{expert}.down_proj", (hidden, width))
        return DenseExperts(gate_up=gate_up_EIX, down=down_EXI), 0

    def _shared_w4(
        self, prefix: str, experts: ExpertsConfig, fmt: str
    ) -> tuple[W4Weight, W4Weight, W4Weight] | None:
        """Gate, up and down of the shared experts, one matrix each; None where they are none, or
        of another format than the routed ones. The file has them as one wide expert."""
        count, hidden, width = experts.num_shared, self._config.hidden, experts.ffn
        if not 0 < count <= MAX_TOP_K - experts.top_k:
            return None
        wide = count * width
        gate = self._one_w4(f"{prefix}.gate_proj", (wide, hidden))
        up = self._one_w4(f"{prefix}.up_proj", (wide, hidden))
        down = self._one_w4(f"{prefix}.down_proj", (hidden, wide))
        if gate is None or up is None or down is None:
            return None
        if {gate.format, up.format, down.format} != {fmt}:
            return None
        return _cut(gate, count, 0), _cut(up, count, 0), _cut(down, count, 1)

    def _w4(self, prefix: str, part: str, count: int, shape: Sequence[int]) -> W4Weight | None:
        """One projection of all experts, stacked, on the device; None where one is not 4-bit, or
        of another format than the first: then all are dense."""
        found: list[W4Weight] = []
        for index in range(count):
            weight = self._reader.w4(f"{prefix}.{index}.{part}.weight", shape)
            if weight is None or weight.format != (found or [weight])[0].format:
                return None
            found.append(weight)
        return _on(stack_w4(found), self._options.device)

    def _takes_w4(self, shape: Sequence[int]) -> bool:
        return self._options.keep_packed and not any(size % 64 for size in shape)

    def _one_w4(self, name: str, shape: Sequence[int]) -> W4Weight | None:
        """A linear layer's weight as stored, on the device; None where it is not kept in 4 bits."""
        found = self._reader.w4(f"{name}.weight", shape) if self._takes_w4(shape) else None
        return None if found is None else _on(found, self._options.device)

    def _norm(self, name: str, width: int) -> torch.Tensor:
        return self._tensor(f"{name}.weight", (width,), torch.float32)

    def _linear(self, name: str, shape: Sequence[int]) -> LinearWeight:
        return self._rows((name, shape, None))

    def _rows(self, *parts: _Part) -> LinearWeight:
        """One weight of the rows of several, (name, shape, order of its rows) each."""
        packed = [self._one_w4(name, shape) for name, shape, _ in parts]
        kept = [weight for weight in packed if weight is not None]
        if len(kept) == len(parts) and len({weight.format for weight in kept}) == 1:
            orders = [order for _, _, order in parts]
            return tile_w4_linear(
                [_reordered(weight, order) for weight, order in zip(kept, orders, strict=True)]
            )
        return self._fp8_or_dense(parts)

    def _fp8_or_dense(self, parts: Sequence[_Part]) -> LinearWeight:
        fp8 = self._fp8(parts)
        if fp8 is not None:
            return fp8
        dense = [
            self._dense(name, shape) if order is None else self._dense(name, shape)[order]
            for name, shape, order in parts
        ]
        return dense[0] if len(dense) == 1 else torch.cat(dense)

    def _fp8(self, parts: Sequence[_Part]) -> Fp8Weight | None:
        """None where a part is not kept in fp8, or its scales do not survive reordering."""
        kept: list[Fp8Weight] = []
        for name, shape, order in parts:
            if not self._options.keep_packed or shape[0] % 16 or shape[1] % 32:
                return None
            found = self._reader.fp8(f"{name}.weight", shape)
            if found is None:
                return None
            device = self._options.device
            moved = Fp8Weight(values=found.values.to(device), scales=found.scales.to(device))
            reordered = moved if order is None else moved.rows(order)
            if reordered is None:
                return None
            kept.append(reordered)
        return kept[0] if len(kept) == 1 else concat_fp8(kept)

    def _dense(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return self._tensor(f"{name}.weight", shape, self._options.dtype)

    def _tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._reader.dense(name, shape, dtype).to(self._options.device)


def _on(weight: W4Weight, device: torch.device) -> W4Weight:
    return W4Weight(
        format=weight.format,
        packed=weight.packed.to(device),
        scales=weight.scales.to(device),
        global_scale=weight.global_scale.to(device),
    )


def _bytes(scales: torch.Tensor) -> torch.Tensor:
    """Scales as bytes: indexing and joining are not there for every low-bit dtype."""
    return scales.view(torch.uint8)


def _reordered(weight: W4Weight, order: torch.Tensor | None) -> W4Weight:
    if order is None:
        return weight
    scales = _bytes(weight.scales)[order].view(weight.scales.dtype)
    return replace(weight, packed=weight.packed[order], scales=scales)


def _cut(weight: W4Weight, count: int, axis: int) -> W4Weight:
    """One matrix as `count` experts: its rows (axis 0) or its columns (axis 1) dealt out."""

    def cut(part: torch.Tensor) -> torch.Tensor:
        return torch.stack(part.chunk(count, dim=axis))

    return replace(
        weight,
        packed=cut(weight.packed),
        scales=cut(_bytes(weight.scales)).view(weight.scales.dtype),
        global_scale=weight.global_scale.expand(count),
    )


def _join(first: W4Weight, second: W4Weight) -> W4Weight:
    """Experts of one format and shape, behind each other."""
    scales = torch.cat((_bytes(first.scales), _bytes(second.scales)))
    return replace(
        first,
        packed=torch.cat((first.packed, second.packed)),
        scales=scales.view(first.scales.dtype),
        global_scale=torch.cat((first.global_scale, second.global_scale)),
    )
