# SPDX-License-Identifier: Apache-2.0
"""Kernels composed of torch's own operators. Importing it registers them."""

from kernels.portable import (
    layer_ops,
    mla_decode_form,
    mla_prefill,
    mla_prefill_flash,
    mla_prefill_form,
    mla_prefill_planes,
    moe_dense,
)

__all__ = [
    "layer_ops",
    "mla_decode_form",
    "mla_prefill",
    "mla_prefill_flash",
    "mla_prefill_form",
    "mla_prefill_planes",
    "moe_dense",
]
