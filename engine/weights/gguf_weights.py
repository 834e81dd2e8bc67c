# SPDX-License-Identifier: Apache-2.0
"""A llama-type GGUF file as a WeightReader: names mapped, q and k rows put in order.

Does not know: the model's code. Files of llama store q and k rows interleaved for another form of
rope (pairs (0, 1), (2, 3), ...), those of qwen do not; kernels rotate halves (i, i + head_dim / 2),
so rows are put back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from engine.weights.errors import WeightMismatchError
from engine.weights.gguf import GgufFile, GgufTensor
from engine.weights.gguf_repack import repack_blocks
from engine.weights.reader import check_shape
from kernels.fp8_weight import Fp8Weight
from kernels.packed_weight import BLOCK_BYTES, PackedWeight, pack_linear
from kernels.reference.quant import W4Weight

_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_ROTATED = (".self_attn.q_proj.", ".self_attn.k_proj.")


class GgufWeights:
    """Reads one open file. `head_dim` says how q and k rows are grouped, where they are
    interleaved."""

    def __init__(self, file: GgufFile, head_dim: int) -> None:
        self._file = file
        self._head_dim = head_dim
        self._is_interleaved = file.metadata.get("general.architecture") == "llama"

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._file.tensors

    def check(self, name: str, shape: Sequence[int]) -> None:
        self._tensor(name, shape)

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = self._tensor(name, shape)
        values = torch.from_numpy(self._file.dequantise(tensor.name))
        if self._is_rotated(name):
            values = values[self._row_order(shape[0])]
        return values.to(dtype)

    def packed(self, name: str, shape: Sequence[int]) -> PackedWeight | None:
        tensor = self._tensor(name, shape)
        if len(shape) != 2:
            return None
        block_format = tensor.format_name.lower()
        blocks = self._file.raw(tensor.name)
        if block_format not in BLOCK_BYTES:
            repacked = repack_blocks(blocks, tensor.format_name)
            if repacked is None:
                return None
            block_format, blocks = repacked
        weight = pack_linear(blocks, block_format, shape[1])
        return weight.rows(self._row_order(shape[0])) if self._is_rotated(name) else weight

    def w4(self, name: str, shape: Sequence[int]) -> W4Weight | None:
        return None

    def fp8(self, name: str, shape: Sequence[int]) -> Fp8Weight | None:
        return None

    def _tensor(self, name: str, shape: Sequence[int]) -> GgufTensor:
        stored = gguf_name(name)
        tensor = self._file.tensors.get(stored)
        if tensor is None:
            raise WeightMismatchError(
                f"tensor {stored!r} ({name}): found none in {self._file.path.name}, "
                f"expected shape {list(shape)}"
            )
        check_shape(stored, tensor.shape, shape)
        return tensor

    def _is_rotated(self, name: str) -> bool:
        return self._is_interleaved and any(part in name for part in _ROTATED)

    def _row_order(self, num_rows: int) -> torch.Tensor:
        """Row i of the result is row order[i] of the file, int64 [num_rows]."""
        rows = torch.arange(num_rows).reshape(-1, self._head_dim // 2, 2)
        return rows.transpose(1, 2).reshape(-1)


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor given by its Hugging Face name."""
    match = _LAYER_PATTERN.fullmatch(name)
    if match is None:
        return _TOP_NAMES[name]
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
