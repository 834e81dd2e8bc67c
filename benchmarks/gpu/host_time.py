# SPDX-License-Identifier: Apache-2.0
"""What one prefill step of a GPU model costs the host, measured without a GPU.

    python -m benchmarks.gpu.host_time [--new 800] [--past 65536] [--decodes 0] [--kv fp8]
        [--pieces]

Prints JSON lines: what a layer launches, by name, and Python's time for it. Kernels are chosen as
on an H200 and launched by a call that does nothing (stub_device.py), so a real launch costs some
microseconds more. Does not know: what kernels compute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.shapes import SHAPES, write_shape
from benchmarks.gpu.stub_device import META, CountTorch, Launches, quick_products, stub_device
from engine.execution.prefill_pieces import piece_sizes
from engine.models.deepseek import DeepseekForCausalLM
from engine.models.deepseek_config import deepseek_config_from_hf
from engine.models.model import LoadOptions, StepRows
from engine.weights.reader import CheckingReader, RandomWeights
from kernels.reference.quant import W4Weight

PAGE = 64
MOST_TOKENS = 4096
NUM_PAGES = 4096
MAX_SLOTS = 16


class _Nvfp4Weights(CheckingReader):
    """Weights in 4 bits that hold no memory; the output head stays plain."""

    def w4(self, name: str, shape: Sequence[int]) -> W4Weight | None:
        if name.startswith("lm_head"):
            return None
        lead, (rows, columns) = shape[:-2], shape[-2:]
        scales = torch.empty(*lead, rows, columns // 16, dtype=torch.uint8, device=META)
        return W4Weight(
            format="nvfp4",
            packed=torch.empty(*lead, rows, columns // 2, dtype=torch.uint8, device=META),
            scales=scales.view(torch.float8_e4m3fn),
            global_scale=torch.empty(lead, device=META),
        )


def load_model(shape: str, num_layers: int) -> DeepseekForCausalLM:
    """The model of a shape without its weights' bytes."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_shape(Path(directory), shape, "nvfp4")
        written = {**SHAPES[shape], "num_hidden_layers": num_layers}
        config = json.loads((path / "config.json").read_text()) | written
        (path / "config.json").write_text(json.dumps(config))
        parsed = deepseek_config_from_hf(path)
    options = LoadOptions(
        dtype=torch.bfloat16,
        keep_packed=True,
        max_positions=1 << 17,
        max_rows=MAX_SLOTS,
        device=META,
    )
    return DeepseekForCausalLM.load(parsed, _Nvfp4Weights(RandomWeights(META)), options)


def prefill_rows(lens: list[tuple[int, int]], num_decodes: int) -> StepRows:
    """Rows (cached, new), then rows of one token; on the device parts of one upload."""
    every = [*lens, *((100, 1) for _ in range(num_decodes))]
    num_tokens, num_rows, num_prefill = sum(new for _, new in every), len(every), len(lens)
    indptr = torch.tensor([0, *(new for _, new in every)]).cumsum(0).to(torch.int32)
    ends = torch.tensor([past + new for past, new in every], dtype=torch.int32)
    slots = torch.arange(num_rows, dtype=torch.int32)
    sizes = [num_tokens, num_tokens, num_rows + 1, num_rows, num_rows]
    packed = torch.empty(num_tokens + sum(sizes), dtype=torch.int32, device=META)
    positions, mapping, row_indptr, row_slots, seq_lens = packed[num_tokens:].split(sizes)
    return StepRows(
        positions=positions,
        slot_mapping=mapping,
        row_indptr=row_indptr,
        row_slots=row_slots,
        seq_lens=seq_lens,
        page_table=torch.empty(MAX_SLOTS + 1, 2048, dtype=torch.int32, device=META),
        page_size=PAGE,
        num_prefill_rows=num_prefill,
        num_prefill_tokens=int(indptr[num_prefill]),
        prefill_on_host=(
            slots[:num_prefill],
            indptr[: num_prefill + 1],
            ends[:num_prefill],
        ),
    )


class HostStep:
    """One step over and over, of models with `num_layers` layers of the same kind."""

    def __init__(
        self, launches: Launches, shape: str, num_layers: int, kv: str, *, pieces: bool = False
    ) -> None:
        self._launches = launches
        self._model = load_model(shape, num_layers)
        self._sizes = piece_sizes(MOST_TOKENS) if pieces else []
        if pieces:
            self._model.prepare_pieces(self._sizes[-1])
        layout = self._model.kv_layout(PAGE, "fp8" if kv == "fp8" else "bfloat16")
        self.pool = torch.empty(
            layout.pool_shape(NUM_PAGES),
            dtype=torch.uint8 if kv == "fp8" else torch.bfloat16,
            device=META,
        )

    def run(self, rows: StepRows) -> None:
        ids = torch.empty(rows.positions.shape[0], dtype=torch.int32, device=META)
        num_rows = rows.row_slots.shape[0]
        sampled = torch.empty(num_rows, dtype=torch.int32, device=META)
        size = next((size for size in self._sizes if size >= ids.shape[0]), None)
        if size is not None:
            self._model.forward_in_pieces(ids, rows, self.pool, sampled, size, self._replay)
        else:
            self._model.forward(ids, rows, self.pool, sampled)

    def _replay(self, number: int, piece: Callable[[], None]) -> None:
        """A captured piece: one launch, whatever is in it."""
        self._launches.counts["graph"] += 1

    def launches(self, rows: StepRows) -> dict[str, int]:
        """What a step launches, by name."""
        self.run(rows)
        self._launches.take()
        with CountTorch(self._launches):
            self.run(rows)
        return self._launches.take()

    def ms(self, rows: StepRows, repeats: int = 20) -> float:
        """Median CPU time of a step: other processes on the machine are left out."""
        samples = []
        with quick_products():
            for _ in range(repeats + 3):
                before_s = time.thread_time()
                self.run(rows)
                samples.append((time.thread_time() - before_s) * 1e3)
        return statistics.median(samples[3:])


def measure(args: argparse.Namespace, launches: Launches) -> dict[str, Any]:
    """Launches and time of one layer: the difference between nine layers of experts and one."""
    rows = prefill_rows([(args.past, args.new)] * args.prefills, args.decodes)
    few, many = (HostStep(launches, "v2-lite", num, args.kv, pieces=args.pieces) for num in (2, 10))
    counts = [step.launches(rows) for step in (few, many)]
    names = sorted({*counts[0], *counts[1]})
    layer = {name: (counts[1].get(name, 0) - counts[0].get(name, 0)) / 8 for name in names}
    layer = {name: num for name, num in layer.items() if num}
    times = [step.ms(rows, args.repeats) for step in (few, many)]
    return {
        "step": f"{args.prefills} x {args.new} on {args.past}, {args.decodes} decode rows",
        "kv": args.kv,
        "pieces": args.pieces,
        "launches_a_layer": layer,
        "num_launches_a_layer": sum(n for name, n in layer.items() if "analysed" not in name),
        "host_us_a_layer": round((times[1] - times[0]) / 8 * 1e3, 1),
        "host_ms_27_layers": round(times[0] + (times[1] - times[0]) / 8 * 25, 2),
    }


def main() -> None:
    """Measure; one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--new", type=int, default=800)
    parser.add_argument("--past", type=int, default=65536)
    parser.add_argument("--prefills", type=int, default=1)
    parser.add_argument("--decodes", type=int, default=0)
    parser.add_argument("--kv", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--pieces", action="store_true", help="engine.prefill_graphs")
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    with stub_device() as launches:
        print(json.dumps(measure(args, launches)), flush=True)


if __name__ == "__main__":
    main()
