# SPDX-License-Identifier: Apache-2.0
"""The weights and the step of a llama-type decoder, as the fused op takes them.

Does not know: files, tensor names, requests, how any op runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.errors import KernelInputError
from kernels.packed_weight import Weight
from kernels.signature import expect_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of the decoder. `num_heads` is a multiple of `num_kv_heads`."""

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    rms_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """Weights of one layer; norms fp32 [H], linears [N, K] in any weight format."""

    input_norm: torch.Tensor  # [H]
    qkv: (
        Weight  # [(num_heads + 2 * num_kv_heads) * D, H]: q rows, then k, then v; rotate-half order
    )
    attn_out: Weight  # [H, num_heads * D]
    post_norm: torch.Tensor  # [H]
    gate_up: Weight  # [2F, H]: gate rows, then up rows
    down: Weight  # [H, F]
    # None where the architecture has none: a bias of qkv, and RMSNorm over each head of q and of k
    # before rope. fp32.
    qkv_bias: torch.Tensor | None = None  # [(num_heads + 2 * num_kv_heads) * D]
    q_norm: torch.Tensor | None = None  # [D]
    k_norm: torch.Tensor | None = None  # [D]

    @property
    def head_form(self) -> str:
        """What its heads have beyond the product and rope, as kernels name it."""
        has_norm = self.q_norm is not None or self.k_norm is not None
        named = {"bias": self.qkv_bias is not None, "norm": has_norm}
        return "+".join(name for name, is_there in named.items() if is_there) or "plain"


@dataclass(slots=True, kw_only=True, eq=False)
class LlamaStack:
    """A whole decoder. `derived` holds what kernels repack from the weights, once each.

    Raises:
        KernelInputError: when a weight's shape disagrees with `shape`.
    """

    shape: LlamaShape
    embedding: Weight  # [V, H]
    layers: tuple[LlamaLayer, ...]
    final_norm: torch.Tensor  # [H]
    lm_head: Weight  # [V, H]; the same object as `embedding` where they are tied
    cos_sin: torch.Tensor  # fp32 [max_pos, D]: cos of the D/2 angles, then their sin
    derived: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        shape = self.shape
        if len(self.layers) != shape.num_layers:
            raise KernelInputError("layers", len(self.layers), f"{shape.num_layers} layers")
        if shape.num_heads % shape.num_kv_heads:
            raise KernelInputError(
                "shape.num_heads", shape.num_heads, f"a multiple of {shape.num_kv_heads}"
            )
        self._expect("embedding", self.embedding, (shape.vocab, shape.hidden))
        self._expect("lm_head", self.lm_head, (shape.vocab, shape.hidden))
        expect_shape("final_norm", self.final_norm, (shape.hidden,))
        expect_shape("cos_sin", self.cos_sin, (None, shape.head_dim))
        for index, layer in enumerate(self.layers):
            self._check_layer(f"layers[{index}]", layer)

    def _check_layer(self, path: str, layer: LlamaLayer) -> None:
        shape = self.shape
        q_width = shape.num_heads * shape.head_dim
        qkv_width = q_width + 2 * shape.num_kv_heads * shape.head_dim
        expect_shape(f"{path}.input_norm", layer.input_norm, (shape.hidden,))
        expect_shape(f"{path}.post_norm", layer.post_norm, (shape.hidden,))
        self._expect(f"{path}.qkv", layer.qkv, (qkv_width, shape.hidden))
        self._expect(f"{path}.attn_out", layer.attn_out, (shape.hidden, q_width))
        self._expect(f"{path}.gate_up", layer.gate_up, (2 * shape.ffn, shape.hidden))
        self._expect(f"{path}.down", layer.down, (shape.hidden, shape.ffn))
        extras = (
            ("qkv_bias", layer.qkv_bias, qkv_width),
            ("q_norm", layer.q_norm, shape.head_dim),
            ("k_norm", layer.k_norm, shape.head_dim),
        )
        for name, values, length in extras:
            if values is not None:
                expect_shape(f"{path}.{name}", values, (length,))

    @staticmethod
    def _expect(name: str, weight: Weight, shape: tuple[int, int]) -> None:
        if tuple(weight.shape) != shape:
            raise KernelInputError(name, list(weight.shape), f"shape {list(shape)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """One ragged step: R rows over T tokens. All int32 and contiguous (the table's rows are)."""

    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [T] page * page_size + offset
    row_indptr: torch.Tensor  # [R + 1]
    row_slots: torch.Tensor  # [R] row of the page table
    seq_lens: torch.Tensor  # [R] tokens of KV after this step
    page_table: torch.Tensor  # [M, P]
    page_size: int
