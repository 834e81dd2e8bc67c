# SPDX-License-Identifier: Apache-2.0
"""GPU benchmarks."""
