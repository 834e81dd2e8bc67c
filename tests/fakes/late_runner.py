# SPDX-License-Identifier: Apache-2.0
"""ScriptedRunners that are as hard on an engine as a device is, and copies that take their time.

    HarshRunner   steps take a random time, may fail and leave rubbish behind; drafts if asked to
    LateRunner    runs them long after their launch, as a stream does

Drafts are right two times in three.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.batch import ForwardBatch
from engine.execution.host_launcher import HostLauncher
from engine.execution.steps import Launcher, Step, StepResult
from kvtiers.device_memory import Body, DeviceMemory, Incoming, Wait
from kvtiers.layered_load import Fence, LayeredLoad
from tests.fakes.scripted_runner import Script, ScriptedRunner

RUBBISH = 5  # a token


class HarshRunner(ScriptedRunner):
    """`delay_s` draws how long a step waits; `drafts`: as a model that drafts does."""

    def __init__(
        self, script: Script, *, delay_s: Callable[[], float], drafts: bool, **sizes: Any
    ) -> None:
        super().__init__(script, **sizes)
        self._delay_s = delay_s
        self.can_draft = drafts
        self.bad_steps: set[int] = set()
        self._histories: list[list[int]] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """A step that fails has written something else, and steps behind it go on from there."""
        time.sleep(self._delay_s())
        logits = super().forward(batch)
        if self.num_steps in self.bad_steps:
            for layer in range(self.num_layers):
                self._kv[self._places(batch.slot_mapping.long(), layer)] = RUBBISH
            self.next_input_ids[batch.row_slots.long()] = RUBBISH
            raise RuntimeError("this step was told to fail")
        return logits

    def _write(self, batch: ForwardBatch) -> list[list[int]]:
        self._histories = super()._write(batch)
        return self._histories

    def draft(self, batch: ForwardBatch, next_ids: torch.Tensor) -> torch.Tensor:
        """int32 [S]."""
        assert int(next_ids.min()) >= 0, "a token whose follower nobody knows"
        guesses = []
        for row in batch.sample_rows.tolist():
            followed = [*self._histories[row], int(next_ids[int(batch.row_indptr[row + 1]) - 1])]
            is_right = zlib.crc32(np.asarray(followed, np.int32).tobytes()) % 3
            guesses.append(int(self._script(followed).argmax()) if is_right else 5)
        return torch.tensor(guesses, dtype=torch.int32)


class LateRunner(HarshRunner):
    """Brings its own launcher."""

    def step_launcher(self) -> Launcher:
        return LateLauncher(self)


class LateLauncher:
    """A stream: steps run in order, on a thread of their own."""

    is_async = True

    def __init__(self, runner: ScriptedRunner) -> None:
        self._inner = HostLauncher(runner)
        self._stream = ThreadPoolExecutor(1, thread_name_prefix="late-device")

    def launch(self, step: Step) -> Callable[[], StepResult]:
        def work() -> StepResult:
            with torch.inference_mode():
                return self._inner.launch(step)()

        return self._stream.submit(work).result


class LaggingMemory:
    """L1 whose copies take a random time, before and after the bytes are moved.

    `fails` is asked in the middle of each load that is read as it comes.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        delay_s: Callable[[], float],
        fails: Callable[[], bool] = lambda: False,
    ) -> None:
        self.kind = memory.kind
        self._memory = memory
        self._delay_s = delay_s
        self._fails = fails

    def read(self, pages: Sequence[int], into: Sequence[NDArray[np.uint8]]) -> None:
        self._lag(lambda: self._memory.read(pages, into))

    def write(self, pages: Iterable[tuple[int, Body]]) -> Wait | None:
        self._lag(lambda: self._memory.write(pages))
        return None

    def write_layers(self, pages: Incoming, load: LayeredLoad) -> None:
        """Each layer is there some time before it is said to be, and the next comes later still."""
        late = LayeredLoad(load.num_layers)

        def arrived(num_layers: int, fence: Fence | None) -> None:
            self._lag(lambda: load.arrived(num_layers, fence))
            if num_layers < load.num_layers and self._fails():
                raise RuntimeError("this load was told to fail")

        late.arrived = arrived  # type: ignore[method-assign]
        self._memory.write_layers(pages, late)

    def _lag(self, copy: Callable[[], object]) -> None:
        time.sleep(self._delay_s())
        copy()
        time.sleep(self._delay_s())


class Delays:
    """Draws times; any thread may."""

    def __init__(self, seed: int, choices: Sequence[float]) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._choices = choices

    def __call__(self) -> float:
        with self._lock:
            return self._rng.choice(self._choices) * self._rng.random()
