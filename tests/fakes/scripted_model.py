# SPDX-License-Identifier: Apache-2.0
"""ScriptedModel: a PagedModel whose KV is the token ids and whose logits come from a script.

It writes each token and its position where the step says, then reads the whole history of every
sampling row back through the page table and checks it. A page that was freed too early, moved
wrongly or shared by mistake breaks the history, and so the step. The answer to a prompt is
spelled token by token as a peak in the logits; what samples is the engine's own sampler under the
engine's own grammar, and an answer that leaves the script fails its step. `transcript.jsonl` in the
model's directory says of each prompt how many of its tokens were computed.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.models.config import read_config
from engine.models.model import LoadOptions, StepRows
from engine.models.registry import Architecture
from engine.text.assets import TextAssets, load_text_assets
from engine.weights.reader import WeightReader
from kvtiers.layout import PageLayout
from tests.fakes.scripted_answers import Answer, AnswerBook

ARCHITECTURE = "ScriptedForCausalLM"
TRANSCRIPT = "transcript.jsonl"
PEAK = 60.0
MAX_PLANS = 256

Ids = NDArray[np.int64]


class ScriptLeft(RuntimeError):
    """A token was sampled that the script does not have: a grammar forbade the right one."""


@dataclass(slots=True)
class _Slot:
    """What a slot's request has had computed. `end`: tokens of KV after its last step."""

    num_cached: int = 0
    end: int = 0
    has_sampled: bool = True


class ScriptedModel:
    """See the module. One thread."""

    num_layers = 1

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        assets = load_text_assets(str(directory))
        self._book = AnswerBook(directory, assets)
        self._assets = assets
        self._transcript = directory / TRANSCRIPT
        self._opening = np.array(_opening(assets))
        self._end_id = assets.eos_ids[-1]
        self._plans: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        self._slots: dict[int, _Slot] = {}

    @classmethod
    def load(
        cls, config: ScriptedConfig, reader: WeightReader, options: LoadOptions
    ) -> ScriptedModel:
        """There are no weights to read."""
        return cls(config.directory, config.vocab_size)

    def kv_layout(self, page_size: int, dtype: str) -> PageLayout:
        """One row a token: its id as the key, its position as the value; both exact in fp32."""
        assert dtype == "float32", dtype
        return PageLayout(
            num_layers=1, page_size=page_size, num_kv_heads=1, head_dim=1, dtype=dtype
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        rows: StepRows,
        kv_pool: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Write, read back, check; a peak at the next scripted token of each sampling row."""
        rows.wait_for_layer(self.num_layers - 1)
        pool = kv_pool.view(kv_pool.shape[0], 2, rows.page_size)
        where = rows.slot_mapping.long()
        pages, places = where // rows.page_size, where % rows.page_size
        pool[pages, 0, places] = input_ids.float()
        pool[pages, 1, places] = rows.positions.float()
        sampling = set(sample_rows.tolist())
        self._note_rows(rows, sampling)
        logits = torch.zeros((len(sample_rows), self.vocab_size))
        for index, row in enumerate(sample_rows.tolist()):
            slot = int(rows.row_slots[row])
            history = _read_back(pool, rows, row)
            logits[index, self._next_token(history, self._slots[slot])] = PEAK
        return logits

    def _note_rows(self, rows: StepRows, sampling: set[int]) -> None:
        indptr = rows.row_indptr.tolist()
        for row, slot_id in enumerate(rows.row_slots.tolist()):
            end = int(rows.seq_lens[row])
            num_new = indptr[row + 1] - indptr[row]
            slot = self._slots.setdefault(slot_id, _Slot())
            # After its first token a request goes on one token a step; a prompt never does.
            if slot.end != end - num_new or (slot.has_sampled and num_new > 1):
                slot.num_cached, slot.has_sampled = end - num_new, False
            slot.end = end
            slot.has_sampled = slot.has_sampled or row in sampling

    def _next_token(self, history: Ids, slot: _Slot) -> int:
        starts = np.flatnonzero(history == self._opening[0])
        if not len(starts):  # the runner's warm-up, or a prompt that is no conversation
            return self._end_id
        start = int(starts[-1])
        num_prompt = start + len(self._opening)
        if not np.array_equal(history[start:num_prompt], self._opening):
            raise ScriptLeft(
                f"the prompt does not ask for an answer: {self._text(history[-40:])!r}"
            )
        said = history[num_prompt:].tolist()
        plan = self._plan(history[:num_prompt], slot.num_cached, is_new=not said)
        if said[: len(plan)] == plan:  # a step that was launched before the end was seen
            return self._end_id
        if said != plan[: len(said)]:
            self._write({"left_script": self._text(history[num_prompt:])})
            raise ScriptLeft(
                f"sampled {self._text(said)!r}, where the script has {self._text(plan)!r}"
            )
        return plan[len(said)]

    def _plan(self, prompt: Ids, num_cached: int, *, is_new: bool) -> list[int]:
        key = (len(prompt), zlib.crc32(prompt.tobytes()))
        answer: Answer | None = None
        if key not in self._plans:
            answer = self._book.answer(self._text(prompt))
            self._plans[key] = [*answer.token_ids, self._end_id]
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        if is_new:
            answer = answer or self._book.answer(self._text(prompt))
            counts = {"num_prompt": len(prompt), "num_cached": num_cached}
            self._write({**counts, **answer.about})
        return self._plans[key]

    def _text(self, token_ids: Any) -> str:
        return self._assets.tokenizer.decode([int(i) for i in token_ids], with_control=True)

    def _write(self, record: dict[str, Any]) -> None:
        with self._transcript.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _read_back(pool: torch.Tensor, rows: StepRows, row: int) -> Ids:
    """The row's history as its pages hold it; every token must stand at its own position."""
    seq_len = int(rows.seq_lens[row])
    num_pages = -(-seq_len // rows.page_size)
    pages = rows.page_table[int(rows.row_slots[row])][:num_pages].long()
    kept = pool[pages].transpose(0, 1).reshape(2, -1)[:, :seq_len].numpy().astype(np.int64)
    wrong = np.flatnonzero(kept[1] != np.arange(seq_len))
    if len(wrong):
        at = int(wrong[0])
        raise RuntimeError(f"position {at} of {seq_len} holds the KV of position {kept[1, at]}")
    history: Ids = kept[0]
    return history


def _opening(assets: TextAssets) -> list[int]:
    """The ids that ask for an answer."""
    user = [{"role": "user", "content": "q"}]
    closed = assets.chat_template.render(user, add_generation_prompt=False)
    return assets.chat_template.render(user, add_generation_prompt=True)[len(closed) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedConfig:
    """What config.json says, and where it lies."""

    directory: Path
    vocab_size: int
    max_context_len: int


def read_scripted_config(directory: Path) -> ScriptedConfig:
    config = read_config(directory)
    return ScriptedConfig(
        directory=directory,
        vocab_size=config["vocab_size"],
        max_context_len=config["max_position_embeddings"],
    )


SCRIPTED = Architecture(model=ScriptedModel, read_config=read_scripted_config)
