# SPDX-License-Identifier: Apache-2.0
"""Triton and Gluon kernels. Importing it registers them."""

from kernels.triton import linear, mla, mla_layer, mla_prefill, moe, moe_large, rows, sampling

__all__ = ["linear", "mla", "mla_layer", "mla_prefill", "moe", "moe_large", "rows", "sampling"]
