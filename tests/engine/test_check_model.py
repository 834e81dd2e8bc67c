# SPDX-License-Identifier: Apache-2.0
"""`python -m engine.check_model` says what an engine would stumble over, and reads no tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.check_model import main
from engine.config import EngineConfig
from engine.execution.model_loading import check_model
from engine.weights.hf import HfWeights
from tests.fakes.tiny_deepseek import write_tiny_deepseek
from tests.fakes.tiny_model import write_tiny_model


def _told(capsys: pytest.CaptureFixture[str], tmp_path: Path, status: int, **settings: Any) -> str:
    path = tmp_path / "engine.json"
    path.write_bytes(EngineConfig(device="cpu", **settings).to_json())
    assert main(["--config-json", str(path)]) == status
    return capsys.readouterr().out


def test_nothing_is_said_of_what_can_be_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    dummy = write_tiny_deepseek(tmp_path / "dummy")
    assert _told(capsys, tmp_path, 0) == ""
    assert _told(capsys, tmp_path, 0, model=str(dummy), load_format="dummy") == ""


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({"topk_method": "x"}, {}, "topk_method is 'x'; supported: greedy"),
        ({"vocab_size": "many"}, {}, "vocab_size is 'many'; allowed: a whole number"),
        ({}, {"kv_dtype": "fp8"}, "engine.kv_dtype = 'fp8'"),
        ({}, {"kernels": "argmax=none"}, "engine.kernels = 'argmax=none'"),
        ({}, {"max_context_len": 4096}, "engine.max_context_len = 4096"),
        ({}, {"load_format": "auto"}, "tokenizer.json"),
    ],
)
def test_what_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    changes: dict[str, Any],
    settings: dict[str, Any],
    said: str,
) -> None:
    model = write_tiny_deepseek(tmp_path / "model", **changes)
    told = _told(capsys, tmp_path, 1, **{"model": str(model), "load_format": "dummy", **settings})
    assert said in told and told.count("\n") == 1


class UnreadableWeights(HfWeights):
    """Knows names, shapes and dtypes."""

    def raw(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")


def test_a_tensor_that_does_not_fit_is_named_and_none_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "model")
    monkeypatch.setattr(HfWeights, "raw", UnreadableWeights.raw)
    check_model(EngineConfig(model=str(model), device="cpu"))
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("1.mlp.up_proj.weight"))
    save_file({**tensors, name: tensors[name][1:].contiguous()}, file)
    told = _told(capsys, tmp_path, 1, model=str(model))
    assert f"tensor '{name}': found shape" in told
    save_file({**tensors, name: tensors[name].to(torch.int8)}, file)
    assert f"tensor '{name}': found torch.int8" in _told(capsys, tmp_path, 1, model=str(model))
    del tensors[name]
    save_file(tensors, file)
    assert f"tensor '{name}': found none" in _told(capsys, tmp_path, 1, model=str(model))
