# SPDX-License-Identifier: Apache-2.0
"""How far a kernel may be from the reference, per family and format, and why.

Does not know: how the difference is measured beyond this: per row of the result (last axes
flattened), |difference| / |reference| in the Euclidean norm, the worst row counts. 0.0 asks for the
same bits.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative error of a row, with the reason it is allowed."""

    relative: float
    reason: str


_EXACT = Tolerance(0.0, "moves or compares values, computes none")

_CODES = Tolerance(
    7e-2, "a code of e4m3 keeps four bits; a sum in another order may move it by one"
)
# Families of which nothing else is said, by what they compute in.
_BY_FORMAT = {
    "fp32": Tolerance(1e-5, "fp32 sums in another order"),
    "bf16": Tolerance(
        2e-2, "operands and results rounded to bf16 (0.2 % each), at other places; sums in fp32"
    ),
}

_TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("argmax", ""): _EXACT,
    ("apply_bitmask", ""): _EXACT,
    ("copy_pages", ""): _EXACT,
    ("draw_tokens", ""): _EXACT,
    ("greedy_rows", ""): _EXACT,
    ("feed_ids", ""): _EXACT,
    ("embed_rows", ""): _EXACT,
    ("move_pages", ""): _EXACT,
    ("edit_rows", ""): Tolerance(1e-6, "a product and two sums in fp32, contracted or not"),
    ("moe_route", ""): Tolerance(1e-5, "fp32 sums in another order, exp as a device has it"),
    ("mla_absorb", "fp8"): _CODES,
    ("mla_kv_write", "fp8"): _CODES,
    ("linear", "fp32"): Tolerance(
        2e-2,
        "activations as int8 per 32 (error about 0.4 % of their norm) or bf16; random weights "
        "average little of it away",
    ),
    ("linear", "bf16"): Tolerance(2e-2, "as fp32, and the result rounded to bf16 (0.2 %)"),
    ("paged_attention", "fp32"): Tolerance(
        1e-2, "query and weights rounded to bf16 (0.2 % each), the sum in fp32"
    ),
    ("paged_attention", "bf16"): Tolerance(1.2e-2, "as fp32, and the result rounded to bf16"),
    ("llama_forward", "bf16"): Tolerance(
        3e-2, "bf16 activations against a reference that rounds them at other places"
    ),
    ("llama_forward", "q4_1"): Tolerance(
        4e-2, "8-bit activations at every linear of every layer; random weights amplify them"
    ),
    ("llama_forward", "q8_0"): Tolerance(4e-2, "as q4_1"),
}


def tolerance_of(family: str, variant: str = "") -> Tolerance:
    """Return the tolerance of a family and format.

    Raises:
        KeyError: if none is set, neither for the family nor for the format.
    """
    found = _TOLERANCES.get((family, variant)) or _TOLERANCES.get((family, ""))
    found = found or _BY_FORMAT.get(variant)
    if found is None:
        raise KeyError(f"no tolerance for {family} {variant}".rstrip())
    return found
