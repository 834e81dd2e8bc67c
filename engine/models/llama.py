# SPDX-License-Identifier: Apache-2.0
"""The llama architecture: grouped-query attention, SwiGLU, RMSNorm, rotate-half rope; and Qwen2
and Qwen3, which add a bias of q, k and v, or norms of the heads of q and k.

Does not know: files (a WeightReader), how kernels run, requests, pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.layers.rope import rope_table
from engine.models.config import DecoderConfig
from engine.models.model import LoadOptions, StepRows
from engine.weights.reader import CheckingReader, WeightReader
from kernels.llama_stack import LlamaLayer, LlamaShape, LlamaStack
from kernels.ops.llama import llama_forward
from kernels.packed_weight import PackedWeight, Weight, concat_rows
from kvtiers.layout import PageLayout


class LlamaForCausalLM:
    """The decoder over paged KV."""

    def __init__(self, config: DecoderConfig, stack: LlamaStack) -> None:
        self.config = config
        self.num_layers = config.num_layers
        self.vocab_size = config.vocab_size
        self.stack = stack

    @property
    def step_bytes_per_token(self) -> int:
        """See `PagedModel`; in fp32. The widest is what is between a layer's last matrices."""
        return 4 * (3 * self.config.ffn + 5 * self.config.hidden)

    def kv_layout(self, page_size: int, dtype: str) -> PageLayout:
        return PageLayout(
            num_layers=self.config.num_layers,
            page_size=page_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=dtype,
        )

    @classmethod
    def load(
        cls, config: DecoderConfig, reader: WeightReader, options: LoadOptions
    ) -> LlamaForCausalLM:
        """Build the model from a checkpoint.

        Raises:
            WeightMismatchError: a tensor is missing or of another shape; before any is read.
        """
        cls.check(config, reader, options)
        return cls(config, _StackLoader(config, reader, options).stack())

    @staticmethod
    def check(config: DecoderConfig, reader: WeightReader, options: LoadOptions) -> None:
        """Raise what `load` would, without reading a tensor."""
        _StackLoader(config, CheckingReader(reader), options).check()

    def forward(
        self,
        input_ids: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Write the step's KV and return logits fp32 [S, vocab_size] (a new tensor)."""
        rows.wait_for_layer(self.num_layers - 1)  # one call runs all of them
        return llama_forward(self.stack, input_ids, rows, kv_pool, sample_rows)


class _StackLoader:
    def __init__(self, config: DecoderConfig, reader: WeightReader, options: LoadOptions) -> None:
        self._config = config
        self._reader = reader
        self._options = options

    def stack(self) -> LlamaStack:
        config = self._config
        vocab_shape = (config.vocab_size, config.hidden)
        embedding = self._linear("model.embed_tokens.weight", vocab_shape)
        return LlamaStack(
            shape=LlamaShape(
                num_layers=config.num_layers,
                hidden=config.hidden,
                ffn=config.ffn,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                vocab=config.vocab_size,
                rms_eps=config.rms_eps,
            ),
            embedding=embedding,
            layers=tuple(self._layer(index) for index in range(config.num_layers)),
            final_norm=self._norm("model.norm.weight"),
            lm_head=embedding if config.is_tied else self._linear("lm_head.weight", vocab_shape),
            cos_sin=self._cos_sin(),
        )

    def check(self) -> None:
        """Ask for every tensor. For a reader that only checks."""
        vocab_shape = (self._config.vocab_size, self._config.hidden)
        self._linear("model.embed_tokens.weight", vocab_shape)
        for index in range(self._config.num_layers):
            self._layer(index)
        self._norm("model.norm.weight")
        if not self._config.is_tied:
            self._linear("lm_head.weight", vocab_shape)

    def _layer(self, index: int) -> LlamaLayer:
        config = self._config
        prefix = f"model.layers.{index}"
        q_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        return LlamaLayer(
            input_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._fused(
                f"{prefix}.self_attn",
                {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width},
            ),
            attn_out=self._linear(f"{prefix}.self_attn.o_proj.weight", (config.hidden, q_width)),
            post_norm=self._norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._fused(f"{prefix}.mlp", {"gate_proj": config.ffn, "up_proj": config.ffn}),
            down=self._linear(f"{prefix}.mlp.down_proj.weight", (config.hidden, config.ffn)),
            qkv_bias=self._qkv_bias(f"{prefix}.self_attn", (q_width, kv_width, kv_width)),
            q_norm=self._head_norm(f"{prefix}.self_attn.q_norm.weight"),
            k_norm=self._head_norm(f"{prefix}.self_attn.k_norm.weight"),
        )

    def _qkv_bias(self, prefix: str, widths: Sequence[int]) -> torch.Tensor | None:
        if not self._config.has_qkv_bias:
            return None
        names = (f"{prefix}.{part}_proj.bias" for part in "qkv")
        parts = zip(names, widths, strict=True)
        return torch.cat([self._reader.dense(name, (n,), torch.float32) for name, n in parts])

    def _head_norm(self, name: str) -> torch.Tensor | None:
        if not self._config.has_head_norms:
            return None
        return self._reader.dense(name, (self._config.head_dim,), torch.float32)

    def _norm(self, name: str) -> torch.Tensor:
        return self._reader.dense(name, (self._config.hidden,), torch.float32)

    def _linear(self, name: str, shape: Sequence[int]) -> Weight:
        packed = self._reader.packed(name, shape) if self._options.keep_packed else None
        return self._reader.dense(name, shape, self._options.dtype) if packed is None else packed

    def _fused(self, prefix: str, widths: dict[str, int]) -> Weight:
        """One weight of several, row after row; dense where their formats differ."""
        named = {
            f"{prefix}.{part}.weight": (rows, self._config.hidden) for part, rows in widths.items()
        }
        parts = [self._linear(name, shape) for name, shape in named.items()]
        if len({p.format if isinstance(p, PackedWeight) else "dense" for p in parts}) > 1:
            dtype = self._options.dtype
            parts = [self._reader.dense(name, shape, dtype) for name, shape in named.items()]
        return concat_rows(parts)

    def _cos_sin(self) -> torch.Tensor:
        config = self._config
        name = "rope_freqs.weight"
        factors = None
        if self._reader.has(name):
            factors = self._reader.dense(name, (config.head_dim // 2,), torch.float32)
        return rope_table(config.rope, config.head_dim, self._options.max_positions, factors)


EntryClass = LlamaForCausalLM
