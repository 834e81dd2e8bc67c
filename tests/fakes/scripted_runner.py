# SPDX-License-Identifier: Apache-2.0
"""ScriptedRunner: a ModelRunner whose KV is the token ids themselves.

`forward` writes each token where the step says, then reads every row's whole history back through
its page table, checks it, and asks the script for the logits that follow it. A token in the wrong
page, a stale page table, a copy that was not made: each changes a history, so it changes tokens
or fails the step. With several layers each holds the ids once more, and is read behind what the
step waits for of it. `expected_tokens` runs the same script without pages, slots or steps.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.execution.batch import ForwardBatch

Script = Callable[[Sequence[int]], torch.Tensor]

UNWRITTEN = -7


def hashed_script(vocab_size: int, *, first_id: int = 3) -> Script:
    """Logits that depend on every token of the history; ids below `first_id` are unlikely."""

    def logits(history: Sequence[int]) -> torch.Tensor:
        seed = zlib.crc32(np.asarray(history, dtype=np.int32).tobytes())
        values = np.random.default_rng(seed).normal(0, 2, vocab_size).astype(np.float32)
        values[:first_id] -= 50
        return torch.from_numpy(values)

    return logits


def repeating_script(vocab_size: int, *, first_id: int = 3, period: int = 7) -> Script:
    """Says again what followed its last three tokens when they came before; at times it strays."""

    def logits(history: Sequence[int]) -> torch.Tensor:
        ids = np.asarray(history, dtype=np.int32)
        seed = zlib.crc32(ids[-3:].tobytes())
        values = np.random.default_rng(seed).normal(0, 1, vocab_size).astype(np.float32)
        values[:first_id] -= 50
        tail = ids[-3:].tolist()
        for place in range(len(ids) - 4, 1, -1):
            if ids[place - 2 : place + 1].tolist() == tail:
                if zlib.crc32(ids.tobytes()) % period:
                    values[ids[place + 1]] += 8
                break
        return torch.from_numpy(values)

    return logits


def planned_script(plans: dict[int, Sequence[int]], vocab_size: int, *, eos_id: int = 2) -> Script:
    """By a prompt's first token: the ids that follow the prompt, then `eos_id`.

    The prompt is told from the output by its last token, which must be `vocab_size - 1`.
    """

    def logits(history: Sequence[int]) -> torch.Tensor:
        values = torch.zeros(vocab_size)
        place = len(history) - 1 - list(history).index(vocab_size - 1)
        plan = plans[history[0]]
        values[plan[place] if place < len(plan) else eos_id] = 10.0
        return values

    return logits


@dataclass(frozen=True)
class ScriptedLayout:
    """A page is its token ids, once a layer."""

    page_size: int
    num_layers: int = 1
    dtype: str = "int32"

    @property
    def token_bytes(self) -> int:
        return 4 * self.num_layers

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        return (num_pages, self.num_layers * self.page_size)

    def fingerprint(self) -> str:
        text = f"scripted {self.page_size} {self.num_layers}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class ScriptedRunner:
    """See the module. `step_s` is how long a step takes; `gate` holds steps while it is clear.

    `hold_at` n: the step after the n-th clears the gate itself, and `is_held` says it waits.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        page_size: int = 4,
        num_pages: int = 64,
        max_slots: int = 4,
        max_context_len: int = 128,
        step_s: float = 0.0,
        num_layers: int = 1,
    ) -> None:
        self.num_layers = num_layers
        self.num_loading_steps = 0  # steps that read pages as they came
        self.vocab_size = vocab_size
        self.max_context_len = max_context_len
        self.page_size = page_size
        self.num_pages = num_pages
        self.model_fingerprint = "scripted"
        self.next_input_ids = torch.full((max_slots,), UNWRITTEN, dtype=torch.int32)
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()
        self.hold_at: int | None = None
        self.is_held = False
        self.num_steps = 0
        self.row_counts: list[int] = []
        self.failing_steps: set[int] = set()
        self._script = script
        self._kv = torch.full((num_pages * num_layers * page_size,), UNWRITTEN, dtype=torch.int32)

    @property
    def kv_pool(self) -> torch.Tensor:
        """[num_pages, num_layers * page_size], as the tiers move it."""
        return self._kv.view(self.num_pages, self.num_layers * self.page_size)

    @property
    def layout(self) -> ScriptedLayout:
        return ScriptedLayout(self.page_size, self.num_layers)

    def _places(self, slots: torch.Tensor, layer: int) -> torch.Tensor:
        """Where the pool holds tokens of a slot mapping in a layer."""
        page, offset = slots // self.page_size, slots % self.page_size
        return (page * self.num_layers + layer) * self.page_size + offset

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, vocab] that the script gives for each sampling row's history."""
        if self.num_steps == self.hold_at:
            self.gate.clear()
        self.is_held = not self.gate.is_set()
        self.gate.wait()
        self.is_held = False
        time.sleep(self.step_s)
        self.num_steps += 1
        self.row_counts.append(len(batch.row_slots))
        if self.num_steps in self.failing_steps:
            raise RuntimeError("this step was told to fail")
        self.num_loading_steps += bool(batch.loads)
        for source, target, num_tokens in batch.page_copies.tolist():
            places = torch.arange(num_tokens)
            for layer in range(self.num_layers):
                copied = self._kv[self._places(source * self.page_size + places, layer)].clone()
                self._kv[self._places(target * self.page_size + places, layer)] = copied
        histories = self._write(batch)
        rows = [self._script(histories[row]) for row in batch.sample_rows.tolist()]
        return torch.stack(rows) if rows else torch.empty((0, self.vocab_size))

    def _write(self, batch: ForwardBatch) -> list[list[int]]:
        indptr = batch.row_indptr.tolist()
        histories = []
        for row, slot in enumerate(batch.row_slots.tolist()):
            first, last = indptr[row], indptr[row + 1]
            ids = batch.input_ids[first:last].clone()
            ids[ids < 0] = self.next_input_ids[slot]
            seq_len = int(batch.seq_lens[row])
            positions = batch.positions[first:last].tolist()
            assert positions == list(range(seq_len - (last - first), seq_len)), positions
            pages = batch.page_table[slot].tolist()
            where = [
                pages[p // self.page_size] * self.page_size + p % self.page_size
                for p in range(seq_len)
            ]
            assert batch.slot_mapping[first:last].tolist() == where[-(last - first) :]
            histories.append(self._read_and_write(batch, torch.tensor(where), ids, row))
        return histories

    def _read_and_write(
        self, batch: ForwardBatch, where: torch.Tensor, ids: torch.Tensor, row: int
    ) -> list[int]:
        """Layer by layer, the history of a row and its new tokens."""
        found: list[list[int]] = []
        for layer in range(self.num_layers):
            for load in batch.loads:
                load.wait(layer)
            places = self._places(where, layer)
            self._kv[places[len(where) - len(ids) :]] = ids
            found.append(self._kv[places].tolist())
        history = found[0]
        if any(other != history for other in found):
            assert batch.loads, f"row {row} reads KV of different tokens in its layers: {found}"
            history = [abs(sum(held)) % self.vocab_size for held in zip(*found, strict=True)]
        # What is on its way may turn out bad: then the step's tokens must count for nothing.
        unwritten = min(history) < 0
        assert batch.loads or not unwritten, f"row {row} reads KV that nobody wrote: {history}"
        return [max(0, held) for held in history] if unwritten else history


def expected_tokens(
    script: Script,
    prompt: Sequence[int],
    num: int,
    *,
    stop_ids: Sequence[int] = (),
    banned_ids: Sequence[int] = (),
) -> list[int]:
    """Greedy continuation by a plain loop, ending with a stop id or after `num` tokens."""
    history = list(prompt)
    while len(history) < len(prompt) + num:
        logits = script(history).clone()
        logits[list(banned_ids)] = -torch.inf
        history.append(int(logits.argmax()))
        if history[-1] in stop_ids:
            break
    return history[len(prompt) :]
