# SPDX-License-Identifier: Apache-2.0
"""Latent attention of a step's prefill rows, each in the form that costs less.

Few new tokens on a long prefix attend in absorbed form, as decoded tokens do: a row of the kernel
is QUERY_TOKENS of them, all of one sequence. The first one is filled up in front with queries
whose results nobody reads, so each token of the others sees what it should. Other rows have keys
and values expanded from their whole prefix. Does not know: where the forms cross.
Legend: T tokens, H heads, N nope_dim, R rope_dim, V v_dim, C latent_dim, D = N + R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.mla_weights import INNER_EPS, MlaWeights
from engine.models.model import StepRows
from kernels.mla_workspace import MlaWorkspace, make_mla_workspace
from kernels.ops.mla import mla_absorb, mla_decode, mla_expand_pages, plan_mla_decode
from kernels.ops.mla_kv_write import mla_kv_write
from kernels.ops.mla_prefill import mla_prefill
from kernels.ops.mla_prefill_form import absorbs_prefill
from kernels.step_work import StepWork

QUERY_TOKENS = 8
# What `mla_absorb` takes in one launch.
_ABSORBED_AT_ONCE = 64
# Kernels differ by how many rows they are given, and compile for each number first met: rows
# without KV fill these up, then multiples of the last.
_KERNEL_ROWS = (4, 12, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Absorbed:
    """One row as `mla_decode` is given it, by every layer of a step in turn."""

    lead: int  # queries in front that are no token's
    queries: torch.Tensor  # [kernel rows * QUERY_TOKENS, H, C + R]
    slots: torch.Tensor  # int32 [kernel rows]
    seq_lens: torch.Tensor  # int32 [kernel rows]
    workspace: MlaWorkspace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Rows one behind the other that attend in one form; an absorbed one alone."""

    tokens: slice  # of the step
    slots: torch.Tensor  # int32 [R], on the host as far as the step has them there
    indptr: torch.Tensor  # int32 [R + 1], from 0
    seq_lens: torch.Tensor  # int32 [R]
    absorbed: _Absorbed | None
    # Of this run alone; None: the step's, which holds the runs. Naming it here would close a
    # circle, and a step's scratch (a gigabyte) would stay until some collection of garbage.
    own_work: StepWork | None


