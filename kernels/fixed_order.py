# SPDX-License-Identifier: Apache-2.0
"""Chooses the kernels of a GPU whose results do not depend on the batch. For a whole process.

Does not know: the kernels, configurations.
"""

from __future__ import annotations

from kernels.selection import set_override

# By family: "fixed" ones of triton/fixed_order.py, compositions of ops that are listed here too,
# and kernels that treat each row by itself.
FIXED_ORDER = {
    "linear": "fixed",
    "linear_add": "composed",
    "mla_absorb": "fixed",
    "mla_decode_form": "rows",
    "mla_output": "fixed",
    "mla_prefill": "fixed",
    "mla_prefill_form": "expanded",
    "moe_dense": "fixed",
    "moe_norm_route": "fixed",
    "norm_linear": "composed",
    "rms_norm": "triton",
    "silu_and_mul": "triton",
    "swiglu_linear": "composed",
}


def use_fixed_order() -> None:
    """Set the overrides. Requires: the GPU's kernels are registered (`kernels.ops` imported)."""
    for family, name in FIXED_ORDER.items():
        set_override(family, name)


def use_usual_order() -> None:
    """Take the overrides back."""
    for family in FIXED_ORDER:
        set_override(family, None)
