# SPDX-License-Identifier: Apache-2.0
"""Where absorbed and expanded prefill cross on Hopper. Does not know: attention.

Measured on an H200, a layer of 16 heads, bf16 KV: 128 new tokens on 65,536 cached take 530 us
absorbed and 634 expanded, on 8,192 they take 100 and 112; 32 new ones 164 and 607, 50 and 108. All
of it grows with the prefix, so the number of tokens where the forms meet hardly changes with it.
"""

from __future__ import annotations

from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.triton.mla import refuse_hopper

MOST_NEW = 128
# Below, an expansion costs less than the launches.
LEAST_CACHED = 4096


def _refuse(call: CallSignature) -> str | None:
    if call.format("kv") == "fp8_planes":  # decoded to rows that lie without gaps
        traits = tuple({**dict(call.traits), "page_stride_rows_exact": True}.items())
        call = CallSignature(call.family, call.device, call.formats, traits)
    return refuse_hopper(call)


@register_kernel(
    "mla_prefill_form",
    "crossover",
    priority=Priority.SPECIALIZED,
    device="cuda",
    min_sm=(9, 0),
    formats={"q": {"bf16"}, "kv": {"bf16", "fp8_planes"}},
    refuses=_refuse,
)
def absorb_few(new: list[int], cached: list[int]) -> list[bool]:
    """Rows of few new tokens behind a long prefix."""
    return [num <= MOST_NEW and past >= LEAST_CACHED for num, past in zip(new, cached, strict=True)]
