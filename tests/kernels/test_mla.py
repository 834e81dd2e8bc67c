# SPDX-License-Identifier: Apache-2.0
"""MLA decode on the CPU, against attention over up-projected keys and values."""

from __future__ import annotations

import pytest
import torch

from kernels.errors import KernelInputError
from kernels.mla_workspace import make_mla_workspace
from kernels.ops.mla import mla_decode, plan_mla_decode


def test_absorbed_attention_equals_attention_over_expanded_heads() -> None:
    torch.manual_seed(2)
    heads, nope, rope, latent, value, page = 3, 8, 4, 16, 6, 4
    lens, q_len = [9, 4], 2
    up_k = torch.randn(heads, nope, latent, dtype=torch.float64)
    up_v = torch.randn(heads, value, latent, dtype=torch.float64)
    pool = torch.randn(8, page, latent + rope, dtype=torch.float64)
    page_table = torch.tensor([[5, 0, 7], [2, 0, 0], [1, 3, 6]], dtype=torch.int32)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    q_nope = torch.randn(4, heads, nope, dtype=torch.float64)
    q_rope = torch.randn(4, heads, rope, dtype=torch.float64)
    absorbed = torch.cat((torch.einsum("thn,hnc->thc", q_nope, up_k), q_rope), dim=-1)
    workspace = make_mla_workspace(
        max_rows=2, num_heads=heads, q_len=q_len, latent_dim=latent, device="cpu"
    )
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    plan_mla_decode(workspace, seq_lens, page_table, slots)
    out = mla_decode(absorbed.float(), pool.float(), page_table, slots, seq_lens, 0.3, workspace)
    actual = torch.einsum("thc,hvc->thv", out.double(), up_v)
    for row, length in enumerate(lens):
        tokens = pool[page_table[slots[row]].long()].flatten(0, 1)[:length]
        for i in range(q_len):
            seen = tokens[: length - q_len + i + 1]
            t = row * q_len + i
            for h in range(heads):
                keys = seen[:, :latent] @ up_k[h].T
                scores = keys @ q_nope[t, h] + seen[:, latent:] @ q_rope[t, h]
                p = torch.softmax(scores * 0.3, dim=0)
                wanted = p @ (seen[:, :latent] @ up_v[h].T)
                torch.testing.assert_close(actual[t, h], wanted, rtol=1e-4, atol=1e-4)


def test_a_row_without_kv_yields_zeros() -> None:
    workspace = make_mla_workspace(max_rows=1, num_heads=2, q_len=1, latent_dim=16, device="cpu")
    zero = torch.zeros(1, dtype=torch.int32)
    pool = torch.full((1, 4, 20), float("nan"))
    out = mla_decode(torch.randn(1, 2, 20), pool, zero[None], zero, zero, 1.0, workspace)
    assert torch.equal(out, torch.zeros(1, 2, 16))


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("q", torch.zeros(3, 2, 20), r"q: got \[3, 2, 20\]; allowed: shape \[1, 2, any\]"),
        ("kv_pool_layer", torch.zeros(1, 4, 21), "kv_pool_layer: got"),
        ("seq_lens", torch.ones(1), "seq_lens: got torch.float32; allowed: torch.int32"),
        ("kv_pool_layer", torch.zeros(1, 20, 4).transpose(1, 2), "kv_pool_layer.stride: got"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    argument: str, value: torch.Tensor, message: str
) -> None:
    one = torch.ones(1, dtype=torch.int32)
    arguments = {
        "q": torch.zeros(1, 2, 20),
        "kv_pool_layer": torch.zeros(1, 4, 20),
        "page_table": one[None] * 0,
        "row_slots": one * 0,
        "seq_lens": one,
        "softmax_scale": 1.0,
        "workspace": make_mla_workspace(
            max_rows=1, num_heads=2, q_len=1, latent_dim=16, device="cpu"
        ),
    }
    with pytest.raises(KernelInputError, match=message):
        mla_decode(**(arguments | {argument: value}))  # type: ignore[arg-type]


def test_a_plan_for_more_rows_than_the_workspace_holds_is_refused() -> None:
    workspace = make_mla_workspace(max_rows=1, num_heads=2, q_len=1, latent_dim=16, device="cpu")
    two = torch.ones(2, dtype=torch.int32)
    with pytest.raises(KernelInputError, match="seq_lens: got 2; allowed: at most 1 rows"):
        plan_mla_decode(workspace, two, two[:, None], two)


def test_a_workspace_of_no_rows_is_refused() -> None:
    with pytest.raises(KernelInputError, match="max_rows: got 0; allowed: at least 1"):
        make_mla_workspace(max_rows=0, num_heads=2, q_len=1, device="cpu")


@pytest.mark.parametrize(("group", "q_len", "heads"), [(0, 1, 4), (3, 1, 4), (32, 1, 2), (2, 2, 4)])
def test_a_group_that_fits_no_tile_is_refused(group: int, q_len: int, heads: int) -> None:
    sizes = dict(max_rows=4, num_heads=heads, q_len=q_len, device="cpu")
    with pytest.raises(KernelInputError, match=f"group: got {group}; allowed: 1; of one query"):
        make_mla_workspace(**sizes, group=group)
    with pytest.raises(KernelInputError, match="group: got 8; allowed: 1; of one query"):
        make_mla_workspace(max_rows=4, num_heads=16, q_len=1, device="cpu", group=8)
