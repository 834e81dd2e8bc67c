# SPDX-License-Identifier: Apache-2.0
"""What it is worth that GGUF blocks stay packed on a CPU: a Qwen2.5-0.5B shape of random blocks of
one format, run with its weights packed and expanded to bf16.

Each way runs in a process of its own. One JSON line a format and way; alone on the machine:

    python -m benchmarks.packed_blocks --formats Q4_0 Q5_0
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 24, 896, 4864, 14, 2, 64, 151936
PROMPT_TOKENS, DECODE_STEPS, ROUNDS = 512, 20, 5


def write_model(path: Path, format_name: str) -> None:
    """A file whose blocks are random codes under equal scales."""
    kind = gguf.GGMLQuantizationType[format_name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(LAYERS)
    writer.add_context_length(32768)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(VOCAB)

    def matrix(name: str, rows: int, cols: int) -> None:
        blocks = random.integers(0, 256, (rows * cols // values, size), dtype=np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=kind)

    matrix("token_embd", VOCAB, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    widths = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    for layer in range(LAYERS):
        name = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{name}.{norm}.weight", np.ones(HIDDEN, np.float32))
        for part, width in widths.items():
            matrix(f"{name}.attn_{part}", width, HIDDEN)
            writer.add_tensor(f"{name}.attn_{part}.bias", np.zeros(width, np.float32))
        matrix(f"{name}.attn_output", HIDDEN, widths["q"])
        matrix(f"{name}.ffn_gate", FFN, HIDDEN)
        matrix(f"{name}.ffn_up", FFN, HIDDEN)
        matrix(f"{name}.ffn_down", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(path: Path, weights: str) -> dict[str, float]:
    """Load, prefill and decode with the engine's runner, one row, no scheduler."""
    from engine.config import EngineConfig
    from engine.execution.model_runner import build_model_runner
    from tests.fakes.paged_driver import PagedDriver

    config = EngineConfig(
        model=str(path), weights=weights, dtype="bfloat16", kv_pool_tokens=4096,
        max_context_len=2048, max_slots=4,
    )  # fmt: skip
    start = time.perf_counter()
    driver = PagedDriver(build_model_runner(config))
    load_s = time.perf_counter() - start
    row = driver.open(0)
    ids = [37 * i % 1000 for i in range(PROMPT_TOKENS)]
    driver.step([(row, ids[:16])])  # repacks for the kernels
    start = time.perf_counter()
    driver.step([(row, ids[16:])])
    prefill_s = time.perf_counter() - start
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(DECODE_STEPS):
            driver.step([(row, [5])])
        rounds.append((time.perf_counter() - start) / DECODE_STEPS)
    return {
        "load_s": round(load_s, 1),
        "prefill_tok_s": round((PROMPT_TOKENS - 16) / prefill_s),
        "decode_tok_s": round(1 / sorted(rounds)[ROUNDS // 2], 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["Q4_0"])
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(Path(options.measure[0]), options.measure[1])))
        return
    for format_name in options.formats:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.gguf"
            write_model(path, format_name)
            for weights in ("packed", "dequantized"):
                command = [sys.executable, "-m", "benchmarks.packed_blocks", "--measure"]
                done = subprocess.run(
                    [*command, str(path), weights], check=True, stdout=subprocess.PIPE
                )
                found = json.loads(done.stdout)
                print(json.dumps({"format": format_name, "weights": weights, **found}), flush=True)


if __name__ == "__main__":
    main()
