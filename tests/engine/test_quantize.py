# SPDX-License-Identifier: Apache-2.0
"""`python -m engine.quantize`: what it writes loads again, as its report says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.model_runner import build_model_runner
from engine.models.deepseek import DeepseekForCausalLM
from engine.models.deepseek_config import deepseek_config_from_hf
from engine.models.model import LoadOptions, StepRows
from engine.quantize import main, quantize_checkpoint
from engine.weights.errors import UnsupportedModelError
from engine.weights.quantized import QuantizedWeights, open_hf_weights
from tests.fakes.paged_driver import PagedDriver
from tests.fakes.tiny_model import write_tiny_model

FORMATS = ("nvfp4", "mxfp4", "mxint4", "fp8")
_CONFIG: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 128,
}
# Standard normal weights; half a step of the format, over the group's scale, bounds the error.
_ERRORS = {
    "nvfp4": (0.06, 0.12),
    "mxfp4": (0.08, 0.17),
    "mxint4": (0.08, 0.17),
    "fp8": (0.01, 0.04),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    torch.manual_seed(5)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**_CONFIG))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.1)
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="40KB")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def _logits(directory: Path) -> torch.Tensor:
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        num_threads=1,
        page_size=16,
        kv_pool_tokens=256,
        max_context_len=128,
    )
    driver = PagedDriver(build_model_runner(config))
    row = driver.open(0)
    return driver.step([(row, list(range(40)))])[0]


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_written_loads_and_is_what_the_report_says(
    source: Path, tmp_path: Path, fmt: str
) -> None:
    target = tmp_path / "out"
    *reports, summary = quantize_checkpoint(source, target, fmt, shard_bytes=30_000)
    reader, plain = open_hf_weights(target), open_hf_weights(source)
    assert isinstance(reader, QuantizedWeights)
    assert reader.names == plain.names
    low, high = _ERRORS[fmt]
    decoded = {}
    for name in plain.names:
        shape = plain.shape(name)
        before, after = (r.dense(name, shape, torch.float32) for r in (plain, reader))
        decoded[name] = after
        error = float((after - before).norm() / before.norm().clamp_min(1e-9))
        report = next((r for r in reports if r["tensor"] == name), None)
        if report is None:
            assert torch.equal(after, before), name
        else:
            assert report["rel_error"] == pytest.approx(error, rel=1e-4)
            assert low < error < high, name
    assert summary["num_converted"] == len(reports) > 20
    assert summary["num_converted"] + summary["num_plain"] == len(plain.names)
    assert len(list(target.glob("*.safetensors"))) > 1
    assert (target / "tokenizer.json").exists()
    # The engine computes with exactly the values the layout stands for.
    expanded = tmp_path / "expanded"
    expanded.mkdir()
    (expanded / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(decoded, expanded / "model.safetensors")
    assert torch.equal(_logits(target), _logits(expanded))


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_routers_heads_and_norms_stay_plain(source: Path, tmp_path: Path, fmt: str) -> None:
    reports = list(quantize_checkpoint(source, tmp_path / "out", fmt))[:-1]
    converted = {report["tensor"] for report in reports}
    kept = ("lm_head", "embed_tokens", "mlp.gate.weight", "norm", "correction_bias")
    assert not [name for name in converted if any(part in name for part in kept)]
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in converted
    assert any("kv_b_proj" in name for name in converted) == (fmt == "fp8")
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    listed = settings.get("ignore") or settings["modules_to_not_convert"]
    assert "lm_head" in listed and "model.layers.1.mlp.gate" in listed


def test_an_fp8_checkpoint_can_become_nvfp4(source: Path, tmp_path: Path) -> None:
    list(quantize_checkpoint(source, tmp_path / "fp8", "fp8"))
    *_, summary = quantize_checkpoint(tmp_path / "fp8", tmp_path / "nvfp4", "nvfp4")
    assert 0.06 < summary["worst_rel_error"] < 0.13
    stored = {}
    for file in (tmp_path / "nvfp4").glob("*.safetensors"):
        stored |= load_file(file)
    # Kept plain, hence no longer in the source's fp8.
    assert stored["model.layers.0.self_attn.kv_b_proj.weight"].dtype == torch.bfloat16
    assert not [name for name in stored if name.endswith("scale_inv")]
    assert bool(torch.isfinite(_logits(tmp_path / "nvfp4")).all())


def test_a_llama_checkpoint_is_converted_too(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "llama")
    list(quantize_checkpoint(source, tmp_path / "out", "nvfp4"))
    before, after = _logits(source), _logits(tmp_path / "out")
    assert not torch.equal(before, after)
    assert torch.nn.functional.cosine_similarity(before, after, dim=0) > 0.5


def test_the_command_prints_a_json_line_per_weight(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.quantize", str(source), str(tmp_path / "out")]
    result = subprocess.run(
        [*command, "--format", "mxfp4", "--exclude", "*shared_experts*"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[-1]["format"] == "mxfp4"
    assert not [line for line in lines[:-1] if "shared_experts" in line["tensor"]]
    assert all(line["bytes"] and line["max_error"] > 0 for line in lines[:-1])


def test_wrong_arguments_are_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none"), str(tmp_path / "out"), "--format", "fp8"]) == 1
    assert "a Hugging Face directory" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"quantize\.target"):
        list(quantize_checkpoint(source, source, "fp8"))
    for wrong in (["--format", "int2"], ["--format", "fp8", "--device", "tpu"]):
        with pytest.raises(SystemExit) as caught:
            main([str(source), str(tmp_path / "out"), *wrong])
        assert caught.value.code == 2


def test_a_pattern_that_excludes_nothing_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantize\.exclude = '\*lm_haed\*'"):
        list(quantize_checkpoint(source, tmp_path / "out", "fp8", exclude=["*lm_haed*"]))
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named_before_anything_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), str(tmp_path / "out"), "--format", "fp8", "--device", "cuda"]) == 1
    assert "quantize.device = 'cuda': allowed: cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_weight_that_does_not_divide_is_named_before_anything_is_written(tmp_path: Path) -> None:
    source = tmp_path / "odd"
    config = DeepseekV3Config(**{**_CONFIG, "moe_intermediate_size": 40})
    DeepseekV3ForCausalLM(config).save_pretrained(source)
    with pytest.raises(UnsupportedModelError, match=r"down_proj.*40 columns.*multiples of 32"):
        list(quantize_checkpoint(source, tmp_path / "out", "mxfp4"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxint4"])
def test_experts_kept_in_four_bits_compute_what_their_values_say(tmp_path: Path, fmt: str) -> None:
    """The form GPU kernels take, run through the reference: tiles hold the same numbers."""
    source = tmp_path / "plain"
    torch.manual_seed(6)
    config = DeepseekV3Config(**{**_CONFIG, "moe_intermediate_size": 64})
    DeepseekV3ForCausalLM(config).save_pretrained(source)
    list(quantize_checkpoint(source, tmp_path / "out", fmt))
    sizes = deepseek_config_from_hf(tmp_path / "out")
    logits = []
    for keep_packed in (False, True):
        options = LoadOptions(
            dtype=torch.float32, keep_packed=keep_packed, max_positions=128, max_rows=2
        )
        model = DeepseekForCausalLM.load(sizes, open_hf_weights(tmp_path / "out"), options)
        pool = torch.zeros(model.kv_layout(64, "float32").pool_shape(1))
        num = 20
        where, slot = torch.arange(num, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        rows = StepRows(
            positions=where,
            slot_mapping=where,
            row_indptr=torch.tensor([0, num], dtype=torch.int32),
            row_slots=slot,
            seq_lens=slot + num,
            page_table=slot[None],
            page_size=64,
            num_prefill_rows=1,
            num_prefill_tokens=num,
        )
        with torch.no_grad():
            logits.append(model.forward(where, rows, pool, slot))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
