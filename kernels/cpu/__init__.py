# SPDX-License-Identifier: Apache-2.0
"""CPU kernels of the compiled extension `_cpu_kernels`; importing it registers them."""

from _cpu_kernels import available_levels, current_level, num_threads, set_level, set_num_threads

from kernels.cpu import llama

__all__ = [
    "available_levels",
    "current_level",
    "llama",
    "num_threads",
    "set_level",
    "set_num_threads",
]
