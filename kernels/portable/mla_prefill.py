# SPDX-License-Identifier: Apache-2.0
"""MLA prefill in bounded memory: absorbed for few new tokens, else expanded chunk by chunk.

Does not know: dispatch. Per head, query and KV token the absorbed form costs 2 * (2 C + R) flops,
the expanded one 2 * (N + R + V) and 2 * C * (N + V) per KV token for the expansion; they cross
at CROSSOVER_TOKENS = C * (N + V) / (2 C - N - V), 171 tokens for C 512, N 128, V 128.

Legend: Q query tokens of a row, L tokens of a chunk of its KV, H heads, N nope_dim, R rope_dim,
V v_dim, C latent_dim. Partial softmax results are merged by their log-sum-exp.
Source: DeepSeek-V2 (arXiv 2405.04434), sections 2.1.2 and C; FlashDecoding for the merge.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.registry import Priority, register_kernel
from kernels.step_work import StepWork

CHUNK_TOKENS = 4096
# Scores of one piece: fp32 [H, queries, CHUNK_TOKENS] stays below this.
SCORE_BYTES = 256 << 20

Piece = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def crossover_tokens(nope_dim: int, v_dim: int, latent_dim: int) -> int:
    """From how many new tokens on expanding the latents is cheaper than absorbing."""
    saved = 2 * latent_dim - nope_dim - v_dim
    return latent_dim * (nope_dim + v_dim) // saved + 1 if saved > 0 else 1 << 30


@register_kernel("mla_prefill", "portable", priority=Priority.PORTABLE)
def mla_prefill(
    q: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    work: StepWork | None = None,
) -> torch.Tensor:
    """Row by row; GEMMs in q.dtype, softmax and merge in fp32."""
    _, nope_dim, latent_dim = w_uk.shape
    page_size = kv_pool_layer.shape[1]
    out = torch.empty(q.shape[0], q.shape[1], w_uv.shape[1], dtype=q.dtype, device=q.device)
    starts = row_indptr.tolist()
    least = crossover_tokens(nope_dim, w_uv.shape[1], latent_dim)
    for row, (slot, seq_len) in enumerate(zip(row_slots.tolist(), seq_lens.tolist(), strict=True)):
        mine = slice(starts[row], starts[row + 1])
        pages = page_table[slot, : -(-seq_len // page_size)].long()
        kv_LD = kv_pool_layer[pages].flatten(0, 1)[:seq_len].to(q.dtype)
        attend = _expanded if starts[row + 1] - starts[row] >= least else _absorbed
        out[mine] = attend(q[mine], w_uk, w_uv, kv_LD, softmax_scale)
    return out


def _absorbed(
    q_QHD: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_LD: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The up-projections move to the queries and the results; one KV head for all."""
    nope_dim, latent_dim = w_uk.shape[1:]
    q_HQN = q_QHD[..., :nope_dim].transpose(0, 1)
    q_HQC = torch.bmm(q_HQN, w_uk)
    q_HQD = torch.cat((q_HQC, q_QHD[..., nope_dim:].transpose(0, 1)), dim=-1)

    def keys_values(chunk_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return chunk_LD.T, chunk_LD[:, :latent_dim]

    o_HQC = _attend(q_HQD, kv_LD, keys_values, scale)
    return torch.bmm(o_HQC.to(q_QHD.dtype), w_uv.transpose(1, 2)).transpose(0, 1)


def _expanded(
    q_QHD: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_LD: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """A chunk of latents at a time becomes the keys and values of every head."""
    num_heads, _, latent_dim = w_uk.shape

    def keys_values(chunk_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent_CL = chunk_LD[:, :latent_dim].T
        k_HNL = torch.matmul(w_uk, latent_CL)
        rope_HRL = chunk_LD[:, latent_dim:].T.expand(num_heads, -1, -1)
        v_HLV = torch.matmul(w_uv, latent_CL).transpose(1, 2)
        return torch.cat((k_HNL, rope_HRL), dim=1), v_HLV

    o_HQV = _attend(q_QHD.transpose(0, 1), kv_LD, keys_values, scale)
    return o_HQV.to(q_QHD.dtype).transpose(0, 1)


def _attend(
    q_HQD: torch.Tensor,
    kv_LD: torch.Tensor,
    keys_values: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> torch.Tensor:
    """fp32 [H, Q, value width]; causal, queries are the last Q of the L tokens."""
    num_heads, num_queries, _ = q_HQD.shape
    num_kv = kv_LD.shape[0]
    first = num_kv - num_queries  # position of the first query
    step = max(1, SCORE_BYTES // (4 * num_heads * min(CHUNK_TOKENS, num_kv)))
    top = torch.full((num_heads, num_queries, 1), float("-inf"), device=q_HQD.device)
    mass = torch.zeros_like(top)
    out: torch.Tensor | None = None
    for start in range(0, num_kv, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, num_kv)
        keys, values = keys_values(kv_LD[start:end])
        if out is None:
            out = torch.zeros(num_heads, num_queries, values.shape[-1], device=q_HQD.device)
        # Queries before `start` see nothing of this chunk.
        for q_start in range(max(0, start - first), num_queries, step):
            mine = slice(q_start, min(q_start + step, num_queries))
            scores = torch.matmul(q_HQD[:, mine], keys).float() * scale
            if first + q_start < end - 1:
                _hide_future(scores, first + q_start - start)
            new_top = torch.maximum(top[:, mine], scores.amax(dim=-1, keepdim=True))
            shrink = torch.exp(top[:, mine] - new_top)
            p = torch.exp(scores - new_top)
            mass[:, mine] = mass[:, mine] * shrink + p.sum(dim=-1, keepdim=True)
            part = torch.matmul(p.to(values.dtype), values).float()
            out[:, mine] = out[:, mine] * shrink + part
            top[:, mine] = new_top
    assert out is not None, "a row has tokens"
    return out / mass


def _hide_future(scores: torch.Tensor, first: int) -> None:
    """Mask key l for query i where l > first + i, in place; every query keeps a key."""
    num_queries, num_keys = scores.shape[-2:]
    keys = torch.arange(num_keys, device=scores.device)
    queries = torch.arange(first, first + num_queries, device=scores.device)
    scores.masked_fill_(keys[None, :] > queries[:, None], float("-inf"))
