# SPDX-License-Identifier: Apache-2.0
"""The engine as a process: it comes up, drains, and says in one line why it cannot start."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from engine import api
from engine.client import EngineClient
from engine.config import EngineConfig, GrammarConfig
from tests.fakes.engine_process import REPOSITORY, EngineProcess
from tests.fakes.live_engine import Collected, make_request, run
from tests.fakes.tiny_deepseek import write_tiny_deepseek
from tests.fakes.tiny_model import byte_ids, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def make_config(model: Path, run_dir: Path, **settings: object) -> EngineConfig:
    config = EngineConfig(
        model=str(model),
        run_dir=str(run_dir),
        kv_pool_tokens=4096,
        page_size=16,
        num_threads=1,
        grammar=GrammarConfig(budget_ms=60_000),
    )
    return dataclasses.replace(config, **settings)  # type: ignore[arg-type]


def test_a_process_serves_alone_on_its_socket_drains_on_sigterm_and_leaves_nothing_behind(
    model: Path, tmp_path: Path
) -> None:
    async def main(engine: EngineProcess) -> None:
        client = EngineClient(engine.config.socket_path)
        await client.start()
        hello = await client.wait_ready(60)
        assert (hello.vocab_size, hello.max_context_len, hello.page_size) == (288, 1024, 16)
        code, said = EngineProcess(engine.config).start().wait()
        assert code == 1, "a second engine on the same socket"
        assert said.splitlines()[-1].startswith("moorage engine: another engine listens here")

        number = api.GrammarSpec(kind=api.GrammarKind.REGEX, text="[0-9]{4}")
        held = await run(client, make_request("held", byte_ids("12"), 20, grammar=number))
        assert held.finished is not None and held.finished.stop_token_id == 2
        assert len(held.ids) == 5

        long = make_request("long", byte_ids("abc"), 300, sampling={"ignore_eos": True})
        stream = client.generate(long)
        assert isinstance(await anext(stream), api.Started)
        engine.terminate()
        result = await asyncio.wait_for(Collected().read(stream), 60)
        assert len(result.ids) == 300, "a running request ends before the process does"
        await client.close()

    with EngineProcess(make_config(model, tmp_path)) as engine:
        asyncio.run(main(engine))
        code, said = engine.wait()
    assert code == 0, said
    assert "engine ready" in said and "engine stopped" in said
    assert not Path(engine.config.socket_path).exists()


def test_dummy_weights_are_served_without_a_tokenizer(tmp_path: Path) -> None:
    async def main(engine: EngineProcess) -> None:
        client = EngineClient(engine.config.socket_path)
        await client.start()
        hello = await client.wait_ready(60)
        assert hello.vocab_size == 300
        result = await run(client, make_request("ids", [5, 299, 7], 12))
        assert len(result.ids) == 12, "token ids in and out"
        await client.close()

    model = write_tiny_deepseek(tmp_path / "shape")
    with EngineProcess(make_config(model, tmp_path, load_format="dummy")) as engine:
        asyncio.run(main(engine))


def refusal(config_json: bytes) -> tuple[int, list[str]]:
    ran = subprocess.run(
        [sys.executable, "-m", "engine.process", "--config-json", "-"],
        cwd=REPOSITORY,
        input=config_json,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return ran.returncode, ran.stderr.decode().splitlines()


@pytest.mark.parametrize(
    ("config_json", "said"),
    [
        (b'{"model": "/no/such/model"}', "engine.model = '/no/such/model'"),
        (b'{"page_size": 7}', "engine.page_size = 7: allowed: a power of two"),
        (b'{"pagesize": 64}', "engine.pagesize = 64: allowed: one of"),
        (b"[]", "engine = []: allowed: a mapping"),
        (b"{", "a JSON object"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_1(config_json: bytes, said: str) -> None:
    code, lines = refusal(config_json)
    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith("moorage engine: ") and said in lines[0]


def test_a_damaged_model_is_one_line_and_exit_1(model: Path, tmp_path: Path) -> None:
    broken = write_tiny_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, lines = refusal(make_config(broken, tmp_path).to_json())
    assert code == 1
    assert lines[-1].startswith("moorage engine: ") and "model.safetensors" in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_a_run_dir_that_cannot_be_made_is_one_line_and_exit_1(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = make_config(model, tmp_path / "file" / "below")
    code, lines = refusal(config.to_json())
    assert code == 1
    assert lines[-1].startswith("moorage engine: ") and "below" in lines[-1]


def test_the_configuration_is_read_without_loading_torch() -> None:
    program = (
        "import sys, engine.config, engine.client, engine.process; "
        "print(sorted(m for m in ('torch', 'xgrammar', 'transformers') if m in sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, check=True
    )
    assert ran.stdout.strip() == b"[]"
