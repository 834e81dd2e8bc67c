# SPDX-License-Identifier: Apache-2.0
"""Where absorbed and expanded prefill cross on Hopper. Does not know: attention.

Expansion of 64K cached tokens costs a layer of 16 heads 0.46 ms, the attention of up to 128 new
ones (one tile) about 0.14 ms (benchmarks/results/gpu_prefill_h200_202611.md). Absorbed, eight new
tokens cost about 39 us. All of it grows with the prefix, so the number of tokens where the forms
meet does not change with it: about 120.
"""

from __future__ import annotations

from kernels.registry import Priority, register_kernel
from kernels.signature import CallSignature
from kernels.triton.mla import refuse_hopper

MOST_NEW = 96
# Below, an expansion costs less than the launches.
LEAST_CACHED = 4096


def _refuse(call: CallSignature) -> str | None:
    if dict(call.formats)["kv"] == "fp8_planes":  # decoded to rows that lie without gaps
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
