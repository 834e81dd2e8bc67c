# SPDX-License-Identifier: Apache-2.0
"""The loads of `engine_soak` on a real model: what a GPU's kernels, graphs and copies make of them.

    python -m benchmarks.soak.model_soak [--minutes 5] [--seed 0] [--runs N] [--dump DIR]
                                         [--device cuda] [--usual]

A small DeepSeek model of random weights, made so that every page of a history shows in its logits.
Expected is what the same weights say of one request alone: from nothing, its prompt in one step,
then token by token, without graphs. With `engine.deterministic` (the default here) every token,
ending and logprob is held against that. With `--usual` the engine runs as it serves, with drawn
formats of weights and KV, graphs, drafts and steps in pieces; rounding may choose another token
there, so each greedy token must be near the best of its own history. On a CPU it is the GPU's
launcher over plain kernels. Does not know how the engine does any of it.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.soak.engine_soak import VOCAB, Run, Setting, Talk, seeds_of, soak, soak_options
from engine import api
from engine.config import EngineConfig
from engine.execution.device_runner import DeviceModelRunner
from engine.execution.model_runner import build_model_runner
from engine.execution.steps import Step
from engine.loop.event_loop import RunAhead
from engine.loop.server import EngineServer
from engine.weights.quant_writer import quantization_config
from kvtiers.layout import KvLayout
from kvtiers.transfer import Move
from tests.fakes.device_runner import device_runner
from tests.fakes.flight_watch import FlightWatch
from tests.fakes.live_engine import Collected
from tests.fakes.paged_driver import PagedDriver, Row
from tests.fakes.plain_loop import Answer
from tests.fakes.tiny_deepseek import GPU_SHAPE, write_tiny_deepseek

# How much louder latents are than random weights make them: without it a token's own embedding
# decides what follows, and a wrong page would change no token.
LOUDER = 6.0
# A token that rounding chose is this near the best one, in deviations of the logits; one that a
# wrong history chose is two or three away.
NEAR = 0.5
FAR_SHARE = 0.01  # an expert's choice may tip, and all behind it


class ModelSetting(Setting):
    """What one run's engines are: sizes that a GPU's kernels take, no faults of the model."""

    def __init__(self, seed: int, overlap_loads: bool, device: str, is_usual: bool) -> None:
        super().__init__(seed, overlap_loads)
        rng = random.Random(seed + 9)
        self.device = device
        self.is_usual = is_usual
        self.page_size = 64 if device == "cuda" else 16
        # On a GPU long ones too: of some thousand tokens on kernels read otherwise.
        self.max_context_len = self.page_size * rng.choice(
            [4, 8, 16, 16, 64, 128] if device == "cuda" else [4, 8, 16]
        )
        num_needed = self.max_context_len // self.page_size
        self.num_pages = num_needed + rng.choice([1, 4, 16, 64])
        self.most_tokens = self.max_context_len
        self.max_slots = rng.choice([1, 3, 6, 17])
        budgets = [24, 64, 256] if self.max_context_len <= 1024 else [256, 1024]
        self.token_budget = max(rng.choice(budgets), self.max_slots)
        self.lone_token_budget = rng.choice([0, 0, self.max_context_len])
        self.num_l2_pages = rng.choice([0, 4, num_needed, 64])
        self.most_stem = self.max_context_len * 3 // 4
        self.most_new = rng.choice([8, 40, 120]) if device == "cuda" else rng.choice([8, 24])
        self.grammar_budget_ms = 60_000  # the reference compiles kernels beside it
        self.nan_one_in = 0
        self.failing_steps = set()
        self.run_ahead = rng.choice([RunAhead(), RunAhead(tokens=8, ms=1, timed_tokens=16)])
        self.num_restarts = min(self.num_restarts, 1)
        self.num_talks *= 3 if device == "cuda" else 1
        self.weights = rng.choice(["bf16", "nvfp4", "mxfp4", "mxint4"]) if is_usual else "bf16"
        self.kv_dtype = rng.choice(["auto", "fp8"]) if is_usual else "auto"
        self.dtype = "bfloat16" if is_usual else rng.choice(["float32", "bfloat16"])
        self.prefill_graphs = rng.random() < 0.7
        if device == "cpu":
            self.weights, self.kv_dtype, self.dtype = "bf16", "auto", "float32"


class Alone:
    """Logits behind a history, of one row that has the model to itself.

    A process is made for one engine: its kernels share counters and plans by device, in the order
    of one stream. So under `lock` no step begins, and what is under way is waited for.
    """

    def __init__(self, runner: Any, lock: threading.Lock) -> None:
        self._lock = lock
        self._driver = PagedDriver(runner)
        self._row: Row | None = None
        self._logits = torch.empty(0)  # behind the row's last token

    def __call__(self, history: Sequence[int]) -> torch.Tensor:
        row, driver = self._row, self._driver
        ids = [int(token) for token in history]
        if row is not None and ids == row.token_ids:
            return self._logits
        if row is None or len(ids) <= row.num_done or ids[: row.num_done] != row.token_ids:
            if row is not None:
                driver.free_pages += row.pages
            row = self._row = driver.open(0)
        with self._lock:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._logits = driver.step([(row, ids[row.num_done :])])[0]
        return self._logits


class ModelWatch(FlightWatch):
    """Pages are KV, whose bytes say nothing of themselves."""

    def _check_bytes(self, move: Move) -> None:
        pass


class ModelRun(Run):
    """One seeded run on a model."""

    setting: ModelSetting

    def __init__(self, seed: int, directory: Path, device: str, is_usual: bool) -> None:
        self._device, self._is_usual = device, is_usual
        self.directory_of_model = directory / "model"
        self.gaps: list[float] = []
        super().__init__(seed, directory, False)

    def _make_setting(self, seed: int, overlap_loads: bool) -> ModelSetting:
        setting = ModelSetting(seed, overlap_loads, self._device, self._is_usual)
        sizes = GPU_SHAPE if self._device == "cuda" else {}
        changes = {**sizes, "vocab_size": VOCAB, "max_position_embeddings": 8192}
        if setting.speculation == "mtp":
            changes["num_nextn_predict_layers"] = 1
        if setting.weights != "bf16":
            changes["quantization_config"] = quantization_config(setting.weights, [])
        write_tiny_deepseek(self.directory_of_model, **changes)
        return setting

    def _make_script(self) -> Alone:
        setting = self.setting
        most = setting.max_context_len
        self._alone = self._build(eager=True, max_slots=1, token_budget=most, num_pages=0)
        self._lock = threading.Lock()
        return Alone(self._alone, self._lock)

    def _make_layout(self) -> KvLayout:
        return self._alone.layout

    @property
    def _store_bytes(self) -> int:
        return 64 * self.layout.page_bytes

    def _make_talk(self, number: int) -> Talk:
        return NearTalk(self, number) if self.setting.is_usual else ExactTalk(self, number)

    def _make_runner(self) -> Any:
        setting = self.setting
        runner = self._build(
            max_slots=setting.max_slots,
            token_budget=setting.token_budget,
            lone_token_budget=setting.lone_token_budget,
            speculation=setting.speculation,
            prefill_graphs=setting.prefill_graphs,
            num_pages=setting.num_pages,
        )
        launcher = runner.step_launcher()
        launch = launcher.launch

        def launch_apart(step: Step) -> Any:
            with self._lock:
                return launch(step)

        launcher.launch = launch_apart  # type: ignore[method-assign]
        return runner

    def _watch(self, server: EngineServer, runner: Any) -> None:
        self.watches.append(ModelWatch(server, runner, self.setting.max_slots))

    def _build(self, *, num_pages: int, **settings: Any) -> DeviceModelRunner:
        """A runner with the run's weights. `num_pages` 0: as many as one context needs."""
        setting = self.setting
        size = setting.page_size
        config = EngineConfig(
            model=str(self.directory_of_model),
            load_format="dummy",
            device=setting.device,
            dtype=setting.dtype,
            kv_dtype=setting.kv_dtype,
            deterministic=not setting.is_usual,
            page_size=size,
            kv_pool_tokens=size * (num_pages or setting.max_context_len // size + 1),
            max_context_len=setting.max_context_len,
            **settings,
        )
        if setting.device == "cuda":
            runner = build_model_runner(config)
            assert isinstance(runner, DeviceModelRunner)
        else:
            most = max(config.tokens_per_step("cpu"), config.tokens_per_lone_step("cpu"))
            pieces = config.prefill_graphs and not config.eager
            runner = device_runner(
                config, eager=config.eager, prefill_graphs=pieces, max_tokens=most
            )
        for layer in runner.step_launcher()._model._stack.layers:
            layer.attention.kv_norm.mul_(LOUDER)
        return runner

    def run(self) -> None:
        super().run()
        far = sum(gap > NEAR for gap in self.gaps)
        assert far <= 1 + FAR_SHARE * len(self.gaps), f"{far} of {len(self.gaps)} tokens are wrong"


class ExactTalk(Talk):
    """Asks for logprobs always: they show what a token hides."""

    owner: ModelRun

    def _request(self, prompt: list[int]) -> api.GenerateRequest:
        wire = super()._request(prompt)
        num_logprobs = max(wire.sampling.num_logprobs, 1)
        sampling = msgspec.structs.replace(wire.sampling, num_logprobs=num_logprobs)
        return msgspec.structs.replace(wire, sampling=sampling)

    def _is_same_top(self, mine: api.TokenLogprobs, right: api.TokenLogprobs) -> bool:
        """In bf16 several tokens may be as likely: which of them is named is not said."""
        return np.allclose(mine.top_logprobs, right.top_logprobs, rtol=0, atol=1e-4)


class NearTalk(Talk):
    """Holds each greedy token against the best one behind its own history."""

    owner: ModelRun

    def _expected(self, wire: api.GenerateRequest) -> Answer:
        return Answer()

    def _check(self, wire: api.GenerateRequest, want: Answer, got: Collected, how: str) -> None:
        name, finished = wire.request_id, got.finished
        sampling = wire.sampling
        assert finished is not None or how == "leave", f"{name} ({how}) did not end"
        code = None if finished is None else finished.error_code
        if code is not None:
            is_late = how == "come back" and code == "unknown_request"
            assert is_late or code in self.owner.setting.excused, f"{name} ({how}): {finished}"
        if finished is not None and finished.reason is api.FinishReason.ABORTED:
            self._check_aborted(name, how)
        is_edited = (
            sampling.logit_bias
            or sampling.frequency_penalty
            or (sampling.repetition_penalty != 1.0)
        )
        if sampling.temperature > 0 or is_edited:
            return
        gaps = self.owner.plain.answer(wire, got.ids).gaps
        assert all(gap >= 0 for gap in gaps), f"{name} ({how}) has a token that is not allowed"
        self.owner.gaps += gaps


def main(arguments: Sequence[str] | None = None) -> int:
    parser = soak_options(__doc__, minutes=5.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--usual", action="store_true", help="as it serves, not deterministic")
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if asked.device == "cuda":
        from kernels.triton import mla

        mla.LEAST_SPARED = 16  # contexts are short here: rows that share little are grouped too

    def make_run(seed: int, directory: Path) -> ModelRun:
        gc.collect()  # the run before this one, and what it held of the device
        return ModelRun(seed, directory, asked.device, asked.usual)

    case = "model_soak_usual" if asked.usual else "model_soak"
    result = soak(seeds_of(asked), asked.dump, make_run, case)
    print(json.dumps({**result, "device": asked.device}), flush=True)
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
