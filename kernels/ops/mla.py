# SPDX-License-Identifier: Apache-2.0
"""Public op: absorbed MLA decode over the paged latent KV. Does not know: implementations."""

from __future__ import annotations

import torch

from kernels.errors import KernelInputError
from kernels.latent_planes import latent_planes
from kernels.mla_workspace import MlaWorkspace
from kernels.ops.linear import SMALL_BATCH_TOKENS, LinearWeight, linear_format
from kernels.selection import select_kernel
from kernels.signature import CallSignature, expect_dtype, expect_shape, format_of
from kernels.step_work import StepWork


def kv_format(kv_pool_layer: torch.Tensor) -> str:
    """Return the selector's format name of one layer of the pool."""
    is_bytes = kv_pool_layer.dtype == torch.uint8
    return "fp8_planes" if is_bytes else format_of(kv_pool_layer.dtype)


def pool_traits(
    kv_pool_layer: torch.Tensor, latent_dim: int, rope_dim: int
) -> tuple[tuple[str, int | bool], ...]:
    """Traits of a pool: page size, and whether pages are a whole number of rows apart.

    Raises:
        KernelInputError: the pool has another width, or a page's rows are not contiguous.
    """
    if kv_pool_layer.dtype == torch.uint8:
        page_size = latent_planes(kv_pool_layer, latent_dim, rope_dim).page_size
        return (("page_size", page_size), ("page_stride_rows_exact", False))
    width = latent_dim + rope_dim
    expect_shape("kv_pool_layer", kv_pool_layer, (None, None, width))
    if kv_pool_layer.stride()[1:] != (width, 1):
        allowed = f"rows of a page contiguous: (any, {width}, 1)"
        raise KernelInputError("kv_pool_layer.stride", list(kv_pool_layer.stride()), allowed)
    exact = kv_pool_layer.stride(0) % width == 0
    return (("page_size", kv_pool_layer.shape[1]), ("page_stride_rows_exact", exact))


def plan_mla_decode(
    workspace: MlaWorkspace,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
) -> None:
    """Cut the batch's KV into equal runs; once per step, before any layer's `mla_decode`. Where the
    workspace has groups, what rows of a group share is in them once.

    Args:
        workspace: its plan is overwritten, on the device, without a synchronisation.
        seq_lens: int32 [R], R at most workspace.max_rows.
        page_table: int32 [M, P], as `mla_decode` will get it.
        row_slots: int32 [R].

    Raises:
        KernelInputError: if a tensor is not int32 or seq_lens too long.
    """
    for name, index in (
        ("seq_lens", seq_lens),
        ("page_table", page_table),
        ("row_slots", row_slots),
    ):
        expect_dtype(name, index, torch.int32)
    expect_shape("row_slots", row_slots, tuple(seq_lens.shape))
    if seq_lens.shape[0] > workspace.max_rows:
        raise KernelInputError("seq_lens", seq_lens.shape[0], f"at most {workspace.max_rows} rows")
    kernel = select_kernel(CallSignature("mla_plan", seq_lens.device.type, ()))
    kernel.fn(workspace, seq_lens, page_table, row_slots)


def mla_decode(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
) -> torch.Tensor:
    """Return [R * q_len, H, latent_dim] in q.dtype: attention over the latents, up-projection left
    to the caller.

    Row r owns the query tokens [r * q_len, (r + 1) * q_len), the last of its seq_lens[r] tokens,
    whose latents already lie in the pool; query i sees up to its own position. A row with
    seq_lens[r] = 0 (padding) yields zeros.

    Args:
        q: [R * q_len, H, latent_dim + rope_dim], contiguous: the absorbed part, then the rope part.
        kv_pool_layer: [num_pages, page_size, latent_dim + rope_dim], a view of the pool whose rows
            are contiguous within a page; or fp8 planes, uint8 [num_pages, page bytes]
            (kernels/latent_planes.py).
        page_table: int32 [M, P], the pages of each slot's sequence in order.
        row_slots: int32 [R], row of the page table.
        seq_lens: int32 [R], tokens of KV after this step.
        softmax_scale: factor on q . k.
        workspace: planned for these seq_lens with `plan_mla_decode`; q_len and H are its own.

    Raises:
        KernelInputError: if shapes disagree or an index tensor is not int32.
    """
    num_rows = row_slots.shape[0]
    width = q.shape[-1]
    expect_shape("q", q, (num_rows * workspace.q_len, workspace.num_heads, None))
    expect_shape("page_table", page_table, (None, None))
    expect_shape("seq_lens", seq_lens, (num_rows,))
    for name, index in (
        ("page_table", page_table),
        ("row_slots", row_slots),
        ("seq_lens", seq_lens),
    ):
        expect_dtype(name, index, torch.int32)
    if not q.is_contiguous():
        raise KernelInputError("q.stride", list(q.stride()), "contiguous")
    rope_dim = width - workspace.latent_dim
    formats = (("q", format_of(q.dtype)), ("kv", kv_format(kv_pool_layer)))
    traits = (
        ("latent_dim", workspace.latent_dim),
        ("rope_dim", rope_dim),
        ("query_rows", workspace.num_heads * workspace.q_len),
        *pool_traits(kv_pool_layer, workspace.latent_dim, rope_dim),
    )
    kernel = select_kernel(CallSignature("mla_decode", q.device.type, formats, traits))
    out: torch.Tensor = kernel.fn(
        q,
        kv_pool_layer,
        page_table,
        row_slots,
        seq_lens,
        softmax_scale,
        workspace.latent_dim,
        workspace,
    )
    return out


