# SPDX-License-Identifier: Apache-2.0
"""MLA ops: prefill in both forms, the fused store and dense experts, against plain arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels.mla_workspace import make_mla_workspace
from kernels.ops.mla import mla_decode, plan_mla_decode
from kernels.ops.mla_kv_write import mla_kv_write
from kernels.ops.mla_prefill import mla_prefill
from kernels.ops.moe_dense import moe_dense
from kernels.portable import mla_prefill as portable
from kernels.portable.moe_dense import moe_dense as grouped_moe
from kernels.reference.moe_dense import moe_dense as reference_moe
from kernels.selection import override

_H, _N, _R, _V, _C, _PAGE = 3, 8, 4, 6, 16, 8


def _step(specs: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Rows of (cached, new) tokens over shuffled pages; what no row owns is NaN."""
    generator = torch.Generator().manual_seed(11)
    width = max(-(-(past + new) // _PAGE) for past, new in specs) + 1
    table = torch.randperm(len(specs) * width + 2, generator=generator)[: len(specs) * width]
    table = table.view(len(specs), width).to(torch.int32)
    pool = torch.full((len(specs) * width + 2, 2, _PAGE, _C + _R), float("nan"), dtype=dtype)
    latents = []
    for row, (past, new) in enumerate(specs):
        values = torch.randn(past + new, _C + _R, generator=generator).to(dtype)
        for position in range(past + new):
            pool[table[row, position // _PAGE], 1, position % _PAGE] = values[position]
        latents.append(values)
    lens = torch.tensor([0] + [new for _, new in specs])
    num_tokens = int(lens.sum())
    return {
        "q": torch.randn(num_tokens, _H, _N + _R, generator=generator).to(dtype) * 2,
        "w_uk": torch.randn(_H, _N, _C, generator=generator).to(dtype) / 4,
        "w_uv": torch.randn(_H, _V, _C, generator=generator).to(dtype) / 4,
        "kv_pool_layer": pool[:, 1],
        "page_table": table,
        "row_slots": torch.arange(len(specs), dtype=torch.int32),
        "row_indptr": lens.cumsum(0).to(torch.int32),
        "seq_lens": torch.tensor([past + new for past, new in specs], dtype=torch.int32),
        "softmax_scale": 0.3,
        "latents": latents,
    }


def _by_hand(step: dict[str, Any]) -> torch.Tensor:
    """Each query alone, in float64, from the definition."""
    out = []
    starts = step["row_indptr"].tolist()
    for row, latents in enumerate(step["latents"]):
        past = latents.shape[0] - (starts[row + 1] - starts[row])
        for place, token in enumerate(range(starts[row], starts[row + 1])):
            seen = latents[: past + place + 1].double()
            heads = []
            for head in range(_H):
                keys = torch.cat((seen[:, :_C] @ step["w_uk"][head].double().T, seen[:, _C:]), 1)
                scores = keys @ step["q"][token, head].double() * step["softmax_scale"]
                heads.append(scores.softmax(0) @ (seen[:, :_C] @ step["w_uv"][head].double().T))
            out.append(torch.stack(heads))
    return torch.stack(out)


_SPECS = [[(0, 1)], [(0, 40)], [(37, 5), (0, 3), (64, 33)], [(15, 1), (16, 9)]]


@pytest.mark.parametrize("specs", _SPECS)
@pytest.mark.parametrize("form", ["reference", "absorbed", "expanded"])
def test_prefill_sees_the_prefix_and_itself(
    specs: list[tuple[int, int]], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = _step(specs)
    expected = _by_hand(step)
    del step["latents"]
    # Pieces smaller than a row, so that partial results are merged.
    monkeypatch.setattr(portable, "CHUNK_TOKENS", 13)
    monkeypatch.setattr(portable, "SCORE_BYTES", 4 * _H * 13 * 7)
    least = 0 if form == "expanded" else 1 << 30
    monkeypatch.setattr(portable, "crossover_tokens", lambda *sizes: least)
    with override("mla_prefill", "reference" if form == "reference" else "portable"):
        found = mla_prefill(**step)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_forms_cross_where_their_flops_do() -> None:
    crossing = portable.crossover_tokens(128, 128, 512)

    def absorbed(tokens: int) -> int:
        return tokens * 2 * (2 * 512 + 64)

    def expanded(tokens: int) -> int:
        return tokens * 2 * (128 + 64 + 128) + 2 * 512 * (128 + 128)

    assert absorbed(crossing) >= expanded(crossing)
    assert absorbed(crossing - 1) < expanded(crossing - 1)


def test_absorbed_decode_agrees_with_prefill() -> None:
    step = _step([(37, 1), (0, 1), (64, 1)])
    expected = _by_hand(step)
    workspace = make_mla_workspace(max_rows=4, num_heads=_H, q_len=1, device="cpu", latent_dim=_C)
    plan_mla_decode(workspace, step["seq_lens"], step["page_table"], step["row_slots"])
    absorbed = torch.einsum("thn,hnc->thc", step["q"][..., :_N], step["w_uk"])
    latents = mla_decode(
        torch.cat((absorbed, step["q"][..., _N:]), dim=-1),
        step["kv_pool_layer"],
        step["page_table"],
        step["row_slots"],
        step["seq_lens"],
        step["softmax_scale"],
        workspace,
    )
    found = torch.einsum("thc,hvc->thv", latents, step["w_uv"])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_store_norms_the_latent_and_rotates_pairs() -> None:
    generator = torch.Generator().manual_seed(2)
    q_rope = torch.randn(3, 2, 4, generator=generator)
    kv = torch.randn(3, 10, generator=generator)
    norm = torch.rand(6, generator=generator) + 0.5
    angles = torch.rand(9, 2, generator=generator) * 6
    pool = torch.zeros(4, 8, 10)
    positions = torch.tensor([5, 0, 8], dtype=torch.int32)
    slots = torch.tensor([17, 0, 31], dtype=torch.int32)
    before = q_rope.clone()
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    mla_kv_write(q_rope, kv, norm, 1e-6, positions, table, pool, slots)

    def rotated(vector: list[float], position: int) -> list[float]:
        out = [0.0] * 4
        for i in range(2):
            c, s = math.cos(angles[position, i]), math.sin(angles[position, i])
            out[i] = vector[i] * c - vector[i + 2] * s
            out[i + 2] = vector[i + 2] * c + vector[i] * s
        return out

    for token, (position, slot) in enumerate([(5, 17), (0, 0), (8, 31)]):
        raw = kv[token].tolist()
        size = math.sqrt(sum(v * v for v in raw[:6]) / 6 + 1e-6)
        latent = [v / size * w for v, w in zip(raw[:6], norm.tolist(), strict=True)]
        stored = pool[slot // 8, slot % 8]
        expected = torch.tensor(latent + rotated(raw[6:], position))
        torch.testing.assert_close(stored, expected, rtol=1e-5, atol=1e-6)
        for head in range(2):
            wanted = torch.tensor(rotated(before[token, head].tolist(), position))
            torch.testing.assert_close(q_rope[token, head], wanted, rtol=1e-5, atol=1e-6)
    assert int((pool.abs().sum(-1) > 0).sum()) == 3


@pytest.mark.parametrize("has_shared", [False, True])
def test_dense_experts_add_up_token_by_token(has_shared: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 10, generator=generator)
    gate_up = torch.randn(5, 12, 10, generator=generator) / 3
    down = torch.randn(5, 10, 6, generator=generator) / 3
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=generator)
    shared = torch.randn(7, 10, generator=generator) if has_shared else None
    found = moe_dense(x, ids.to(torch.int32), weights, gate_up, down, shared)
    for token in range(7):
        expected = torch.zeros(10) if shared is None else shared[token].clone()
        for choice in range(2):
            expert = int(ids[token, choice])
            gate, up = gate_up[expert, :6] @ x[token], gate_up[expert, 6:] @ x[token]
            hidden = gate / (1 + torch.exp(-gate)) * up
            expected += weights[token, choice] * (down[expert] @ hidden)
        torch.testing.assert_close(found[token], expected, rtol=1e-4, atol=1e-5)


def test_wrong_shapes_are_named() -> None:
    step = _step([(0, 2)])
    del step["latents"]
    with pytest.raises(ValueError, match="w_uv"):
        mla_prefill(**{**step, "w_uv": step["w_uv"][..., 1:]})
    with pytest.raises(ValueError, match="row_indptr"):
        mla_prefill(**{**step, "row_indptr": step["row_indptr"].long()})
    with pytest.raises(ValueError, match=r"q: got \[2, 3\]"):
        mla_prefill(**{**step, "q": step["q"][..., 0]})
    with pytest.raises(ValueError, match="kv_pool_layer: got"):
        mla_prefill(**{**step, "q": step["q"][..., 1:]})


def test_grouped_products_are_the_experts_one_by_one() -> None:
    """The GPU's form, called here on the CPU: an expert without tokens, ties, shared experts."""
    generator = torch.Generator().manual_seed(8)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / 4).to(torch.bfloat16)

    x, gate_up, down, shared = draw(9, 64), draw(8, 64, 64), draw(8, 64, 32), draw(9, 64)
    ids = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(9)])
    weights = torch.rand(9, 3, generator=generator)
    arguments = (x, ids.to(torch.int32), weights, gate_up, down, shared)
    expected = reference_moe(*arguments).float()
    found = grouped_moe(*arguments).float()
    assert float((found - expected).norm() / expected.norm()) < 4e-3
