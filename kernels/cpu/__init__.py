# SPDX-License-Identifier: Apache-2.0
"""CPU kernels of the compiled extension `_cpu_kernels`; importing it registers them."""

from _cpu_kernels import available_levels, num_threads, set_num_threads
from kernels.cpu import llama, single_ops

__all__ = ["available_levels", "llama", "num_threads", "set_num_threads", "single_ops"]
