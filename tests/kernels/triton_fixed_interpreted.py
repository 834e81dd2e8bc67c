# SPDX-License-Identifier: Apache-2.0
"""Child of test_triton_kernels.py: kernels of fixed order with TRITON_INTERPRET=1, on a CPU.

A whole model runs through them: a sequence gets the same bits whatever shares its steps and however
its prompt is cut.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import kernels.ops  # noqa: F401
from engine.config import EngineConfig
from engine.execution.model_runner import build_model_runner
from kernels.fixed_order import FIXED_ORDER
from kernels.mla_workspace import make_mla_workspace
from kernels.reference import linear as reference
from kernels.reference import mla as reference_mla
from kernels.reference import moe_dense as reference_moe
from kernels.registry import REGISTRY
from kernels.selection import set_override
from tests.fakes.paged_driver import PagedDriver, Row
from tests.fakes.tiny_deepseek import write_tiny_deepseek


def close(actual: torch.Tensor, expected: torch.Tensor, allowed: float = 2e-6) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < allowed, float(error)


def check_linear() -> None:
    from kernels.triton.fixed_order import fixed_linear

    torch.manual_seed(1)
    x, weight = torch.randn(19, 100), torch.randn(70, 100)
    found = fixed_linear(x, weight)
    close(found, reference.linear(x, weight))
    for rows in (slice(0, 1), slice(3, 10), slice(18, 19)):
        assert torch.equal(fixed_linear(x[rows], weight), found[rows])


def check_experts() -> None:
    from kernels.triton.fixed_order import fixed_moe_dense

    torch.manual_seed(2)
    x, shared = torch.randn(23, 48), torch.randn(23, 48)
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(23)]).to(torch.int32)
    ids[ids == 4] = 0  # nobody takes one of them
    weights = torch.rand(23, 3)
    gate_up, down = torch.randn(6, 64, 48) / 7, torch.randn(6, 48, 32) / 6
    found = fixed_moe_dense(x, ids, weights, gate_up, down, shared)
    close(found, reference_moe.moe_dense(x, ids, weights, gate_up, down, shared))
    for rows in (slice(0, 1), slice(5, 13)):
        some = (x[rows], ids[rows], weights[rows], gate_up, down, shared[rows])
        assert torch.equal(fixed_moe_dense(*some), found[rows])


def check_attention() -> None:
    from kernels.triton.fixed_attention import fixed_attention

    torch.manual_seed(3)
    lens, page, latent, rope, heads = [1, 70, 0, 200, 128], 16, 32, 16, 3
    most = 13
    table = torch.randperm(len(lens) * most).to(torch.int32).view(len(lens), most)
    pool = torch.full((len(lens) * most, page, latent + rope), float("nan"))
    for row, length in enumerate(lens):
        for at in range(length):
            pool[table[row, at // page], at % page] = torch.randn(latent + rope)
    q = torch.randn(len(lens), heads, latent + rope)
    slots = torch.arange(len(lens), dtype=torch.int32)
    token_lens = torch.tensor(lens, dtype=torch.int32)

    def attend(rows: slice, most_tokens: int) -> torch.Tensor:
        parts = (slots[rows], token_lens[rows])
        return fixed_attention(q[rows], pool, table, *parts, most_tokens, 0.2, latent, 64)

    found = attend(slice(0, 5), most * page)
    workspace = make_mla_workspace(
        max_rows=5, num_heads=heads, q_len=1, device="cpu", latent_dim=32
    )
    close(
        found,
        reference_mla.mla_decode(q, pool, table, slots, token_lens, 0.2, latent, workspace),
    )
    for row in range(5):
        alone = attend(slice(row, row + 1), max(1, lens[row]))
        assert torch.equal(alone[0], found[row]), f"row {row}: another number of parts was possible"


def _force() -> None:
    """As `use_fixed_order`, with the GPU's row-wise kernels for a CPU too: torch's treat the last
    few numbers of an array otherwise than those before."""
    for family, name in {**FIXED_ORDER, "mla_kv_write": "triton", "moe_route": "triton"}.items():
        found = next(spec for spec in REGISTRY.specs(family) if spec.name == name)
        if found.device == "cuda":
            name = "anywhere"
            REGISTRY.add(replace(found, name=name, device="any"))
        set_override(family, name)


def _ids(num: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (num,), generator=generator).tolist()


def _logits(driver: PagedDriver, slot: int, chunks: list[int], others: int) -> torch.Tensor:
    """Logits behind 12 tokens in slot 0, cut into chunks, each in a step with other rows."""
    ids, row, at = _ids(12, 1), driver.open(slot), 0
    logits = torch.empty(0)
    for number, size in enumerate(chunks):
        beside: list[tuple[Row, list[int]]] = []
        for other in range(others):
            count = 1 if (other + number) % 2 else 3 + other % 4
            beside.append((driver.open(slot + 1 + other), _ids(count, 7 * number + other)))
        beside.sort(key=lambda part: len(part[1]) == 1)  # decode rows last
        mine = (row, ids[at : at + size])
        place = len(beside) if size == 1 else 0
        parts = [*beside[:place], mine, *beside[place:]]
        logits = driver.step(parts)[place]
        at += size
    assert at == 12
    return logits


def check_model() -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_deepseek(Path(directory), num_hidden_layers=2, vocab_size=128)
        config = EngineConfig(
            model=directory,
            load_format="dummy",
            dtype="float32",
            num_threads=1,
            page_size=16,
            kv_pool_tokens=16 * 96,
            max_slots=20,
            max_context_len=128,
        )
        runner = build_model_runner(config)
        plain = _logits(PagedDriver(runner, seed=4), 0, [12], 0)
        _force()
        alone = _logits(PagedDriver(runner, seed=4), 0, [12], 0)
        close(alone, plain, 1e-5)
        for chunks, others in (([5, 6, 1], 3),):
            found = _logits(PagedDriver(runner, seed=5), 0, chunks, others)
            assert torch.equal(found, alone), f"{chunks} beside {others} rows"
        for family in FIXED_ORDER:
            set_override(family, None)


CHECKS = {
    "linear": check_linear,
    "experts": check_experts,
    "attention": check_attention,
    "model": check_model,
}

if __name__ == "__main__":
    from kernels.triton import expert_choice, fixed_order, rows  # noqa: F401

    for name in sys.argv[1:]:
        CHECKS[name]()
        print(f"ok {name}", flush=True)
