# SPDX-License-Identifier: Apache-2.0
"""Kernels composed of torch's own operators. Importing it registers them."""

from kernels.portable import mla_prefill, mla_prefill_flash, moe_dense

__all__ = ["mla_prefill", "mla_prefill_flash", "moe_dense"]
