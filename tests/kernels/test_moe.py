# SPDX-License-Identifier: Apache-2.0
"""Expert routing and the W4 mixture of experts, on the CPU through the public ops."""

from __future__ import annotations

import pytest
import torch

from kernels.errors import KernelInputError
from kernels.moe_routing import MoeRouting
from kernels.ops.moe import moe_route, moe_w4
from kernels.reference.quant import dequantize_w4, quantize_w4
from kernels.w4_layout import tile_w4, tile_w4_gate_up


def test_softmax_routing_takes_the_best_experts_with_their_probabilities() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 16)
    ids, weights = moe_route(logits, None, MoeRouting(num_experts=16, top_k=3))
    for token in range(7):
        p = [float(x) for x in torch.exp(logits[token]) / torch.exp(logits[token]).sum()]
        best = [e for _, e in sorted((-value, e) for e, value in enumerate(p))[:3]]
        assert ids[token].tolist() == best
        assert weights[token].tolist() == pytest.approx([p[e] for e in best], rel=1e-5)


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    routing = MoeRouting(num_experts=4, top_k=2, score="sigmoid", renormalise=True, scale=2.5)
    ids, weights = moe_route(logits, bias, routing)
    a, b = torch.sigmoid(torch.tensor([-1.0, 2.0])).tolist()
    assert ids.tolist() == [[3, 0]]
    assert weights[0].tolist() == pytest.approx([2.5 * a / (a + b), 2.5 * b / (a + b)], rel=1e-6)


def test_only_experts_of_the_kept_groups_are_chosen() -> None:
    # Group 1 has the single best expert, group 0 the best pair.
    logits = torch.tensor([[3.0, 3.0, 3.5, -9.0, 0.0, 0.0]])
    by_best = MoeRouting(num_experts=6, top_k=1, num_groups=3, groups_kept=1)
    by_pair = MoeRouting(
        num_experts=6, top_k=1, num_groups=3, groups_kept=1, group_score="top2", score="sigmoid"
    )
    assert moe_route(logits, None, by_best)[0].tolist() == [[2]]
    assert moe_route(logits, None, by_pair)[0].tolist() == [[0]]


def test_a_tie_goes_to_the_lower_expert() -> None:
    ids, _ = moe_route(torch.zeros(1, 8), None, MoeRouting(num_experts=8, top_k=3))
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 17}, "top_k: got 17; allowed: 1 to 16"),
        ({"num_groups": 3}, "num_groups: got 3; allowed: a divisor of 8 experts"),
        ({"groups_kept": 2}, "groups_kept: got 2; allowed: 1 to 1"),
        ({"num_groups": 4, "top_k": 3}, "top_k: got 3; allowed: at most 2 eligible experts"),
    ],
)
def test_routing_numbers_that_do_not_fit_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        MoeRouting(**({"num_experts": 8, "top_k": 2} | change))  # type: ignore[arg-type]


def _experts(fmt: str) -> tuple[list[torch.Tensor], object, object]:
    torch.manual_seed(5)
    gate, up = (quantize_w4(torch.randn(4, 64, 128) * 0.1, fmt) for _ in range(2))
    down = quantize_w4(torch.randn(4, 128, 64) * 0.1, fmt)
    dense = [dequantize_w4(w) for w in (gate, up, down)]
    return dense, tile_w4_gate_up(gate, up), tile_w4(down)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxint4"])
def test_the_layer_is_the_weighted_sum_of_each_tokens_experts(fmt: str) -> None:
    (gate, up, down), gate_up_tiled, down_tiled = _experts(fmt)
    x = torch.randn(5, 128)
    ids = torch.tensor([[0, 3], [1, 0], [3, 1], [0, 1], [3, 0]], dtype=torch.int32)
    weights = torch.rand(5, 2)
    shared = torch.randn(5, 128)
    wanted = shared.double()
    for token in range(5):
        for choice in range(2):
            e = int(ids[token, choice])
            h = torch.nn.functional.silu(gate[e].double() @ x[token].double())
            y = down[e].double() @ (h * (up[e].double() @ x[token].double()))
            wanted[token] += y * weights[token, choice]
    actual = moe_w4(x, ids, weights, gate_up_tiled, down_tiled, shared)  # type: ignore[arg-type]
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_layer_whose_matrices_do_not_match_is_refused() -> None:
    _, gate_up, _ = _experts("nvfp4")
    _, _, down = _experts("mxfp4")
    x, ids = torch.randn(1, 128), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(KernelInputError, match=r"down: got \('mxfp4', 4\); .*nvfp4"):
        moe_w4(x, ids, torch.ones(1, 2), gate_up, down)  # type: ignore[arg-type]
    with pytest.raises(KernelInputError, match="gate_up.num_cols: got 128; .* 64"):
        moe_w4(x[:, :64], ids, torch.ones(1, 2), gate_up, down)  # type: ignore[arg-type]
