# SPDX-License-Identifier: Apache-2.0
"""`python -m engine.quantize`: what it cannot convert is named, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.quantize
from engine.quantize import EndingSignals, main, quantize_checkpoint
from engine.weights.claim import MARK
from engine.weights.quant_writer import ShardWriter

INDEX = "model.safetensors.index.json"
FORMATS = ("nvfp4", "mxfp4", "mxint4", "fp8")
_ATTENTION = "model.layers.0.self_attn"
_QUERY = f"{_ATTENTION}.q_proj.weight"
Tensors = dict[str, torch.Tensor]


def _tensors() -> Tensors:
    names = [f"{_ATTENTION}.{part}_proj.weight" for part in ("kv_b", "o", "q")]
    generator = torch.Generator().manual_seed(2)
    found = {name: torch.randn(64, 64, generator=generator).bfloat16() for name in names}
    return {**found, "model.norm.weight": torch.ones(64).bfloat16()}


def _source(directory: Path, tensors: Tensors) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    return directory


def _refused(source: Path, target: Path, fmt: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(source), str(target), "--format", fmt]) == 1
    printed = capsys.readouterr()
    assert "NaN" not in printed.out and '"summary"' not in printed.out
    assert len(printed.err.splitlines()) == 1
    assert not target.exists() or not any(target.iterdir())
    return printed.err


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_holds_no_finite_numbers_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fmt: str, value: float
) -> None:
    """Not rounded to a number of the format, nor written with NaN as its error."""
    tensors = _tensors()
    tensors[_QUERY][5, 7] = value
    said = _refused(_source(tmp_path / "source", tensors), tmp_path / "out", fmt, capsys)
    assert f"{_QUERY!r}: found NaN or infinity; supported: finite numbers" in said


@pytest.mark.parametrize("fmt", ["mxfp4", "mxint4"])
def test_a_number_that_the_format_rounds_to_infinity_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fmt: str
) -> None:
    tensors = {**_tensors(), _QUERY: torch.full((64, 64), 3e38)}
    said = _refused(_source(tmp_path / "source", tensors), tmp_path / "out", fmt, capsys)
    assert f"{_QUERY!r}: found NaN or infinity, rounded to the format" in said


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (_QUERY, torch.zeros(64, 64, dtype=torch.int8), "found torch.int8, expected torch.bfloat"),
        # Kept as it is in 4 bits, and yet no plain numbers.
        (
            f"{_ATTENTION}.kv_b_proj.weight",
            torch.ones(64, 64).to(torch.float8_e4m3fn),
            "found torch.float8_e4m3fn, expected torch.bfloat16",
        ),
        (_QUERY, torch.zeros(0, 64), "found shape [0, 64]; supported: at least one row"),
        (_QUERY, torch.zeros(64, 0), "found shape [64, 0]; supported: at least one row"),
    ],
)
def test_what_no_loader_would_take_is_named_before_anything_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    tensor: torch.Tensor,
    said: str,
) -> None:
    source = _source(tmp_path / "source", {**_tensors(), name: tensor})
    assert f"{name!r}: {said}" in _refused(source, tmp_path / "out", "nvfp4", capsys)
    assert not (tmp_path / "out").exists()


def _without(part: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if name != part}

    return change


@pytest.mark.parametrize(
    ("fmt", "change", "said"),
    [
        ("nvfp4", _without(f"{_QUERY}_scale_2"), "q_proj.weight_scale_2': found none"),
        ("nvfp4", _without(f"{_QUERY}_scale"), "q_proj.weight': found torch.uint8"),
        ("nvfp4", _without(_QUERY), "q_proj.weight': found none"),
        ("nvfp4", lambda t: {**t, _QUERY: t[_QUERY].flatten()}, "found shape [2048], expected two"),
        ("mxfp4", _without(f"{_QUERY}_packed"), "q_proj.weight_packed': found none"),
        ("mxfp4", _without(f"{_QUERY}_scale"), "q_proj.weight_scale': found none"),
        ("mxint4", _without(f"{_QUERY}_scale"), "q_proj.weight_scale': found none"),
        ("fp8", _without(f"{_QUERY}_scale_inv"), "q_proj.weight': found torch.float8_e4m3fn"),
        (
            "fp8",
            lambda t: {**t, _QUERY: torch.ones(4096).to(torch.float8_e4m3fn)},
            "found shape [4096], expected two axes",
        ),
    ],
)
def test_a_damaged_low_bit_source_is_named_before_anything_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fmt: str,
    change: Callable[[Tensors], Tensors],
    said: str,
) -> None:
    plain, source = _source(tmp_path / "plain", _tensors()), tmp_path / "low"
    list(quantize_checkpoint(plain, source, fmt))
    (source / "model.safetensors.index.json").unlink()
    file = source / "model-00001-of-00001.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file)
    other = "nvfp4" if fmt == "fp8" else "fp8"
    assert said in _refused(source, tmp_path / "out", other, capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["file", "link to nothing", "holds something"])
def test_a_target_that_cannot_be_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    source, target = _source(tmp_path / "source", _tensors()), tmp_path / "out"
    if kind == "file":
        target.write_text("mine")
    elif kind == "link to nothing":
        target.symlink_to(tmp_path / "nothing")
    else:
        target.mkdir()
        (target / "mine").touch()
    assert main([str(source), str(target), "--format", "fp8"]) == 1
    said = "quantize.target = '{}': allowed: a directory that is empty or not there"
    assert said.format(target) in capsys.readouterr().err
    assert kind != "holds something" or [path.name for path in target.iterdir()] == ["mine"]


def test_a_source_with_nothing_to_convert_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _source(tmp_path / "source", {"model.norm.weight": torch.ones(64)})
    assert "a weight to convert" in _refused(source, tmp_path / "out", "fp8", capsys)


def test_whoever_stops_in_the_midst_leaves_nothing(tmp_path: Path) -> None:
    source, target = _source(tmp_path / "source", _tensors()), tmp_path / "out"
    for num_reports in (1, 2):
        lines = quantize_checkpoint(source, target, "nvfp4", shard_bytes=1000)
        for _ in range(num_reports):
            next(lines)
        assert any(target.iterdir())
        lines.close()  # type: ignore[attr-defined]
        assert not any(target.iterdir())
    assert "summary" in [*quantize_checkpoint(source, target, "nvfp4")][-1]


def test_a_target_that_another_conversion_writes_to_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before its first shard is there."""
    source, target = _source(tmp_path / "source", _tensors()), tmp_path / "out"
    lines = quantize_checkpoint(source, target, "nvfp4")
    next(lines)
    assert main([str(source), str(target), "--format", "fp8"]) == 1
    assert "quantize.target" in capsys.readouterr().err
    list(lines)
    settings = json.loads((target / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "modelopt"
    assert not list(target.glob("*.partial"))


def test_what_a_killed_conversion_left_is_removed_by_the_next(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(1, 16) for i in range(2000)}
    source, target = _source(tmp_path / "source", tensors), tmp_path / "out"
    (source / MARK).write_text("of the source")
    code = (
        "import sys; from pathlib import Path; from engine.quantize import quantize_checkpoint\n"
        "for line in quantize_checkpoint(*map(Path, sys.argv[1:]), 'fp8', shard_bytes=1000):\n"
        "    print(line, flush=True)"
    )
    command = [sys.executable, "-c", code, str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while len(list(target.glob("shard-*.partial"))) < 2:
            assert process.stdout.readline()
        process.kill()
        process.stdout.read()
    assert len(list(target.iterdir())) > 2
    assert main([str(source), str(target), "--format", "nvfp4"]) == 0
    names = sorted(path.name for path in target.iterdir())
    assert names == ["config.json", "model-00001-of-00001.safetensors", INDEX]


def _no_locks(*arguments: object) -> None:
    raise OSError(errno.ENOLCK, "no locks")


@pytest.mark.parametrize("locks", [True, False])
def test_a_mark_beside_files_of_others_removes_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """Nor where the file system cannot say whether who left the mark still lives."""
    if not locks:
        monkeypatch.setattr("fcntl.flock", _no_locks)
    (tmp_path / MARK).write_text("shard-00000.partial\nmodel.safetensors\n")
    (tmp_path / "shard-00000.partial").touch()
    if locks:
        (tmp_path / "mine").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError):
        ShardWriter(tmp_path).claim()
    assert sorted(tmp_path.iterdir()) == before


def test_without_locks_a_directory_is_claimed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", _no_locks)
    test_two_conversions_that_start_at_once_do_not_share_a_target(tmp_path)


def test_two_conversions_that_start_at_once_do_not_share_a_target(tmp_path: Path) -> None:
    first, second = (ShardWriter(tmp_path) for _ in range(2))
    first.claim()
    with pytest.raises(FileExistsError):
        second.claim()
    second.discard()
    first.release()
    assert not any(tmp_path.iterdir())


def test_a_conversion_that_is_terminated_ends_and_leaves_nothing(tmp_path: Path) -> None:
    """By the id of `moorage quantize`. Nobody reads its lines: it cannot come to its end."""
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(1, 16) for i in range(2000)}
    source, target = _source(tmp_path / "source", tensors), tmp_path / "out"
    command = [sys.executable, "-m", "appliance", "quantize", str(source), str(target)]
    with subprocess.Popen([*command, "--format", "nvfp4"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b'{"tensor"')
        process.terminate()
        rest = process.stdout.read()
    assert process.returncode == 143
    assert b"summary" not in rest
    assert not any(target.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("becomes", [KeyboardInterrupt, ValueError, RuntimeError, None])
def test_a_signal_ends_it_whatever_a_library_makes_of_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    becomes: type[BaseException] | None,
    number: signal.Signals,
) -> None:
    """A handler runs also inside of torch and safetensors, which may raise another error for what
    it raised, or none."""
    source, target = _source(tmp_path / "source", _tensors()), tmp_path / "out"
    convert = engine.quantize.quantized_tensors

    def interrupted(name: str, weight: torch.Tensor, fmt: str) -> Tensors:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            if becomes is not None:
                raise becomes("of the library") from None
        return convert(name, weight, fmt)

    monkeypatch.setattr(engine.quantize, "quantized_tensors", interrupted)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        signals = EndingSignals()
        signals.install()
        assert main([str(source), str(target), "--format", "fp8"], signals) == 128 + number
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    printed = capsys.readouterr()
    assert printed.err == "moorage quantize: interrupted\n" and "summary" not in printed.out
    assert not any(target.iterdir())


def test_an_interrupt_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the texts are written, when all shards have their names."""
    source, target = _source(tmp_path / "source", _tensors()), tmp_path / "out"

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    (source / "tokenizer.json").write_text("{}")
    for where in ("engine.quantize.quantized_tensors", "shutil.copyfile"):
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupted)
            assert main([str(source), str(target), "--format", "fp8"]) == 130
        assert capsys.readouterr().err == "moorage quantize: interrupted\n"
        assert not any(target.iterdir())


@pytest.mark.parametrize("where", ["ShardWriter.release", "DirectoryClaim.release"])
def test_an_interrupt_at_the_very_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """When config.json has its name, before the mark is gone and behind that."""
    source, target = _source(tmp_path / "source", _tensors()), tmp_path / "out"
    unlink = Path.unlink

    def before(*arguments: object) -> None:
        raise KeyboardInterrupt

    def behind(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.name == MARK:
            monkeypatch.setattr(Path, "unlink", unlink)
            raise KeyboardInterrupt

    if where == "ShardWriter.release":
        monkeypatch.setattr(ShardWriter, "release", before)
    else:
        monkeypatch.setattr(Path, "unlink", behind)
    assert main([str(source), str(target), "--format", "fp8"]) == 130
    assert not any(target.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_behind_its_end_changes_nothing(tmp_path: Path, number: signal.Signals) -> None:
    source, target = _source(tmp_path / "source", _tensors()), tmp_path / "out"
    code = (
        "import atexit, runpy, signal, sys\n"
        f"atexit.register(signal.raise_signal, {int(number)})\n"
        "runpy.run_module('engine.quantize', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", code, str(source), str(target), "--format", "fp8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "summary" in done.stdout.splitlines()[-1]


def test_who_may_not_claim_a_directory_leaves_no_mark(tmp_path: Path) -> None:
    """As where another conversion came to its end there since it was looked at."""
    (tmp_path / "config.json").touch()
    with pytest.raises(FileExistsError, match="no writer of ours"):
        ShardWriter(tmp_path).claim()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_disk_without_room_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source, target = _source(tmp_path / "source", _tensors()), tmp_path / "out"

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command = [sys.executable, "-m", "engine.quantize", str(source), str(target)]
    done = subprocess.run(
        [*command, "--format", "nvfp4"],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=no_room,
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not any(target.iterdir())


@pytest.mark.parametrize("fmt", FORMATS)
def test_next_token_layers_keep_their_heads_and_what_joins_their_halves(
    tmp_path: Path, fmt: str
) -> None:
    """As published checkpoints have them: other engines read them plain."""
    kept = [f"model.layers.1.{name}.weight" for name in ("eh_proj", "shared_head.head")]
    tensors = {**_tensors(), **{name: torch.randn(64, 128).bfloat16() for name in kept}}
    source, target = _source(tmp_path / "source", tensors), tmp_path / "out"
    list(quantize_checkpoint(source, target, fmt))
    stored = load_file(target / "model-00001-of-00001.safetensors")
    for name in kept:
        assert torch.equal(stored[name], tensors[name])
    settings = json.loads((target / "config.json").read_text())["quantization_config"]
    listed = settings.get("ignore") or settings["modules_to_not_convert"]
    assert {name.removesuffix(".weight") for name in kept} <= set(listed)
