# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels extension. Arrays are C-contiguous numpy arrays unless a comment says else."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

class ArenaChain:
    def __init__(self) -> None: ...

class PackedMatrix:
    @property
    def num_rows(self) -> int: ...
    @property
    def num_cols(self) -> int: ...

class LlamaConfig:
    def __init__(
        self,
        num_layers: int,
        hidden: int,
        ffn: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab: int,
        rms_eps: float,
    ) -> None: ...

class LlamaLayer: ...

class LlamaModel:
    def __init__(
        self,
        config: LlamaConfig,
        embedding: PackedMatrix,
        lm_head: PackedMatrix,
        layers: list[LlamaLayer],
        final_norm: NDArray[np.float32],
        cos_sin: NDArray[np.float32],
    ) -> None: ...
    def forward(
        self,
        input_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slot_mapping: NDArray[np.int32],
        row_indptr: NDArray[np.int32],
        row_slots: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        page_table: NDArray[np.int32],
        pool: NDArray[Any],  # int16: the bits of bf16
        page_size: int,
        sample_rows: NDArray[np.int32],
        logits: NDArray[np.float32],
        level: str,
    ) -> None: ...

def available_levels() -> list[str]: ...
def num_threads() -> int: ...
def set_num_threads(num_threads: int) -> None: ...
def pack(
    format: str, source: NDArray[np.uint8], num_rows: int, num_cols: int, chain: ArenaChain
) -> PackedMatrix: ...
def make_layer(
    input_norm: NDArray[np.float32],
    qkv: PackedMatrix,
    attn_out: PackedMatrix,
    post_norm: NDArray[np.float32],
    gate_up: PackedMatrix,
    down: PackedMatrix,
    qkv_bias: NDArray[np.float32],
    q_norm: NDArray[np.float32],
    k_norm: NDArray[np.float32],
) -> LlamaLayer: ...
def linear(
    matrix: PackedMatrix, x: NDArray[np.float32], out: NDArray[np.float32], level: str
) -> None: ...
def paged_attention(
    query: NDArray[np.float32],
    kv: NDArray[Any],  # int16, strided over pages
    page_table: NDArray[np.int32],
    row_slots: NDArray[np.int32],
    row_indptr: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    scale: float,
    out: NDArray[np.float32],
    level: str,
) -> None: ...
def argmax(logits: NDArray[np.float32], out: NDArray[np.int32], level: str) -> None: ...
def apply_bitmask(logits: NDArray[np.float32], mask: NDArray[np.int32], level: str) -> None: ...
def copy_pages(pool: NDArray[np.uint8], copies: NDArray[np.int32]) -> None: ...
