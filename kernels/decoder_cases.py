# SPDX-License-Identifier: Apache-2.0
"""Random llama stacks and ragged steps over them, for verification of fused decoders.

Does not know: implementations, real checkpoints.
"""

from __future__ import annotations

import functools

import torch

from kernels import ops
from kernels.cases import Case, RowSpec, paged_case, random_blocks

SHAPE = ops.LlamaShape(
    num_layers=2,
    hidden=96,
    ffn=160,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    vocab=211,
    rms_eps=1e-5,
)
# Three rope pairs of 16 a head, one KV head, a group that takes two passes.
WIDE_SHAPE = ops.LlamaShape(
    num_layers=1,
    hidden=64,
    ffn=32,
    num_heads=6,
    num_kv_heads=1,
    head_dim=96,
    vocab=64,
    rms_eps=1e-6,
)
_ROPE_THETA = 10000.0


def rope_table(max_positions: int, head_dim: int, theta: float = _ROPE_THETA) -> torch.Tensor:
    """Return fp32 [max_positions, head_dim]: cos of the head_dim / 2 angles, then their sin."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * theta**-exponent
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def random_stack(
    weight_format: str, shape: ops.LlamaShape = SHAPE, seed: int = 0, heads: str = "plain"
) -> ops.LlamaStack:
    """Return a decoder of random weights in one format ("q4_1", "q8_0" or "bf16").

    heads: what they have beyond rope, "bias", "norm" or "bias+norm".
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(num_rows: int, num_cols: int) -> ops.Weight:
        if weight_format == "bf16":
            values = torch.randn(num_rows, num_cols, generator=generator) / num_cols**0.5
            dense: torch.Tensor = values.to(torch.bfloat16)
            return dense
        return random_blocks(num_rows, num_cols, weight_format, generator)

    def norm(width: int = shape.hidden) -> torch.Tensor:
        return torch.rand(width, generator=generator) + 0.5

    def extras() -> dict[str, torch.Tensor]:
        found = {}
        if "bias" in heads:
            found["qkv_bias"] = torch.randn(qkv_width, generator=generator) / 2
        if "norm" in heads:
            found |= {"q_norm": norm(shape.head_dim), "k_norm": norm(shape.head_dim)}
        return found

    q_width = shape.num_heads * shape.head_dim
    qkv_width = q_width + 2 * shape.num_kv_heads * shape.head_dim
    layers = tuple(
        ops.LlamaLayer(
            input_norm=norm(),
            qkv=matrix(qkv_width, shape.hidden),
            attn_out=matrix(shape.hidden, q_width),
            post_norm=norm(),
            gate_up=matrix(2 * shape.ffn, shape.hidden),
            down=matrix(shape.hidden, shape.ffn),
            **extras(),
        )
        for _ in range(shape.num_layers)
    )
    embedding = matrix(shape.vocab, shape.hidden)
    return ops.LlamaStack(
        shape=shape,
        embedding=embedding,
        layers=layers,
        final_norm=norm(),
        lm_head=embedding,
        cos_sin=rope_table(4096, shape.head_dim),
    )


def _forward(
    shape: ops.LlamaShape,
    weight_format: str,
    specs: list[RowSpec],
    page_size: int,
    heads: str = "plain",
) -> torch.Tensor:
    stack = _cached_stack(shape, weight_format, heads)
    case = paged_case(
        specs,
        layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        seed=len(specs),
    )
    generator = torch.Generator().manual_seed(5)
    num_tokens = case.rows.positions.shape[0]
    input_ids = torch.randint(0, shape.vocab, (num_tokens,), generator=generator).to(torch.int32)
    sample_rows = torch.tensor(
        [row for row, (_, new) in enumerate(specs) if new > 0], dtype=torch.int32
    )
    logits = ops.llama_forward(stack, input_ids, case.rows, case.kv_pool, sample_rows)
    # The KV that the step wrote counts as much as its logits: one row of the result per token.
    mapping = case.rows.slot_mapping.long()
    by_token = case.kv_pool.transpose(1, 3)  # [num_pages, page_size, 2, layers, Hkv, D]
    written = by_token[mapping // page_size, mapping % page_size].float().flatten(1)
    width = max(written.shape[1], shape.vocab)
    pad = torch.nn.functional.pad
    padded = (pad(part, (0, width - part.shape[1])) for part in (logits, written))
    return torch.cat(tuple(padded))


@functools.cache
def _cached_stack(shape: ops.LlamaShape, weight_format: str, heads: str) -> ops.LlamaStack:
    return random_stack(weight_format, shape, heads=heads)


def decoder_cases() -> list[Case]:
    """Small and large steps, pure and mixed, in every weight format."""
    steps: dict[str, list[RowSpec]] = {
        "one token": [(0, 1)],
        "decode rows": [(5, 1), (63, 1), (64, 1), (200, 1)],
        "16 tokens": [(0, 9), (130, 1), (3, 6)],
        "17 tokens": [(0, 17)],
        "mixed": [(0, 65), (70, 1), (127, 3), (64, 40)],
        "longer than a slab": [(10, 530), (2, 1)],
    }
    page_sizes = (64, 64, 16, 64, 16, 64)
    cases = []
    for weight_format in ("q4_1", "q8_0", "bf16"):
        for page_size, (name, specs) in zip(page_sizes, steps.items(), strict=True):
            run = functools.partial(_forward, SHAPE, weight_format, specs, page_size)
            cases.append(Case(f"{name} {weight_format}", weight_format, run))
    for name in ("decode rows", "mixed"):
        run = functools.partial(_forward, WIDE_SHAPE, "q4_1", steps[name], 64)
        cases.append(Case(f"{name}, head_dim 96", "q4_1", run))
    for heads in ("bias", "norm", "bias+norm"):
        for name in ("decode rows", "mixed"):
            for weight_format in ("q4_1", "bf16"):
                run = functools.partial(_forward, SHAPE, weight_format, steps[name], 64, heads)
                cases.append(Case(f"{name} {weight_format}, {heads}", weight_format, run))
    run = functools.partial(_forward, WIDE_SHAPE, "q4_1", steps["mixed"], 64, "bias+norm")
    cases.append(Case("mixed, head_dim 96, bias+norm", "q4_1", run))
    return cases
