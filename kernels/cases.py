# SPDX-License-Identifier: Apache-2.0
"""Random calls of each CPU family at its edges, for `python -m kernels verify` and the tests.

Does not know: implementations. What a kernel must not read (pages of nobody, tokens beyond a
sequence) holds NaN, so that reading it shows in the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import ops

RowSpec = tuple[int, int]  # (tokens already in the cache, new tokens)


@dataclass(frozen=True, slots=True)
class Case:
    """One call. `run` makes the same inputs each time it is called and returns the result."""

    name: str
    variant: str  # key of the tolerance
    run: Callable[[], torch.Tensor]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_blocks(
    num_rows: int, num_cols: int, block_format: str, generator: torch.Generator
) -> ops.PackedWeight:
    """Return a weight of random quants, values of the order of 1 / sqrt(num_cols)."""
    num_blocks = num_rows * num_cols // 32
    payload = 16 if block_format == "q4_1" else 32
    quants = torch.randint(0, 256, (num_blocks, payload), generator=generator, dtype=torch.uint8)
    spread = 1.0 / (4.6 if block_format == "q4_1" else 74.0) / num_cols**0.5
    scale = (torch.rand(num_blocks, 1, generator=generator) + 0.5) * spread
    parts = [scale.half()]
    if block_format == "q4_1":
        parts.append((-7.5 * scale).half())
    head = torch.cat(parts, dim=1).view(torch.uint8)
    blocks = torch.cat((head, quants), dim=1)
    return ops.pack_linear(blocks.reshape(-1), block_format, num_cols)


@dataclass(frozen=True, slots=True)
class PagedCase:
    """A ragged step over a shuffled page table; whatever no row owns is NaN."""

    rows: ops.PagedRows
    kv_pool: torch.Tensor  # [num_pages, layers, 2, page_size, Hkv, D]


def paged_case(
    specs: list[RowSpec],
    *,
    layers: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    seed: int,
) -> PagedCase:
    """Return the step's index tensors and a pool that holds every row's tokens."""
    generator = _seeded(seed)
    pages_per_row = max(-(-(past + new) // page_size) for past, new in specs) + 1
    num_slots = len(specs) + 2
    num_pages = num_slots * pages_per_row + 3
    table = torch.randperm(num_pages, generator=generator)[: num_slots * pages_per_row]
    page_table = table.view(num_slots, pages_per_row).to(torch.int32).contiguous()
    slots = torch.randperm(num_slots, generator=generator)[: len(specs)].to(torch.int32)
    pool_shape = (num_pages, layers, 2, page_size, num_kv_heads, head_dim)
    pool = torch.full(pool_shape, float("nan"), dtype=dtype)
    positions: list[int] = []
    mapping: list[int] = []
    for slot, (past, new) in zip(slots.tolist(), specs, strict=True):
        for position in range(past + new):
            page = int(page_table[slot, position // page_size])
            offset = position % page_size
            values = torch.randn(layers, 2, num_kv_heads, head_dim, generator=generator)
            pool[page, :, :, offset] = values.to(dtype)
            if position >= past:
                positions.append(position)
                mapping.append(page * page_size + offset)
    counts = torch.tensor([0] + [new for _, new in specs])
    rows = ops.PagedRows(
        positions=torch.tensor(positions, dtype=torch.int32),
        slot_mapping=torch.tensor(mapping, dtype=torch.int32),
        row_indptr=counts.cumsum(0).to(torch.int32),
        row_slots=slots,
        seq_lens=torch.tensor([past + new for past, new in specs], dtype=torch.int32),
        page_table=page_table,
        page_size=page_size,
    )
    return PagedCase(rows, pool)


def _linear(block_format: str, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    num_tokens, num_rows, num_cols = shape
    generator = _seeded(num_tokens + num_rows)
    weight = random_blocks(num_rows, num_cols, block_format, generator)
    x = torch.randn(num_tokens, num_cols, generator=generator).to(dtype)
    return ops.linear(x, weight)


def linear_cases() -> list[Case]:
    """Token counts around every pass width; rows not a multiple of 16; an odd number of blocks."""
    cases = []
    for block_format in ("q4_1", "q8_0"):
        for num_tokens in (1, 2, 5, 8, 9, 16, 17, 33, 70):
            for num_rows, num_cols in ((16, 32), (50, 96), (144, 576), (64, 1536)):
                name = f"{block_format} {num_tokens} x {num_cols} x {num_rows}"
                shape = (num_tokens, num_rows, num_cols)
                run = functools.partial(_linear, block_format, shape, torch.float32)
                cases.append(Case(name, "fp32", run))
    run = functools.partial(_linear, "q4_1", (3, 48, 64), torch.bfloat16)
    return [*cases, Case("q4_1 bf16 3 x 64 x 48", "bf16", run)]


def _attention(
    specs: list[RowSpec], heads: tuple[int, int, int], page_size: int, dtype: torch.dtype
) -> torch.Tensor:
    num_heads, num_kv_heads, head_dim = heads
    case = paged_case(
        specs,
        layers=2,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        seed=sum(past + 3 * new for past, new in specs),
    )
    rows = case.rows
    num_tokens = rows.positions.shape[0]
    # Large enough scores that single keys dominate: a wrong mask or page shows.
    q = torch.randn(num_tokens, num_heads, head_dim, generator=_seeded(7)) * 2.0
    return ops.paged_attention(
        q.to(dtype),
        case.kv_pool[:, 1],
        rows.page_table,
        rows.row_slots,
        rows.row_indptr,
        rows.seq_lens,
        page_size,
        head_dim**-0.5,
    )


def attention_cases() -> list[Case]:
    """Decode, prefill and mixed rows at the edges of pages, tiles and key blocks."""
    steps: dict[str, list[RowSpec]] = {
        "decode 1": [(0, 1)],
        "decode 63 64 65": [(62, 1), (63, 1), (64, 1)],
        "decode 2000": [(1999, 1), (5, 1)],
        "prefill 1..65": [(0, 2), (0, 63), (0, 64), (0, 65)],
        "prefill on a prefix": [(1, 31), (63, 33), (100, 92), (300, 16)],
        "mixed": [(0, 17), (150, 1), (64, 2), (31, 40)],
        "an empty row": [(40, 0), (3, 5)],
    }
    cases = []
    for name, specs in steps.items():
        for heads in ((9, 3, 64), (4, 4, 32), (8, 1, 128)):
            run = functools.partial(_attention, specs, heads, 64, torch.float32)
            cases.append(Case(f"{name} heads {heads}", "fp32", run))
    run = functools.partial(_attention, steps["mixed"], (6, 2, 96), 16, torch.bfloat16)
    cases.append(Case("mixed bf16 page 16 heads (6, 2, 96)", "bf16", run))
    run = functools.partial(_attention, [(0, 2000)], (3, 1, 64), 64, torch.float32)
    return [*cases, Case("prefill 2000 heads (3, 1, 64)", "fp32", run)]


def _argmax(num_cols: int) -> torch.Tensor:
    logits = torch.randn(6, num_cols, generator=_seeded(num_cols))
    logits[0] = 1.5  # all equal: the first wins
    logits[1, -1] = 100.0
    logits[2] = float("-inf")
    logits[3, num_cols // 2] = float("nan")
    logits[4, num_cols // 3 :] = logits[4].max() + 1.0
    return ops.argmax(logits)


def _bitmask(num_cols: int) -> torch.Tensor:
    generator = _seeded(num_cols)
    logits = torch.randn(5, num_cols, generator=generator)
    words = -(-num_cols // 32)
    mask = torch.randint(-(2**31), 2**31, (5, words), generator=generator).to(torch.int32)
    mask[0] = -1
    mask[1] = 0
    ops.apply_bitmask(logits, mask)
    return logits


def _copy(dtype: torch.dtype) -> torch.Tensor:
    pool = torch.randn(7, 3, 2, 16, 2, 32, generator=_seeded(3)).to(dtype)
    copies = torch.tensor([[0, 5, 16], [3, 1, 1], [2, 6, 0], [4, 2, 9]], dtype=torch.int32)
    ops.copy_pages(pool, copies)
    return pool


def small_cases() -> dict[str, list[Case]]:
    """Cases of the ops that compute nothing."""
    widths = (1, 15, 16, 17, 31, 32, 33, 1000, 49152)
    return {
        "argmax": [Case(f"{n} columns", "", functools.partial(_argmax, n)) for n in widths],
        "apply_bitmask": [Case(f"{n} columns", "", functools.partial(_bitmask, n)) for n in widths],
        "copy_pages": [
            Case(str(dtype), "", functools.partial(_copy, dtype))
            for dtype in (torch.float32, torch.bfloat16)
        ],
    }
