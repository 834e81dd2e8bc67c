# SPDX-License-Identifier: Apache-2.0
"""The fused llama stack of the compiled extension.

Does not know: requests, files. Arithmetic: bf16 KV, fp32 residual stream; up to 16 tokens take
8-bit dot products with 4- and 8-bit weights (activations quantised per 32), more
take bf16 AMX tiles.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

import _cpu_kernels as ext
from kernels.cpu.levels import register_levels
from kernels.cpu.packing import PACKABLE_FORMATS, pack
from kernels.errors import KernelInputError
from kernels.llama_stack import LlamaStack, PagedRows
from kernels.signature import CallSignature

_MIXES = {
    "+".join(name for index, name in enumerate(sorted(PACKABLE_FORMATS)) if mask >> index & 1)
    for mask in range(1, 1 << len(PACKABLE_FORMATS))
}


def _refuses(signature: CallSignature) -> str | None:
    head_dim = int(signature.trait("head_dim"))
    if head_dim % 32 or head_dim > 256:
        return f"head_dim is {head_dim}, it takes multiples of 32 up to 256"
    for name in ("hidden", "ffn"):
        if int(signature.trait(name)) % 32:
            return f"{name} is {signature.trait(name)}, it takes multiples of 32"
    return None


def _values(extra: torch.Tensor | None) -> np.ndarray:
    """Empty where a layer has no such thing."""
    return np.empty(0, np.float32) if extra is None else extra.float().contiguous().numpy()


def build_model(stack: LlamaStack) -> ext.LlamaModel:
    """Repack every weight of the stack, once; about 1 s for 135 M parameters."""
    found: ext.LlamaModel | None = stack.derived.get("cpu_model")
    if found is not None:
        return found
    shape = stack.shape
    chain = ext.ArenaChain()
    config = ext.LlamaConfig(
        shape.num_layers,
        shape.hidden,
        shape.ffn,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.vocab,
        shape.rms_eps,
    )
    layers = [
        ext.make_layer(
            layer.input_norm.float().contiguous().numpy(),
            pack(layer.qkv, chain),
            pack(layer.attn_out, chain),
            layer.post_norm.float().contiguous().numpy(),
            pack(layer.gate_up, chain),
            pack(layer.down, chain),
            *(_values(extra) for extra in (layer.qkv_bias, layer.q_norm, layer.k_norm)),
        )
        for layer in stack.layers
    ]
    embedding = pack(stack.embedding, chain)
    lm_head = embedding if stack.lm_head is stack.embedding else pack(stack.lm_head, chain)
    model = ext.LlamaModel(
        config,
        embedding,
        lm_head,
        layers,
        stack.final_norm.float().contiguous().numpy(),
        stack.cos_sin.float().contiguous().numpy(),
    )
    stack.derived["cpu_model"] = model
    return model


def llama_forward(
    level: str,
    stack: LlamaStack,
    input_ids: torch.Tensor,
    rows: PagedRows,
    kv_pool: torch.Tensor,
    sample_rows: torch.Tensor,
) -> torch.Tensor:
    """One call into C++ for the whole step, with the GIL released."""
    model = build_model(stack)
    logits = torch.empty(sample_rows.shape[0], stack.shape.vocab)
    try:
        model.forward(
            input_ids.numpy(),
            rows.positions.numpy(),
            rows.slot_mapping.numpy(),
            rows.row_indptr.numpy(),
            rows.row_slots.numpy(),
            rows.seq_lens.numpy(),
            rows.page_table.numpy(),
            kv_pool.view(torch.int16).view(-1).numpy(),
            rows.page_size,
            sample_rows.numpy(),
            logits.numpy(),
            level,
        )
    except ValueError as error:
        raise KernelInputError.of_extension(error) from error
    return logits


register_levels(
    "llama_forward",
    lambda level: functools.partial(llama_forward, level),
    formats={
        "kv": {"bf16"},
        "weight": _MIXES,
        "lm_head": PACKABLE_FORMATS,
        "embedding": PACKABLE_FORMATS,
        "heads": {"plain", "bias", "norm", "bias+norm"},
    },
    refuses=_refuses,
)
