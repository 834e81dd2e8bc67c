# SPDX-License-Identifier: Apache-2.0
"""`moorage quantize` runs the converter and hands on its status."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file


def run(*arguments: str, directory: pathlib.Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance", "quantize", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=directory)


def write_checkpoint(directory: pathlib.Path) -> pathlib.Path:
    directory.mkdir()
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (directory / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    weight = torch.randn(64, 128, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({name: weight}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("weight_format", ["nvfp4", "fp8"])
def test_a_checkpoint_is_converted_and_its_error_reported(
    tmp_path: pathlib.Path, weight_format: str
) -> None:
    source, target = write_checkpoint(tmp_path / "a"), tmp_path / "b"
    result = run(str(source), str(target), "--format", weight_format)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert any("up_proj" in json.dumps(line) for line in lines)
    stored = sum(t.numel() * t.element_size() for f in target.glob("*.safetensors")
                 for t in load_file(f).values())  # fmt: skip
    assert stored < 64 * 128 * 2 * 0.6


def test_arguments_that_look_like_options_are_none(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path / "-a")
    arguments = ("--format", "fp8", "--", "-a", "--b")
    result = run(*arguments, directory=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "--b/config.json").exists()
    result = run("--exclude", "-x", *arguments[:-1], "--c", directory=tmp_path)
    assert result.returncode == 1
    assert "quantize.exclude = '-x'" in result.stderr


def test_a_missing_source_is_a_usage_error(tmp_path: pathlib.Path) -> None:
    result = run(str(tmp_path / "none"), str(tmp_path / "b"), "--format", "fp8")
    assert result.returncode == 2
    assert "none" in result.stderr
