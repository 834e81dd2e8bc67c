# SPDX-License-Identifier: Apache-2.0
"""Copies between KV pages in plain torch, the ground truth. Does not know: dispatch."""

from __future__ import annotations

import torch

from kernels.registry import Priority, register_kernel


@register_kernel("copy_pages", "reference", priority=Priority.REFERENCE)
def copy_pages(kv_pool: torch.Tensor, copies: torch.Tensor) -> None:
    """One copy after another, in the order given."""
    for source, target, num_tokens in copies.tolist():
        kv_pool[target, :, :, :num_tokens] = kv_pool[source, :, :, :num_tokens]


@register_kernel("copy_latent_pages", "reference", priority=Priority.REFERENCE)
def copy_latent_pages(kv_pool: torch.Tensor, copies: torch.Tensor) -> None:
    """One copy after another, in the order given."""
    for source, target, num_tokens in copies.tolist():
        kv_pool[target, :, :num_tokens] = kv_pool[source, :, :num_tokens]


@register_kernel("copy_byte_pages", "reference", priority=Priority.REFERENCE)
def copy_byte_pages(kv_pool: torch.Tensor, copies: torch.Tensor) -> None:
    """One copy after another, in the order given; whole pages."""
    for source, target, _ in copies.tolist():
        kv_pool[target] = kv_pool[source]


@register_kernel("move_pages", "reference", priority=Priority.REFERENCE)
def move_pages(
    pool: torch.Tensor, pages: torch.Tensor, blob: torch.Tensor, slots: torch.Tensor, is_out: bool
) -> None:
    """One gather and scatter."""
    rows = slots.long().to(blob.device)
    if is_out:
        blob[rows] = pool[pages.long()].to(blob.device)
    else:
        pool[pages.long()] = blob[rows].to(pool.device)
