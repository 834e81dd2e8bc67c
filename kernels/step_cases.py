# SPDX-License-Identifier: Apache-2.0
"""Random calls of what a step does beside attention: norms, linears, experts, sampling, moves.

For `python -m kernels verify` and `bench`. Does not know: implementations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from kernels.cases import Case
from kernels.layer_cases import KINDS, layer_run
from kernels.moe_routing import MoeRouting
from kernels.ops.activation import silu_and_mul
from kernels.ops.bitmask import apply_bitmask
from kernels.ops.draw import draw_tokens
from kernels.ops.edit import RowEdits, edit_rows
from kernels.ops.moe import moe_norm_route, moe_route, moe_w4
from kernels.ops.moe_dense import moe_dense
from kernels.ops.norm import add_rms_norm, rms_norm
from kernels.ops.page_copy import move_pages
from kernels.ops.step_ids import embed_rows, feed_ids, greedy_rows
from kernels.reference.quant import GROUP_OF_FORMAT, quantize_w4
from kernels.w4_layout import tile_w4, tile_w4_gate_up

_ROUTINGS = {
    "softmax": MoeRouting(num_experts=64, top_k=6),
    "softmax in groups of five": MoeRouting(num_experts=40, top_k=6, num_groups=8, groups_kept=3),
    "sigmoid in groups": MoeRouting(
        num_experts=32,
        top_k=4,
        score="sigmoid",
        num_groups=4,
        groups_kept=2,
        group_score="top2",
        renormalise=True,
        scale=2.5,
    ),
}
# temperature, top_k, top_p, min_p: greedy, free, each cut alone, and together
_DRAWS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (2.0, 0, 1.0, 0.05),
    (0.9, 50, 0.8, 0.01),
)


def to_device(value: Any, device: str) -> Any:
    """A weight of any layout with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    tensors = {
        field.name: getattr(value, field.name).to(device)
        for field in dataclasses.fields(value)
        if isinstance(getattr(value, field.name), torch.Tensor)
    }
    return dataclasses.replace(value, **tensors)


def _norm(device: str, dtype: torch.dtype, num: int, adds: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num)
    x, behind = torch.randn(2, num, 160, generator=generator).to(device, dtype)
    gain = (torch.rand(160, generator=generator) + 0.5).to(device)
    if adds:
        return torch.cat(add_rms_norm(x, behind, gain, 1e-6), dim=1)
    return rms_norm(x, gain, 1e-6)


def _silu(device: str, dtype: torch.dtype, num: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num)
    return silu_and_mul(torch.randn(num, 192, generator=generator).to(device, dtype))


def _bias(routing: MoeRouting, generator: torch.Generator) -> torch.Tensor | None:
    if routing.score != "sigmoid":
        return None
    return torch.randn(routing.num_experts, generator=generator) * 0.2


def _route(device: str, rule: str, num: int) -> torch.Tensor:
    """Weights by expert, whatever the order in which a token's are given."""
    routing, generator = _ROUTINGS[rule], torch.Generator().manual_seed(num)
    bias = _bias(routing, generator)
    logits = torch.randn(num, routing.num_experts, generator=generator).to(device)
    ids, weights = moe_route(logits, None if bias is None else bias.to(device), routing)
    by_expert = torch.zeros(num, routing.num_experts + 1, device=device)
    return by_expert.scatter_(1, ids.long(), weights)


