# SPDX-License-Identifier: Apache-2.0
"""Triton and Gluon kernels. Importing it registers them."""

from kernels.triton import mla, moe, rows

__all__ = ["mla", "moe", "rows"]
