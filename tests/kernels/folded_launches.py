# SPDX-License-Identifier: Apache-2.0
"""Child of test_host_launches.py: what decode steps launch on an H200, folded and not.

Prints one JSON line: by case its launches a layer; and by kernel how many compiled forms folded
steps add to those of rows of one token.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.host_time import HostStep, prefill_rows
from benchmarks.gpu.stub_device import META, Launches, stub_device
from engine.execution.device_launcher import buckets_up_to
from engine.execution.folding import usable_forms
from engine.models.model import FoldedRows, StepRows
from kernels.ops.mla_decode_form import fold_forms
from kernels.selection import override


def decode_rows(size: int, q_len: int) -> StepRows:
    """As a captured step finds them: columns of one buffer."""
    columns = torch.empty(8, size, dtype=torch.int32, device=META)
    folded = None
    if q_len > 1:
        folded = FoldedRows(
            q_len=q_len, places=columns[5], row_slots=columns[6], seq_lens=columns[7]
        )
    return replace(
        prefill_rows([], 1),
        positions=columns[1],
        slot_mapping=columns[2],
        row_indptr=torch.empty(size + 1, dtype=torch.int32, device=META),
        row_slots=columns[3],
        seq_lens=columns[4],
        num_prefill_rows=0,
        num_prefill_tokens=0,
        prefill_on_host=None,
        samples_all=True,
        folded=folded,
    )


def _a_layer(launches: Launches, kv: str, size: int, q_len: int) -> dict[str, float]:
    few, many = (HostStep(launches, "v2-lite", num, kv) for num in (2, 4))
    counts = [step.launches(decode_rows(size, q_len)) for step in (few, many)]
    names = sorted({*counts[0], *counts[1]})
    layer = {name: (counts[1].get(name, 0) - counts[0].get(name, 0)) / 2 for name in names}
    return {name: num for name, num in layer.items() if num}


def _added_forms(launches: Launches, kv: str) -> dict[str, int]:
    step = HostStep(launches, "v2-lite", 2, kv)
    pool_layer = step.pool[:, 0]
    with override("mla_decode_form", "folded"):
        forms = fold_forms(16, 512, 64, torch.bfloat16, pool_layer)
    launches.forms.clear()
    sizes = buckets_up_to(16)
    for size in sizes:
        step.run(decode_rows(size, 1))
    before = {name: len(met) for name, met in launches.forms.items()}
    for size in sizes:
        for form in usable_forms(forms, size, 9):
            step.run(decode_rows(size, form.q_len))
    added = {name: len(met) - before.get(name, 0) for name, met in launches.forms.items()}
    return {name: num for name, num in added.items() if num}


def main(kv: str, cases: list[tuple[int, int]]) -> dict[str, Any]:
    with stub_device() as launches:
        layers = {f"{size}x{q_len}": _a_layer(launches, kv, size, q_len) for size, q_len in cases}
        return {"layers": layers, "added_forms": _added_forms(launches, kv)}


if __name__ == "__main__":
    wanted = [tuple(map(int, case.split("x"))) for case in sys.argv[2:]]
    print(json.dumps(main(sys.argv[1], wanted)))  # type: ignore[arg-type]
