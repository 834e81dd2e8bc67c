# SPDX-License-Identifier: Apache-2.0
"""CPU kernels of the compiled extension `_cpu_kernels`; importing it registers them."""
