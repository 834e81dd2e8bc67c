# SPDX-License-Identifier: Apache-2.0
"""Which modules bring the built-in implementations, and when each is imported.

Does not know: what they register. The GPU ones are imported only where there is a GPU, so that a
CPU process never loads triton.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

REFERENCE_MODULES = (
    "activation",
    "attention",
    "bitmask",
    "draw",
    "edit",
    "linear",
    "llama",
    "mla",
    "mla_kv_write",
    "mla_prefill",
    "moe",
    "moe_dense",
    "norm",
    "page_copy",
    "rope",
    "sampling",
    "step_ids",
)


def load_builtin_kernels() -> None:
    """Import (and so register) the reference kernels and those that this machine can use."""
    for name in REFERENCE_MODULES:
        importlib.import_module(f"kernels.reference.{name}")
    importlib.import_module("kernels.portable")
    if importlib.util.find_spec("_cpu_kernels") is not None:
        importlib.import_module("kernels.cpu")
    if torch.cuda.is_available():
        importlib.import_module("kernels.triton")
