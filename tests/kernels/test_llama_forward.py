# SPDX-License-Identifier: Apache-2.0
"""The fused decoder: what a caller may rely on beyond agreement with the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import ops
from kernels.cases import paged_case
from kernels.decoder_cases import SHAPE, random_stack
from kernels.errors import KernelInputError
from kernels.selection import override
from kernels.verify import error_of

pytest.importorskip("_cpu_kernels")
STACK = random_stack("q4_1")
PAGE_SIZE = 16


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(specs: list[tuple[int, int]]) -> tuple[ops.PagedRows, torch.Tensor]:
    case = paged_case(
        specs,
        layers=SHAPE.num_layers,
        num_kv_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        seed=1,
    )
    return case.rows, case.kv_pool


def cut(rows: ops.PagedRows, begin: int, end: int) -> ops.PagedRows:
    """Tokens [begin, end) of a step of one row."""
    return replace(
        rows,
        positions=rows.positions[begin:end].contiguous(),
        slot_mapping=rows.slot_mapping[begin:end].contiguous(),
        row_indptr=int32([0, end - begin]),
        seq_lens=int32([end]),
    )


def test_a_chunked_prompt_ends_like_the_whole_one() -> None:
    ids = torch.randint(0, SHAPE.vocab, (150,), generator=torch.Generator().manual_seed(2)).int()
    rows, pool = step([(0, 150)])
    whole = ops.llama_forward(STACK, ids, rows, pool, int32([0]))
    for size in (7, 16, 64):
        for begin in range(0, 150, size):
            end = min(begin + size, 150)
            part = ops.llama_forward(
                STACK, ids[begin:end].contiguous(), cut(rows, begin, end), pool, int32([0])
            )
        assert error_of(part, whole) < 4e-2


def test_a_row_is_the_same_alone_and_among_others() -> None:
    specs = [(20, 1), (33, 1), (47, 1)]
    rows, pool = step(specs)
    ids = int32([5, 6, 7])
    together = ops.llama_forward(STACK, ids, rows, pool, int32([0, 1, 2]))
    alone = ops.llama_forward(
        STACK,
        ids[1:2].contiguous(),
        replace(
            rows,
            positions=rows.positions[1:2].contiguous(),
            slot_mapping=rows.slot_mapping[1:2].contiguous(),
            row_indptr=int32([0, 1]),
            row_slots=rows.row_slots[1:2].contiguous(),
            seq_lens=rows.seq_lens[1:2].contiguous(),
        ),
        pool,
        int32([0]),
    )
    assert error_of(alone[0], together[1]) < 1e-4


def test_logits_come_in_the_order_of_the_sampled_rows() -> None:
    rows, pool = step([(3, 1), (9, 2), (20, 1)])
    ids = int32([5, 6, 7, 8])
    ordered = ops.llama_forward(STACK, ids, rows, pool, int32([0, 1, 2]))
    some = ops.llama_forward(STACK, ids, rows, pool, int32([2, 0]))
    assert torch.equal(some, ordered[[2, 0]])
    none = ops.llama_forward(STACK, ids, rows, pool, int32([]))
    assert none.shape == (0, SHAPE.vocab)


def test_a_step_writes_no_slot_but_its_own() -> None:
    rows, pool = step([(30, 20), (5, 1)])
    before = pool.clone()
    ops.llama_forward(STACK, torch.ones(21, dtype=torch.int32), rows, pool, int32([0]))
    changed = (pool.view(torch.int16) != before.view(torch.int16)).any(dim=(1, 2, 4, 5))
    pages, offsets = changed.nonzero(as_tuple=True)
    written = set((pages * PAGE_SIZE + offsets).tolist())
    assert written == set(rows.slot_mapping.tolist())


@pytest.mark.parametrize("kernel", ["cpu_portable", "cpu_avx512", "cpu_amx", "reference"])
def test_an_id_outside_the_vocabulary_is_refused_and_nothing_is_written(kernel: str) -> None:
    if kernel.startswith("cpu_"):
        from kernels.cpu import available_levels

        if kernel.removeprefix("cpu_") not in available_levels():
            pytest.skip(f"this CPU does not offer {kernel}")
    rows, pool = step([(2, 2)])
    before = pool.clone()
    for bad in (-1, SHAPE.vocab):
        with (
            override("llama_forward", kernel),
            pytest.raises(KernelInputError, match=rf"input_ids\[1\]: got {bad}"),
        ):
            ops.llama_forward(STACK, int32([3, bad]), rows, pool, int32([0]))
    assert torch.equal(pool.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positions", [2, 99999]),
        ("slot_mapping", [-1, 0]),
        ("slot_mapping", [0, 10**8]),
        ("row_slots", [77]),
        ("seq_lens", [1]),
        ("seq_lens", [10**6]),
        ("row_indptr", [0, 1]),
    ],
)
def test_an_index_outside_the_pool_is_refused_with_its_field(field: str, value: list[int]) -> None:
    rows, pool = step([(2, 2)])
    change: dict[str, Any] = {field: int32(value)}
    with pytest.raises(KernelInputError, match=field):
        ops.llama_forward(STACK, int32([3, 4]), replace(rows, **change), pool, int32([0]))


def test_a_page_of_nobody_in_the_table_is_refused() -> None:
    rows, pool = step([(2, 2)])
    table = torch.full_like(rows.page_table, -1)
    with pytest.raises(KernelInputError, match="page_table"):
        ops.llama_forward(STACK, int32([3, 4]), replace(rows, page_table=table), pool, int32([0]))


def test_a_sampled_row_without_tokens_is_refused() -> None:
    rows, pool = step([(2, 2), (5, 0)])
    with pytest.raises(KernelInputError, match="sample_rows"):
        ops.llama_forward(STACK, int32([3, 4]), rows, pool, int32([1]))


def test_a_nan_in_one_rows_cache_leaves_the_others_alone() -> None:
    rows, pool = step([(20, 1), (33, 1)])
    clean = ops.llama_forward(STACK, int32([5, 6]), rows, pool.clone(), int32([0, 1]))
    page = int(rows.page_table[int(rows.row_slots[0]), 0])
    pool[page, :, :, 3] = float("nan")
    logits = ops.llama_forward(STACK, int32([5, 6]), rows, pool, int32([0, 1]))
    assert bool(logits[0].isnan().any())
    assert torch.equal(logits[1], clean[1])
    assert ops.argmax(logits).tolist() == [-1, int(clean[1].argmax())]


def test_weights_of_a_wrong_shape_are_refused_when_the_stack_is_made() -> None:
    layer = replace(STACK.layers[0], down=STACK.layers[0].attn_out)
    with pytest.raises(KernelInputError, match=r"layers\[1\]\.down"):
        ops.LlamaStack(
            shape=SHAPE,
            embedding=STACK.embedding,
            layers=(STACK.layers[0], layer),
            final_norm=STACK.final_norm,
            lm_head=STACK.lm_head,
            cos_sin=STACK.cos_sin,
        )
