# SPDX-License-Identifier: Apache-2.0
"""MLA prefill through torch's flash attention: keys and values expanded, a few heads at a time.

Does not know: dispatch. The attention takes one head width, so values are padded with zeros to
the width of the keys; its causal mask lets the last query see the last key.
Source: FlashAttention-2 (arXiv 2307.08691), as torch ships it.
"""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel
from kernels.step_work import StepWork

# Expanded keys and padded values of one group of heads stay below this.
EXPANDED_BYTES = 2 << 30


@register_kernel(
    "mla_prefill",
    "flash",
    priority=Priority.PERFORMANT,
    device="cuda",
    min_sm=(8, 0),
    formats={"q": {"bf16"}, "kv": {"bf16"}},
    refuses=lambda call: (
        None if int(call.trait("head_dim")) <= 256 else "flash attention takes heads up to 256"
    ),
)
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
    """Row by row."""
    num_heads, page_size = w_uk.shape[0], kv_pool_layer.shape[1]
    out = torch.empty(q.shape[0], num_heads, w_uv.shape[1], dtype=q.dtype, device=q.device)
    starts = row_indptr.tolist()
    for row, (slot, seq_len) in enumerate(zip(row_slots.tolist(), seq_lens.tolist(), strict=True)):
        mine = slice(starts[row], starts[row + 1])
        pages = page_table[slot, : -(-seq_len // page_size)].long()
        kv_LD = kv_pool_layer[pages].flatten(0, 1)[:seq_len]
        group = max(1, EXPANDED_BYTES // (2 * seq_len * q.shape[2] * q.element_size()))
        for first in range(0, num_heads, group):
            heads = slice(first, min(first + group, num_heads))
            out[mine, heads] = _attend(
                q[mine, heads], w_uk[heads], w_uv[heads], kv_LD, softmax_scale
            )
    return out


def _attend(
    q_QHD: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_LD: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    num_heads, nope_dim, latent_dim = w_uk.shape
    v_dim, seq_len = w_uv.shape[1], kv_LD.shape[0]
    latent_LC = kv_LD[:, :latent_dim]
    keys = q_QHD.new_empty(seq_len, num_heads, q_QHD.shape[2])
    keys[..., :nope_dim] = (latent_LC @ w_uk.flatten(0, 1).T).view(seq_len, num_heads, nope_dim)
    keys[..., nope_dim:] = kv_LD[:, None, latent_dim:]
    values = torch.zeros_like(keys)
    values[..., :v_dim] = (latent_LC @ w_uv.flatten(0, 1).T).view(seq_len, num_heads, v_dim)
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        q_QHD.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        0.0,
        True,  # causal, aligned at the last query and the last key
        scale=scale,
    )[0]
    found: torch.Tensor = out[0, :, :, :v_dim].transpose(0, 1)
    return found
