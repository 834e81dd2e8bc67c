# SPDX-License-Identifier: Apache-2.0
"""Random calls of the families of latent attention, for `python -m kernels verify` and `bench`.

What a kernel must not read (tokens beyond a sequence, pages of nobody) holds NaN. Does not know:
implementations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.cases import Case, RowSpec
from kernels.latent_planes import decode_rows, encode_latents, latent_planes, row_bytes
from kernels.mla_workspace import MlaWorkspace, make_mla_workspace
from kernels.ops.mla import (
    mla_absorb,
    mla_decode,
    mla_expand_pages,
    mla_output,
    mla_values,
    plan_mla_decode,
)
from kernels.ops.mla_kv_write import mla_kv_write
from kernels.ops.mla_prefill import mla_prefill

PAGE = 64
SCALE = 0.1
EPS = 1e-6
_RAGGED = (1, 0, 129, 64, 200)  # tokens of KV: ends of pages, and a row of padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a case runs, in what, and how large its heads are."""

    device: str
    dtype: torch.dtype
    heads: int
    latent: int
    rope: int
    nope: int
    value: int

    def draw(self, generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator) * scale
        return values.to(self.device, self.dtype)


HOST = Place(
    device="cpu", dtype=torch.float32, heads=3, latent=128, rope=16, nope=16, value=32
)  # fmt: skip
GPU = Place(
    device="cuda", dtype=torch.bfloat16, heads=16, latent=512, rope=64, nope=128, value=128
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Pool:
    """One layer of a pool of two, and who has which of its pages."""

    layer: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    lens: torch.Tensor


def _pool(place: Place, lens: tuple[int, ...], kv: str, generator: torch.Generator) -> _Pool:
    most = max(1, max(-(-length // PAGE) for length in lens))
    num_slots, num_pages = len(lens) + 2, len(lens) * most + 3
    order = torch.randperm(num_pages, generator=generator)[: len(lens) * most]
    slots = torch.randperm(num_slots, generator=generator)[: len(lens)]
    table = torch.zeros(num_slots, most, dtype=torch.int32)
    table[slots] = order.view(len(lens), most).int()
    width = place.latent + place.rope
    rows = torch.full((num_pages, PAGE, width), float("nan"))
    for slot, length in zip(slots.tolist(), lens, strict=True):
        for at in range(0, length, PAGE):
            num = min(PAGE, length - at)
            rows[table[slot, at // PAGE], :num] = torch.randn(num, width, generator=generator)
    index = (table, slots.int(), torch.tensor(lens, dtype=torch.int32))
    layer = _planes(rows, place) if kv == "fp8" else _plain(rows, place)
    return _Pool(layer, *(tensor.to(place.device) for tensor in index))


def _plain(rows: torch.Tensor, place: Place) -> torch.Tensor:
    pool = torch.full((rows.shape[0], 2, *rows.shape[1:]), float("nan"))
    pool[:, 1] = rows
    return pool.to(place.device, place.dtype)[:, 1]


def _planes(rows: torch.Tensor, place: Place) -> torch.Tensor:
    num_bytes = PAGE * row_bytes(place.latent, place.rope)
    pool = torch.full((rows.shape[0], 2, num_bytes), 0xFF, dtype=torch.uint8)
    planes = latent_planes(pool[:, 1], place.latent, place.rope)
    held = ~rows[..., 0].isnan()
    values, scales = encode_latents(rows[held][:, : place.latent])
    planes.values.view(torch.uint8)[held] = values.view(torch.uint8)
    planes.scales[held] = scales
    planes.rope[held] = rows[held][:, place.latent :].to(torch.bfloat16)
    return pool.to(place.device)[:, 1]


def _workspace(place: Place, num_rows: int, q_len: int) -> MlaWorkspace:
    return make_mla_workspace(
        max_rows=num_rows + 1,
        num_heads=place.heads,
        q_len=q_len,
        device=place.device,
        latent_dim=place.latent,
        num_processors=3 if place.device == "cpu" else None,
    )


def _decode(family: str, place: Place, lens: tuple[int, ...], q_len: int, kv: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(lens) + q_len)
    pool = _pool(place, lens, kv, generator)
    num = len(lens) * q_len
    q = place.draw(generator, num, place.heads, place.latent + place.rope)
    w_uv = place.draw(generator, place.heads, place.value, place.latent, scale=place.latent**-0.5)
    out_weight = place.draw(generator, 64, place.heads * place.value, scale=0.1)
    residual = place.draw(generator, num, 64)
    workspace = _workspace(place, len(lens), q_len)
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    plan_mla_decode(workspace, pool.lens, pool.table, pool.slots)
    args = (q, pool.layer, pool.table, pool.slots, pool.lens, SCALE, workspace)
    if family == "mla_decode":
        return mla_decode(*args).flatten(1)
    if family == "mla_values":
        return mla_values(*args, w_uv)
    return mla_output(*args, w_uv, out_weight, residual)


def _decode_cases(place: Place) -> dict[str, list[Case]]:
    cases: dict[str, list[Case]] = {}
    for family in ("mla_decode", "mla_values", "mla_output"):
        for kv in ("plain", "fp8"):
            for lens, q_len in ((_RAGGED, 1), ((1300,), 1), ((70, 256, 3), 3)):
                run = functools.partial(_decode, family, place, lens, q_len, kv)
                name = f"{place.device} {kv} KV of {list(lens)}, {q_len} query tokens"
                cases.setdefault(family, []).append(Case(name, _variant(place), run))
    return cases


def _written(place: Place, num: int, kv: str, absorbs: bool) -> torch.Tensor:
    """What is written, decoded, and the queries as they come out."""
    generator = torch.Generator().manual_seed(num)
    pool = _pool(place, (PAGE,) * 4, kv, generator)
    width = place.heads * (place.nope + place.rope)
    down = place.draw(generator, num, width + place.latent + place.rope)
    q = down[:, :width].view(num, place.heads, place.nope + place.rope)
    angles = torch.rand(50, place.rope // 2, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(place.device)
    gain = (torch.rand(place.latent, generator=generator) + 0.5).to(place.device)
    positions = torch.randint(0, 50, (num,), generator=generator, dtype=torch.int32)
    places = torch.randperm(4 * PAGE, generator=generator)[:num].int()
    where = (positions.to(place.device), table, pool.layer, places.to(place.device))
    if absorbs:
        w_uk = place.draw(generator, place.heads, place.nope, place.latent, scale=0.3)
        queries = mla_absorb(q, down[:, width:], gain, EPS, *where, w_uk)
    else:
        queries = q[..., place.nope :]
        mla_kv_write(queries, down[:, width:], gain, EPS, *where)
    pages, offsets = (places // PAGE).long().to(place.device), (places % PAGE).long()
    if kv == "fp8":
        planes = latent_planes(pool.layer, place.latent, place.rope)
        rows = decode_rows(planes, pages, place.dtype)[torch.arange(num), offsets]
    else:
        rows = pool.layer[pages, offsets.to(place.device)]
    return torch.cat((queries.flatten(1), rows), dim=1)


def _write_cases(place: Place) -> dict[str, list[Case]]:
    cases: dict[str, list[Case]] = {}
    for family in ("mla_absorb", "mla_kv_write"):
        for kv in ("plain", "fp8"):
            for num in (1, 19, 70):
                run = functools.partial(_written, place, num, kv, family == "mla_absorb")
                variant = "fp8" if kv == "fp8" else _variant(place)
                case = Case(f"{place.device} {kv} KV of {num} tokens", variant, run)
                cases.setdefault(family, []).append(case)
    return cases


def _prefill(place: Place, specs: tuple[RowSpec, ...], kv: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(specs))
    pool = _pool(place, tuple(past + new for past, new in specs), kv, generator)
    indptr = torch.tensor([0, *(new for _, new in specs)]).cumsum(0).int()
    num, scale = int(indptr[-1]), place.latent**-0.5
    found = mla_prefill(
        place.draw(generator, num, place.heads, place.nope + place.rope),
        place.draw(generator, place.heads, place.nope, place.latent, scale=scale),
        place.draw(generator, place.heads, place.value, place.latent, scale=scale),
        pool.layer,
        pool.table,
        pool.slots.cpu(),
        indptr,
        pool.lens.cpu(),
        SCALE,
    )
    return found.flatten(1)


def _prefill_cases(place: Place) -> dict[str, list[Case]]:
    steps: tuple[tuple[RowSpec, ...], ...] = (
        ((0, 17),),
        ((100, 40), (0, 64), (63, 2)),
        ((300, 130), (7, 1)),
    )
    families = {"mla_prefill": "plain", "mla_prefill_planes": "fp8"}
    return {
        family: [
            Case(
                f"{place.device} rows of {list(specs)} (cached, new)",
                _variant(place),
                functools.partial(_prefill, place, specs, kv),
            )
            for specs in steps
        ]
        for family, kv in families.items()
    }


def _expanded(place: Place) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    lens = (200, 64)
    pool = _pool(place, lens, "fp8", generator)
    rows, table = mla_expand_pages(
        pool.layer,
        place.latent,
        place.rope,
        pool.table,
        pool.slots.cpu(),
        pool.lens.cpu(),
        place.dtype,
    )
    parts = [
        rows[table[row, : -(-length // PAGE)].long()].flatten(0, 1)[:length]
        for row, length in enumerate(lens)
    ]
    return torch.cat(parts)


def _variant(place: Place) -> str:
    return "fp32" if place.dtype == torch.float32 else "bf16"


def latent_cases(place: Place) -> dict[str, list[Case]]:
    """Decode steps, writes, prefills and expansions at the ends of pages."""
    run: Callable[[], torch.Tensor] = functools.partial(_expanded, place)
    return {
        **_decode_cases(place),
        **_write_cases(place),
        **_prefill_cases(place),
        "mla_expand_pages": [Case(f"{place.device} pages of two rows", _variant(place), run)],
    }