def _norm_route(device: str, dtype: torch.dtype, rule: str, num: int) -> torch.Tensor:
    """The normed rows, and weights by expert.

    Scores lie far apart: a score is one entry of the row, and entries are evenly spread; what
    rounding does to them changes nobody's choice. Biases keep it so.
    """
    routing, num_shared, width = _ROUTINGS[rule], 2, 128
    generator = torch.Generator().manual_seed(num)
    count = routing.num_experts
    order = torch.rand(num, width, generator=generator).argsort(dim=1)
    x = torch.linspace(-3, 3, width)[order].to(device, dtype)
    gain = torch.rand(width, generator=generator) + 0.5
    router = torch.diag(1 / gain)[torch.randperm(width, generator=generator)[:count]]
    experts = torch.arange(count)
    bias = 2.0 * (experts * 5 // count) + experts % 2 if routing.score == "sigmoid" else None
    normed, ids, weights = moe_norm_route(
        x,
        gain.to(device),
        1e-6,
        router.to(device),
        None if bias is None else bias.float().to(device),
        routing,
        num_shared,
    )
    by_expert = torch.zeros(num, count + num_shared, device=device).scatter(1, ids.long(), weights)
    return torch.cat((normed.float(), by_expert), dim=1)


def _experts(device: str, dtype: torch.dtype, fmt: str, num: int, width: int) -> torch.Tensor:
    """Uneven: some experts have most tokens, some none."""
    count, hidden, top_k = 8, 128, 2
    generator = torch.Generator().manual_seed(num)

    def draw(*shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
        return values

    x = torch.randn(num, hidden, generator=generator).to(device, dtype)
    lean = torch.linspace(-2, 2, count)
    chosen = (torch.randn(num, count, generator=generator) + lean).topk(top_k)
    ids, weights = chosen.indices.int().to(device), chosen.values.sigmoid().to(device)
    shared = torch.randn(num, hidden, generator=generator).to(device, dtype)
    gate, up, down = (
        draw(count, *shape) for shape in ((width, hidden), (width, hidden), (hidden, width))
    )
    if fmt == "dense":
        gate_up = torch.cat((gate, up), dim=1).to(device, dtype)
        return moe_dense(x, ids, weights, gate_up, down.to(device, dtype), shared)
    packed = [quantize_w4(weight, fmt) for weight in (gate, up, down)]
    tiled = (tile_w4_gate_up(packed[0], packed[1]), tile_w4(packed[2]))
    first, second = (to_device(weight, device) for weight in tiled)
    return moe_w4(x, ids, weights, first, second, shared)


def _draw(device: str, vocab: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(_DRAWS), vocab, generator=generator) * spread
    logits[:, ::7] = float("-inf")
    temperature, top_k, top_p, min_p = (
        torch.tensor(column) for column in zip(*_DRAWS, strict=True)
    )
    chance = torch.rand(len(_DRAWS), generator=generator, dtype=torch.float64)
    given = (logits, temperature, top_k.int(), top_p, min_p, chance)
    return draw_tokens(*(tensor.to(device) for tensor in given))


def _edit(device: str, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).int()

    edits = RowEdits(
        rows=torch.tensor([4.0, 0.0, 2.0, 3.0], dtype=torch.float64),
        slots=torch.tensor([2.0, 0.0, 5.0, 1.0], dtype=torch.float64),
        repetition=torch.tensor([1.0, 1.5, 1.0, 0.5]),
        presence=torch.tensor([0.0, 0.25, 0.0, -1.0]),
        frequency=torch.tensor([0.0, 0.5, 0.0, 0.125]),
        masks=ints(-(2**31), 2**31, 6, -(-vocab // 32)),
        counts=ints(0, 8, 6, vocab),
        bias=torch.randn(6, vocab, generator=generator),
    )
    logits = (torch.randn(5, vocab, generator=generator) * 3).to(device)
    values, is_sound = edit_rows(logits, to_device(edits, device))
    return torch.cat((values, is_sound.float()[:, None]), dim=1)


def _bitmask(device: str, vocab: int) -> torch.Tensor:
    """A row of everything, one of nothing, and others."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator).to(device)
    masks = torch.randint(-(2**31), 2**31, (5, -(-vocab // 32)), generator=generator).int()
    masks[0], masks[1] = -1, 0
    apply_bitmask(logits, masks.to(device))
    return logits


def _greedy(device: str, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator)
    logits[1] = 1.5  # all equal: the first that is allowed wins
    logits[2, vocab // 2] = float("nan")
    logits[3, vocab // 3] = float("inf")
    masks = torch.randint(-(2**31), 2**31, (8, -(-vocab // 32)), generator=generator).int()
    masks[4] = 0
    next_ids = torch.full((8,), 77, dtype=torch.int32, device=device)
    token_ids = torch.full((6,), 88, dtype=torch.int32, device=device)
    rows = torch.arange(6, dtype=torch.float64, device=device)
    greedy_rows(logits.to(device), rows, rows + 1, masks.to(device), next_ids, token_ids)
    return torch.cat((token_ids, next_ids))


def _feed(device: str) -> torch.Tensor:
    ids = torch.tensor([5, -1, 900, -1, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([0, 3, 1, 2, 0], dtype=torch.int32, device=device)
    next_ids = torch.tensor([7, 8, 9, 500], dtype=torch.int32, device=device)
    return feed_ids(ids, slots, next_ids, 300)


def _embed(device: str, dtype: torch.dtype) -> torch.Tensor:
    table = torch.randn(50, 160, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return embed_rows(table, torch.tensor([3, 49, 0, 3], dtype=torch.int32, device=device), dtype)


def _move(device: str, is_out: bool) -> torch.Tensor:
    """Rows of the blob and pages that are not named stay as they are."""
    generator = torch.Generator().manual_seed(1)
    pool, blob = (
        torch.randint(0, 256, (rows, 3 * 520), generator=generator).to(torch.uint8)
        for rows in (9, 6)
    )
    pool = pool.to(device)
    blob = blob.pin_memory() if device == "cuda" else blob
    pages, slots = ([5, 0, 8], [2, 5, 0])
    index = [torch.tensor(ids, dtype=torch.int32, device=device) for ids in (pages, slots)]
    move_pages(pool, index[0], blob, is_out=is_out, slots=index[1])
    if device == "cuda":
        torch.cuda.synchronize()
    return torch.cat((pool.cpu(), blob))


def step_cases(device: str) -> dict[str, list[Case]]:
    """fp32 on a CPU, bf16 on a GPU."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    variant = "fp32" if device == "cpu" else "bf16"
    cases: dict[str, list[Case]] = {}

    def add(family: str, name: str, kind: str, run: Callable[[], torch.Tensor]) -> None:
        cases.setdefault(family, []).append(Case(f"{device} {name}", kind, run))

    for num in (1, 5, 33):
        for family, adds in (("rms_norm", False), ("add_rms_norm", True)):
            run = functools.partial(_norm, device, dtype, num, adds)
            add(family, f"{num} tokens", variant, run)
        add("silu_and_mul", f"{num} tokens", variant, functools.partial(_silu, device, dtype, num))
        for kind in KINDS:
            for family in ("linear", "norm_linear", "linear_add", "swiglu_linear"):
                if device == "cpu" and family != "linear":
                    continue  # these are layer_cases
                weigh = functools.partial(to_device, device=device)
                run = functools.partial(layer_run, family, kind, num, dtype, weigh)
                add(family, f"{kind} {num} tokens", variant, run)
    for num in (1, 5, 70):
        for rule in _ROUTINGS:
            run = functools.partial(_route, device, rule, num)
            add("moe_route", f"{rule} {num} tokens", "", run)
            run = functools.partial(_norm_route, device, dtype, rule, num)
            add("moe_norm_route", f"{rule} {num} tokens", variant, run)
    for num in (1, 3, 19, 70, 300):
        for fmt in ("dense", *GROUP_OF_FORMAT):
            run = functools.partial(_experts, device, dtype, fmt, num, 128)
            family = "moe_dense" if fmt == "dense" else "moe_w4"
            add(family, f"{fmt} {num} tokens", variant, run)
    for vocab, spread in ((150, 0.2), (400, 3.0), (1500, 3.0)):
        add("draw_tokens", f"{vocab} columns", "", functools.partial(_draw, device, vocab, spread))
        add("edit_rows", f"{vocab} columns", "", functools.partial(_edit, device, vocab))
        add("apply_bitmask", f"{vocab} columns", "", functools.partial(_bitmask, device, vocab))
        add("greedy_rows", f"{vocab} columns", "", functools.partial(_greedy, device, vocab))
    add("feed_ids", "five", "", functools.partial(_feed, device))
    add("embed_rows", "four", "", functools.partial(_embed, device, dtype))
    for is_out in (True, False):
        name = "out" if is_out else "in"
        add("move_pages", name, "", functools.partial(_move, device, is_out))
    return cases