def mla_absorb(
    q: torch.Tensor,
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    w_uk: torch.Tensor,
    out: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the step's latents as `mla_kv_write` does; return the queries as `mla_decode` takes
    them, [T, H, latent_dim + rope_dim], a new tensor or `out`.

    Args:
        q: [T, H, nope_dim + rope_dim], before rope; its last axis contiguous. May be overwritten.
        w_uk: [H, nope_dim, latent_dim], contiguous, q's dtype.
        kv, norm_weight, eps, positions, cos_sin, kv_pool_layer, slot_mapping: see `mla_kv_write`.
        out: where to, contiguous, q's dtype.
        places: int32 [T], where in `out` [N, H, latent_dim + rope_dim] each token's queries go, no
            two to one place; the rest of it stays. None: in order.

    Raises:
        KernelInputError: if shapes disagree or an index tensor is not int32.
    """
    num_heads, nope_dim, latent_dim = w_uk.shape
    num_tokens, rope_dim = q.shape[0], cos_sin.shape[1]
    expect_shape("q", q, (None, num_heads, nope_dim + rope_dim))
    expect_shape("kv", kv, (num_tokens, latent_dim + rope_dim))
    for name, index in (("positions", positions), ("slot_mapping", slot_mapping)):
        expect_shape(name, index, (num_tokens,))
        expect_dtype(name, index, torch.int32)
    if out is None:
        if places is not None:
            raise KernelInputError("out", None, "a tensor, as places are in it")
        out = q.new_empty(num_tokens, num_heads, latent_dim + rope_dim)
    num_places = num_tokens if places is None else None
    expect_shape("out", out, (num_places, num_heads, latent_dim + rope_dim))
    _expect_places(places, num_tokens)
    formats = (("q", format_of(q.dtype)), ("kv", kv_format(kv_pool_layer)))
    traits = (
        ("nope_dim", nope_dim),
        ("latent_dim", latent_dim),
        ("rope_dim", rope_dim),
        ("num_tokens_up_to_64", num_tokens <= 64),
        ("has_places", places is not None),
        *pool_traits(kv_pool_layer, latent_dim, rope_dim),
    )
    kernel = select_kernel(CallSignature("mla_absorb", q.device.type, formats, traits))
    args = (q, kv, norm_weight, eps, positions, cos_sin, kv_pool_layer, slot_mapping, w_uk, out)
    kernel.fn(*args, **_given(places))
    return out


def _given(places: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A kernel of a plugin need not know of places, and refuses `has_places` then."""
    return {} if places is None else {"places": places}


def _expect_places(places: torch.Tensor | None, num_tokens: int) -> None:
    if places is not None:
        expect_shape("places", places, (num_tokens,))
        expect_dtype("places", places, torch.int32)


def _values_traits(
    q: torch.Tensor, kv_pool_layer: torch.Tensor, workspace: MlaWorkspace, w_uv: torch.Tensor
) -> tuple[tuple[str, int | bool], ...]:
    """Of a call with `mla_values` in it.

    Raises:
        KernelInputError: if shapes disagree.
    """
    num_heads, v_dim, latent_dim = w_uv.shape
    expect_shape("q", q, (None, num_heads, None))
    expect_shape("w_uv", w_uv, (workspace.num_heads, None, workspace.latent_dim))
    rope_dim = q.shape[-1] - latent_dim
    return (
        ("latent_dim", latent_dim),
        ("rope_dim", rope_dim),
        ("v_dim", v_dim),
        ("q_len", workspace.q_len),
        ("query_rows", num_heads * workspace.q_len),
        *pool_traits(kv_pool_layer, latent_dim, rope_dim),
    )


def mla_values(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
    w_uv: torch.Tensor,
) -> torch.Tensor:
    """Return [T, H * v_dim] in q.dtype: `mla_decode`, each head then multiplied by its w_uv.

    Args:
        q, kv_pool_layer, page_table, row_slots, seq_lens, softmax_scale, workspace: see
            `mla_decode`; they are checked there.
        w_uv: [H, v_dim, latent_dim], contiguous, q's dtype.

    Raises:
        KernelInputError: if shapes disagree.
    """
    traits = _values_traits(q, kv_pool_layer, workspace, w_uv)
    formats = (("q", format_of(q.dtype)), ("kv", kv_format(kv_pool_layer)))
    kernel = select_kernel(CallSignature("mla_values", q.device.type, formats, traits))
    out: torch.Tensor = kernel.fn(
        q, kv_pool_layer, page_table, row_slots, seq_lens, softmax_scale, workspace, w_uv
    )
    return out


def mla_output(
    q: torch.Tensor,
    kv_pool_layer: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    workspace: MlaWorkspace,
    w_uv: torch.Tensor,
    out_weight: LinearWeight,
    residual: torch.Tensor,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return residual + linear(values, out_weight) [T, hidden], a new tensor; `values` are what
    `mla_decode` returns, each head multiplied by its w_uv.

    Args:
        q, kv_pool_layer, page_table, row_slots, seq_lens, softmax_scale, workspace: see
            `mla_decode`; they are checked there.
        w_uv: [H, v_dim, latent_dim], contiguous, q's dtype.
        out_weight: [hidden, H * v_dim], as `linear` takes it.
        residual: [T, hidden], q's dtype.
        places: int32 [T], which of the results of `mla_decode` is each token's; nobody reads the
            others. None: in order.

    Raises:
        KernelInputError: if shapes disagree.
    """
    values = _values_traits(q, kv_pool_layer, workspace, w_uv)
    num_tokens = q.shape[0] if places is None else residual.shape[0]
    expect_shape("residual", residual, (num_tokens, out_weight.shape[0]))
    _expect_places(places, num_tokens)
    width = w_uv.shape[0] * w_uv.shape[1]
    if out_weight.shape[1] != width:
        raise KernelInputError("out_weight", list(out_weight.shape), f"[any, {width}]")
    formats = (
        ("q", format_of(q.dtype)),
        ("kv", kv_format(kv_pool_layer)),
        ("weight", linear_format(out_weight)),
    )
    traits = (
        *values,
        ("small_batch", num_tokens <= SMALL_BATCH_TOKENS),
        ("up_to_8_tokens", num_tokens <= 8),
        ("has_places", places is not None),
        ("num_rows", out_weight.shape[0]),
        ("num_cols", out_weight.shape[1]),
    )
    kernel = select_kernel(CallSignature("mla_output", q.device.type, formats, traits))
    out: torch.Tensor = kernel.fn(
        q,
        kv_pool_layer,
        page_table,
        row_slots,
        seq_lens,
        softmax_scale,
        workspace,
        w_uv,
        out_weight,
        residual,
        **_given(places),
    )
    return out


def mla_expand_pages(
    kv_pool_layer: torch.Tensor,
    latent_dim: int,
    rope_dim: int,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    dtype: torch.dtype,
    work: StepWork | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows [n, page_size, latent_dim + rope_dim] in dtype, page table int32 [R, P]): the
    rows' pages out of fp8 planes, and where they now lie: row r's pages first in entry r.

    Args:
        kv_pool_layer: fp8 planes, uint8 [num_pages, page bytes].
        row_slots, seq_lens: int32 [R] on the host.
        work: one for all layers of a step, whose rows are the same; None keeps nothing.

    Raises:
        KernelInputError: if shapes disagree or an index tensor is not int32.
    """
    expect_dtype("kv_pool_layer", kv_pool_layer, torch.uint8)
    planes = latent_planes(kv_pool_layer, latent_dim, rope_dim)
    expect_shape("seq_lens", seq_lens, tuple(row_slots.shape))
    for name, index in (("row_slots", row_slots), ("seq_lens", seq_lens)):
        expect_dtype(name, index, torch.int32)
    pages = [-(-length // planes.page_size) for length in seq_lens.tolist()]
    formats = (("out", format_of(dtype)),)
    kernel = select_kernel(CallSignature("mla_expand_pages", kv_pool_layer.device.type, formats))
    rows, table = kernel.fn(planes, page_table, row_slots, pages, dtype, work)
    return rows, table
