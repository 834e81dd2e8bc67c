# SPDX-License-Identifier: Apache-2.0
"""Kernels composed of torch's own operators, for any device. Importing it registers them."""

from kernels.portable import mla_prefill

__all__ = ["mla_prefill"]
