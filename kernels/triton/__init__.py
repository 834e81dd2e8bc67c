# SPDX-License-Identifier: Apache-2.0
"""Triton and Gluon kernels. Importing it registers them."""

from kernels.triton import (
    bitmask,
    draw,
    edit_rows,
    expert_choice,
    fixed_order,
    linear,
    mla,
    mla_decode_form,
    mla_fp8,
    mla_layer,
    mla_prefill,
    mla_prefill_form,
    moe,
    moe_large,
    page_copy,
    rows,
    sampling,
)

__all__ = [
    "bitmask",
    "draw",
    "edit_rows",
    "expert_choice",
    "fixed_order",
    "linear",
    "mla",
    "mla_decode_form",
    "mla_fp8",
    "mla_layer",
    "mla_prefill",
    "mla_prefill_form",
    "moe",
    "moe_large",
    "page_copy",
    "rows",
    "sampling",
]
