# SPDX-License-Identifier: Apache-2.0
"""Rows that begin alike on a GPU: what a group shares is read once, and the results are those of
rows by themselves."""

from __future__ import annotations

import pytest
import torch

from kernels.mla_workspace import MlaWorkspace, make_mla_workspace
from kernels.reference.mla import mla_decode as reference_mla

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PAGE, LATENT, ROPE, V_DIM = 64, 512, 64, 128
TOLERANCE = 5e-3  # bf16 results, as in test_gpu_decode.py
MOST = 120  # pages of a row


@pytest.fixture(autouse=True)
def group_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows here are few and short."""
    from kernels.triton import mla

    monkeypatch.setattr(mla, "LEAST_SPARED", 1)


class Rows:
    """A pool of two layers, and rows that may name each other's pages."""

    def __init__(self, num_rows: int, heads: int) -> None:
        self.num_rows, self.heads = num_rows, heads
        num_pages = num_rows * MOST + 1
        values = torch.randn(num_pages, 2, PAGE, LATENT + ROPE, device="cuda")
        self.pool = values.to(torch.bfloat16)[:, 1]
        self.own = torch.randperm(num_pages - 1, device="cuda").to(torch.int32).view(num_rows, MOST)
        self.table = torch.zeros(num_rows + 1, MOST, dtype=torch.int32, device="cuda")
        self.slots = torch.randperm(num_rows, device="cuda").to(torch.int32) + 1
        self.lens = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
        self.q = torch.randn(num_rows, heads, LATENT + ROPE, device="cuda").to(torch.bfloat16)
        self.workspace = self.make_workspace(64 // heads)

    def make_workspace(self, group: int) -> MlaWorkspace:
        made = make_mla_workspace(
            max_rows=self.num_rows + 3,
            num_heads=self.heads,
            q_len=1,
            device="cuda",
            group=group,
        )
        made.partial_out.fill_(float("nan"))
        made.partial_lse.fill_(float("nan"))
        return made

    def set(self, lens: list[int], common: list[int]) -> None:
        """Row r has `common[r]` pages of the row before it, in front of its own."""
        table = self.own.clone()
        for row, shared in enumerate(common):
            if shared:
                table[row, :shared] = table[row - 1, :shared]
        self.table[self.slots.long()] = table
        self.lens.copy_(torch.tensor(lens, dtype=torch.int32))

    def arguments(self, workspace: MlaWorkspace | None = None) -> tuple[object, ...]:
        made = workspace or self.workspace
        return (self.q, self.pool, self.table, self.slots, self.lens, 0.1, LATENT, made)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


CASES = [
    # lengths, pages in common with the row before, heads
    ([3000, 2900, 2800, 3100], [0, 40, 41, 43], 16),
    ([7000, 6990, 7001, 7600, 5000, 2000, 5100, 5101], [0, 109, 109, 109, 0, 17, 30, 78], 16),
    ([4000, 4000, 4000, 4000, 4000, 4000, 0, 0], [0, 62, 62, 62, 0, 20, 0, 0], 16),
    ([2000] * 9, [0, 20, 20, 20, 20, 20, 20, 20, 20], 8),
    ([5000, 5001, 5002], [0, 78, 78], 32),
    ([1100, 1101, 1102, 1103], [0, 18, 18, 18], 16),  # tokens of one sequence
    ([1100, 900, 1100, 64], [0, 14, 14, 1], 16),  # too little in common
    ([100, 1], [0, 0], 16),
]


@pytest.mark.parametrize("kernel", ["decode_hopper", "decode_portable"])
@pytest.mark.parametrize(("lens", "common", "heads"), CASES)
def test_rows_of_a_group_agree_with_the_reference(
    kernel: str, lens: list[int], common: list[int], heads: int
) -> None:
    from kernels.triton import mla

    torch.manual_seed(0)
    rows = Rows(len(lens), heads)
    rows.set(lens, common)
    mla.plan(rows.workspace, rows.lens, rows.table, rows.slots)
    args = rows.arguments()
    actual = getattr(mla, kernel)(*args)
    assert relative_error(actual, reference_mla(*args)) < TOLERANCE  # type: ignore[arg-type]
    assert torch.equal(actual, getattr(mla, kernel)(*args))
    assert rows.workspace.shared is not None
    shares = bool(rows.workspace.shared.any())
    assert shares == (max(common) >= mla.LEAST_SHARED and max(lens) > 1024)


@pytest.mark.parametrize(("lens", "common", "heads"), CASES[:3])
def test_values_of_a_group_are_those_of_rows_by_themselves(
    lens: list[int], common: list[int], heads: int
) -> None:
    from kernels.triton import mla, mla_layer

    torch.manual_seed(2)
    rows = Rows(len(lens), heads)
    rows.set(lens, common)
    w_uv = torch.randn(heads, V_DIM, LATENT, device="cuda").to(torch.bfloat16) / 16
    found = []
    for workspace in (rows.workspace, rows.make_workspace(1)):
        mla.plan(workspace, rows.lens, rows.table, rows.slots)
        args = (rows.q, rows.pool, rows.table, rows.slots, rows.lens, 0.1, workspace, w_uv)
        found.append(mla_layer.mla_values(*args))
    live = rows.lens > 0
    assert relative_error(found[0][live], found[1][live]) < TOLERANCE
    assert not bool(found[0][~live].any())


def test_rows_are_read_each_where_groups_spare_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.triton import mla

    lens, common, heads = CASES[0]
    torch.manual_seed(3)
    rows = Rows(len(lens), heads)
    rows.set(lens, common)
    apart = rows.make_workspace(1)
    mla.plan(apart, rows.lens, rows.table, rows.slots)
    wanted = mla.decode_hopper(*rows.arguments(apart))  # type: ignore[arg-type]
    monkeypatch.setattr(mla, "LEAST_SPARED", 3 * 40 + 1)
    mla.plan(rows.workspace, rows.lens, rows.table, rows.slots)
    assert torch.equal(mla.decode_hopper(*rows.arguments()), wanted)  # type: ignore[arg-type]


def test_a_captured_step_groups_what_each_replay_finds_in_common() -> None:
    from kernels.triton import mla

    torch.manual_seed(1)
    rows = Rows(8, 16)
    rows.set([64] * 8, [0] * 8)

    def step() -> torch.Tensor:
        mla.plan(rows.workspace, rows.lens, rows.table, rows.slots)
        mla.decode_hopper(*rows.arguments())  # type: ignore[arg-type]
        return mla.decode_hopper(*rows.arguments())  # type: ignore[arg-type]

    step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lens, common in (
        ([3000] * 8, [0, 40, 40, 40, 40, 40, 40, 40]),
        ([3001] * 8, [0] * 8),
        ([7000, 6000, 5000, 4000, 3000, 2000, 1, 0], [0, 90, 70, 60, 0, 30, 0, 0]),
        ([1, 2000, 3000, 64, 7000, 7000, 7000, 7000], [0, 0, 0, 0, 0, 108, 109, 109]),
        ([0] * 8, [0] * 8),
    ):
        rows.set(lens, common)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        expected = reference_mla(*rows.arguments())  # type: ignore[arg-type]
        if max(lens) == 0:
            assert not bool(out.any())
        else:
            assert relative_error(out, expected) < TOLERANCE