def prefill_values(
    q_THD: torch.Tensor,
    kv_TC: torch.Tensor,
    weights: MlaWeights,
    rows: StepRows,
    kv_pool_layer: torch.Tensor,
    cos_sin: torch.Tensor,
    softmax_scale: float,
    work: StepWork,
    out_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the latents of the step's prefill tokens; return their values [T, H * V], `out_TO`
    where it is given.

    Args:
        q_THD: before rope; may be overwritten.
        kv_TC: latents [T, C + R], before their norm.
        work: one for all layers of the step.
    """
    runs = work.keep("prefill runs", lambda: _runs(q_THD, weights, rows, kv_pool_layer))
    if out_TO is None:
        if len(runs) == 1 and runs[0].absorbed is None:
            args = (rows, kv_pool_layer, cos_sin, softmax_scale, work)
            return _expanded(runs[0], q_THD, kv_TC, weights, *args)
        out_TO = q_THD.new_empty(q_THD.shape[0], weights.w_uv.shape[0] * weights.w_uv.shape[1])
    for run in runs:
        mine = run.tokens
        args = (rows, kv_pool_layer, cos_sin, softmax_scale, run.own_work or work)
        if run.absorbed is None:
            out_TO[mine].copy_(_expanded(run, q_THD[mine], kv_TC[mine], weights, *args))
        else:
            attended = (run, run.absorbed, q_THD[mine], kv_TC[mine], weights)
            _attend_absorbed(*attended, *args, out_TO[mine])
    return out_TO


def _expanded(
    run: _Run,
    q_THD: torch.Tensor,
    kv_TC: torch.Tensor,
    weights: MlaWeights,
    rows: StepRows,
    kv_pool_layer: torch.Tensor,
    cos_sin: torch.Tensor,
    softmax_scale: float,
    work: StepWork,
) -> torch.Tensor:
    mla_kv_write(
        q_THD[..., weights.w_uk.shape[1] :],
        kv_TC,
        weights.kv_norm,
        INNER_EPS,
        rows.positions[run.tokens],
        cos_sin,
        kv_pool_layer,
        rows.slot_mapping[run.tokens],
    )
    o_THV = mla_prefill(
        q_THD,
        weights.w_uk,
        weights.w_uv,
        kv_pool_layer,
        rows.page_table,
        run.slots,
        run.indptr,
        run.seq_lens,
        softmax_scale,
        work,
    )
    return o_THV.reshape(q_THD.shape[0], -1)


def _attend_absorbed(
    run: _Run,
    absorbed: _Absorbed,
    q_THD: torch.Tensor,
    kv_TC: torch.Tensor,
    weights: MlaWeights,
    rows: StepRows,
    kv_pool_layer: torch.Tensor,
    cos_sin: torch.Tensor,
    softmax_scale: float,
    work: StepWork,
    out_TO: torch.Tensor,
) -> None:
    num_heads, _, latent_dim = weights.w_uk.shape
    num, lead = q_THD.shape[0], absorbed.lead
    positions, mapping = rows.positions[run.tokens], rows.slot_mapping[run.tokens]
    for first in range(0, num, _ABSORBED_AT_ONCE):
        some = slice(first, min(first + _ABSORBED_AT_ONCE, num))
        mla_absorb(
            q_THD[some],
            kv_TC[some],
            weights.kv_norm,
            INNER_EPS,
            positions[some],
            cos_sin,
            kv_pool_layer,
            mapping[some],
            weights.w_uk,
            absorbed.queries[lead + some.start : lead + some.stop],
        )
    table = rows.page_table
    if kv_pool_layer.dtype == torch.uint8:
        # So many queries read a tile that decoding it for each of them would cost more.
        kv_pool_layer, table = mla_expand_pages(
            kv_pool_layer,
            latent_dim,
            cos_sin.shape[1],
            table,
            run.slots,
            run.seq_lens,
            q_THD.dtype,
            work,
        )
    slots, seq_lens, workspace = absorbed.slots, absorbed.seq_lens, absorbed.workspace

    def plan() -> MlaWorkspace:
        plan_mla_decode(workspace, seq_lens, table, slots)
        return workspace

    work.keep("absorbed plan", plan)
    o_THC = mla_decode(
        absorbed.queries, kv_pool_layer, table, slots, seq_lens, softmax_scale, workspace
    )
    torch.bmm(
        o_THC[lead : lead + num].transpose(0, 1),
        weights.w_uv.transpose(1, 2),
        out=out_TO.view(num, num_heads, -1).transpose(0, 1),
    )


def _runs(
    q_THD: torch.Tensor,
    weights: MlaWeights,
    rows: StepRows,
    kv_pool_layer: torch.Tensor,
) -> list[_Run]:
    """The step's prefill rows in order, cut where the form changes."""
    num_rows = rows.num_prefill_rows
    slots, indptr, seq_lens = rows.prefill_on_host or (
        rows.row_slots[:num_rows],
        rows.row_indptr[: num_rows + 1],
        rows.seq_lens[:num_rows],
    )
    starts, lens = indptr.tolist(), seq_lens.tolist()
    new = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    cached = [length - num for length, num in zip(lens, new, strict=True)]
    forms = absorbs_prefill(new, cached, q_THD, kv_pool_layer, weights.w_uk)
    runs: list[_Run] = []
    first = 0
    while first < num_rows:
        end = first + 1
        while not forms[first] and end < num_rows and not forms[end]:
            end += 1
        some = slice(first, end)
        absorbed = None
        if forms[first]:
            slot = 0 if kv_pool_layer.dtype == torch.uint8 else int(slots[first])
            absorbed = _absorbed(new[first], lens[first], slot, q_THD, weights)
        runs.append(
            _Run(
                tokens=slice(starts[first], starts[end]),
                slots=slots[some],
                indptr=indptr[first : end + 1] - starts[first] if first else indptr[: end + 1],
                seq_lens=seq_lens[some],
                absorbed=absorbed,
                own_work=None if end - first == num_rows and absorbed is None else StepWork(),
            )
        )
        first = end
    return runs


def _absorbed(
    num: int, seq_len: int, slot: int, q_THD: torch.Tensor, weights: MlaWeights
) -> _Absorbed:
    """A row of `num` new tokens, the last of its `seq_len`."""
    num_heads, nope_dim, latent_dim = weights.w_uk.shape
    used = -(-num // QUERY_TOKENS)
    most = _KERNEL_ROWS[-1]
    held = next((size for size in _KERNEL_ROWS if size >= used), -(-used // most) * most)
    ends = [max(0, seq_len - QUERY_TOKENS * (used - 1 - row)) for row in range(used)]
    numbers = torch.tensor([[slot] * held, ends + [0] * (held - used)], dtype=torch.int32)
    slots, seq_lens = numbers.to(q_THD.device, non_blocking=True)
    width = latent_dim + q_THD.shape[2] - nope_dim
    return _Absorbed(
        lead=used * QUERY_TOKENS - num,
        queries=q_THD.new_zeros(held * QUERY_TOKENS, num_heads, width),
        slots=slots,
        seq_lens=seq_lens,
        workspace=make_mla_workspace(
            max_rows=max(held, most),
            num_heads=num_heads,
            q_len=QUERY_TOKENS,
            device=q_THD.device,
            latent_dim=latent_dim,
            may_start_early=False,  # the tokens of the row itself are too many
        ),
    )
