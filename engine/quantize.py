# SPDX-License-Identifier: Apache-2.0
"""Convert a checkpoint to a low-bit format: `python -m engine.quantize SRC DST --format nvfp4`.

SRC is a Hugging Face directory, plain or itself low-bit; DST, made or empty, becomes one that the
engine loads. Converted are the linear layers of the decoder; embeddings, output heads, norms,
routers and what joins the halves of a next-token-prediction layer stay as they are, and for 4-bit
formats kv_b_proj, which is used in absorbed form.
One JSON line per weight on stdout, a summary last; what goes wrong is one line on stderr, and
leaves nothing in DST. What a conversion left that was killed is removed by the next one there.
Exit codes: 0 done, 1 refused, 2 usage, 130 interrupted, 143 terminated.
Does not know: models (a name decides what is converted).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from engine.errors import ConfigError, EngineError
from engine.weights.claim import MARK, DirectoryClaim
from engine.weights.errors import UnsupportedModelError
from engine.weights.hf import HfWeights
from engine.weights.quant_config import quant_scheme, read_json_object
from engine.weights.quant_writer import (
    FORMATS,
    SHARD_BYTES,
    HeldTensors,
    ShardWriter,
    quantization_config,
    quantized_tensors,
)
from engine.weights.quantized import QuantizedWeights, open_hf_weights
from engine.weights.stored_formats import stored_format
from kernels.reference.quant import GROUP_OF_FORMAT

Reader = HfWeights | QuantizedWeights

_KEPT = (
    "*embed_tokens.weight",
    "lm_head.weight",
    "*.shared_head.head.weight",
    "*.eh_proj.weight",
    "*.mlp.gate.weight",
)
_KEPT_IN_4_BITS = ("*.kv_b_proj.weight",)
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
# What speaks of the source's own format, and of who wrote it.
_NOT_COPIED = ("config.json", "hf_quant_config.json", MARK)


class EndingSignals:
    """SIGINT and SIGTERM, as they end a conversion: by KeyboardInterrupt.

    What a handler raises inside of a library may come out of it as another error, or not at all;
    so whoever catches one asks `received`, and whoever goes on calls `check`.
    """

    def __init__(self) -> None:
        self.received = 0  # the signal's number

    def install(self) -> None:
        """Be the process's handler of both."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)

    @staticmethod
    def ignore() -> None:
        """To be called when nothing is left to end: a conversion that is done is not undone."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def check(self) -> None:
        """Raises KeyboardInterrupt once a signal came."""
        if self.received:
            raise KeyboardInterrupt

    def _end(self, number: int, _: FrameType | None) -> None:
        self.received = number
        raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None, signals: EndingSignals | None = None) -> int:
    """Run the command; returns the exit code."""
    signals = signals or EndingSignals()
    parser = argparse.ArgumentParser(prog="python -m engine.quantize", description=__doc__)
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("target", metavar="DST", type=Path)
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    try:
        arguments = parser.parse_args(argv)
        lines = quantize_checkpoint(
            arguments.source,
            arguments.target,
            arguments.format,
            exclude=arguments.exclude,
            device=torch.device(arguments.device),
        )
        with closing(lines):
            for line in lines:
                print(json.dumps(line), flush=True)
                signals.check()
    except (Exception, KeyboardInterrupt) as error:
        if signals.received or isinstance(error, KeyboardInterrupt):
            print("moorage quantize: interrupted", file=sys.stderr, flush=True)
            return 128 + (signals.received or signal.SIGINT)
        if not isinstance(error, (EngineError, OSError, RuntimeError)):
            raise
        print(f"moorage quantize: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def quantize_checkpoint(
    source: Path,
    target: Path,
    fmt: str,
    *,
    exclude: Sequence[str] = (),
    device: torch.device | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Generator[dict[str, Any], None, None]:
    """Convert a checkpoint; yields a report per converted weight, then the summary.

    Raises:
        ConfigError: SRC is no Hugging Face directory or has nothing to convert, DST is none or
            holds something, there is no such device, or a pattern excludes nothing.
        ModelError: SRC is damaged or of a kind we cannot read, or a weight does not fit `fmt`.
        OSError: DST cannot be written.
    """
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("quantize.device", str(device), "cpu, as torch finds no GPU")
    config = _source_config(source)
    _check_target(target)
    reader = open_hf_weights(source)
    for pattern in exclude:
        if not fnmatch.filter(reader.names, pattern):
            raise ConfigError("quantize.exclude", pattern, f"what a tensor of {source} is named")
    kept = [*_KEPT, *exclude] if fmt == "fp8" else [*_KEPT, *_KEPT_IN_4_BITS, *exclude]
    _check_tensors(reader)
    converted = _to_convert(reader, kept, fmt)
    if not converted:
        raise ConfigError("quantize.source", str(source), "a checkpoint with a weight to convert")
    plain = [name for name in reader.names if name not in converted]
    modules = sorted(name.removesuffix(".weight") for name in plain if name.endswith(".weight"))
    settings = quantization_config(fmt, modules)
    target.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(target, shard_bytes)
    try:
        writer.claim()
    except FileExistsError as error:
        allowed = f"a directory to which no other conversion writes ({error})"
        raise ConfigError("quantize.target", str(target), allowed) from error
    worst: dict[str, Any] = {"tensor": "", "rel_error": 0.0}
    try:
        for name in plain:
            writer.add({name: _plain_tensor(reader, name)})
        for name, shape in converted.items():
            weight = reader.dense(name, shape, torch.float32).to(device or "cpu")
            _check_finite(name, weight)
            tensors = quantized_tensors(name, weight, fmt)
            writer.add(tensors)
            report = _report(name, weight, tensors, settings)
            worst = max(worst, report, key=lambda item: float(item["rel_error"]))
            yield report
        writer.close()
        _write_texts(source, writer, {**config, "quantization_config": settings})
        writer.release()
    except BaseException:  # an interrupt, too
        writer.discard()
        raise
    yield {
        "summary": str(target),
        "format": fmt,
        "num_converted": len(converted),
        "num_plain": len(plain),
        "total_bytes": writer.total_bytes,
        "worst_tensor": worst["tensor"],
        "worst_rel_error": worst["rel_error"],
    }


def _source_config(source: Path) -> dict[str, Any]:
    if not (source / "config.json").is_file():
        raise ConfigError(
            "quantize.source", str(source), "a Hugging Face directory with config.json"
        )
    config = read_json_object(source / "config.json")
    scheme = quant_scheme(config, source)
    if scheme is not None and scheme.layout == "fused_mxfp4":
        raise ConfigError("quantize.source", str(source), "a checkpoint without fused experts")
    return config


def _check_target(target: Path) -> None:
    allowed = "a directory that is empty or not there"
    if not target.is_dir() and (target.exists() or target.is_symlink()):
        raise ConfigError("quantize.target", str(target), allowed)
    if target.is_dir() and not DirectoryClaim.is_free(target):
        raise ConfigError("quantize.target", str(target), allowed)


def _check_tensors(reader: Reader) -> None:
    """Every tensor is in its file, and a weight is of plain numbers or has all its parts: what a
    loader would refuse is named before anything is written."""
    for name in reader.names:
        shape = reader.shape(name)
        if name.endswith(".weight"):
            reader.check(name, shape)


def _check_finite(name: str, values: torch.Tensor, where: str = "") -> None:
    if not bool(torch.isfinite(values).all()):
        raise UnsupportedModelError(
            f"tensor {name!r}: found NaN or infinity{where}; supported: finite numbers "
            "(hint: --exclude takes a pattern of names)"
        )


def _to_convert(reader: Reader, kept: Sequence[str], fmt: str) -> dict[str, list[int]]:
    """Names and shapes of the weights to convert; checked before anything is written."""
    found: dict[str, list[int]] = {}
    group = 1 if fmt == "fp8" else GROUP_OF_FORMAT[fmt]
    for name in reader.names:
        if not name.endswith(".weight") or any(fnmatch.fnmatch(name, item) for item in kept):
            continue
        shape = reader.shape(name)
        if len(shape) != 2:
            continue
        if 0 in shape:
            raise UnsupportedModelError(
                f"tensor {name!r}: found shape {shape}; supported: at least one row and column"
            )
        if shape[1] % group:
            raise UnsupportedModelError(
                f"tensor {name!r}: {shape[1]} columns; supported with {fmt}: multiples of {group} "
                "(hint: --exclude takes a pattern of names)"
            )
        found[name] = shape
    return found


def _plain_tensor(reader: Reader, name: str) -> torch.Tensor:
    """The tensor as it is stored; one that is stored low-bit as bf16."""
    if reader.is_low_bit(name):
        return reader.dense(name, reader.shape(name), torch.bfloat16)
    return reader.raw(name)


def _report(
    name: str, weight: torch.Tensor, tensors: dict[str, torch.Tensor], settings: dict[str, Any]
) -> dict[str, Any]:
    """How far what a loader will read is from the source."""
    scheme = quant_scheme({"quantization_config": settings}, Path())
    assert scheme is not None, "settings of a low-bit format"
    held = HeldTensors(tensors)
    read = stored_format(scheme).dense(held, name, list(weight.shape)).to(weight.device)
    _check_finite(name, read, ", rounded to the format")
    difference = (read - weight).double()
    size = weight.double().norm().clamp_min(1e-30)
    return {
        "tensor": name,
        "shape": list(weight.shape),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "rel_error": float(difference.norm() / size),
        "max_error": float(difference.abs().max()),
    }


def _write_texts(source: Path, writer: ShardWriter, config: dict[str, Any]) -> None:
    """config.json last, and whole: a directory without it is no model."""
    for path in sorted(source.iterdir()):
        is_text = path.is_file() and not path.name.endswith(_WEIGHT_FILES)
        if is_text and path.name not in _NOT_COPIED:
            shutil.copyfile(path, writer.place(path.name))
    partial = writer.place("config.json.partial")
    partial.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    partial.rename(writer.place("config.json"))


if __name__ == "__main__":
    ending_signals = EndingSignals()
    ending_signals.install()
    exit_code = main(signals=ending_signals)
    ending_signals.ignore()
    sys.exit(exit_code)
