# SPDX-License-Identifier: Apache-2.0
"""The attention of a step's prefill rows in one layer after the other, in either form: for checks
and timings, on any device. Does not know: projections, models.

Legend: T tokens, H heads, N nope_dim, R rope_dim, V v_dim, C latent_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.timing import relative_error, time_calls_us
from engine.layers.mla_prefill import prefill_values
from engine.layers.mla_weights import INNER_EPS, MlaWeights
from engine.models.model import StepRows
from kernels.latent_planes import row_bytes
from kernels.ops.mla_kv_write import mla_kv_write
from kernels.selection import override
from kernels.step_work import StepWork

PAGE = 64
# Calls in turn read different layers: more bytes than the L2 cache of a GPU.
ROTATED_BYTES = 160 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """DeepSeek-V2-Lite's, unless said otherwise."""

    num_heads: int = 16
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    latent_dim: int = 512
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"


class PrefillLayers:
    """Rows (cached, new) over shuffled pages of `num_layers` layers. What no token owns is NaN.

    `q` [T, H, N + R] before rope and `kv` [T, C + R] before its norm are views with gaps, as a
    fused projection leaves them. `pools` has one layer's pool each.
    """

    def __init__(
        self,
        specs: list[tuple[int, int]],
        kv: str,
        sizes: LayerSizes,
        num_layers: int = 1,
    ) -> None:
        self.specs, self.sizes = specs, sizes
        like: dict[str, Any] = {"dtype": sizes.dtype, "device": sizes.device}
        generator = torch.Generator(sizes.device).manual_seed(sum(a + b for a, b in specs))

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            plain = torch.randn(*shape, generator=generator, device=sizes.device)
            return (plain * scale).to(sizes.dtype)

        lens = [past + new for past, new in specs]
        most = max(-(-length // PAGE) for length in lens) + 1
        num_pages = len(specs) * most + 1
        order = torch.randperm(num_pages, generator=generator, device=sizes.device)
        self.table = order[: len(specs) * most].view(-1, most).to(torch.int32)
        width = sizes.latent_dim + sizes.rope_dim
        if kv == "fp8":
            page_bytes = PAGE * row_bytes(sizes.latent_dim, sizes.rope_dim)
            shape = (num_pages, num_layers, page_bytes)
            pool = torch.full(shape, 0xFF, dtype=torch.uint8, device=sizes.device)
        else:
            pool = torch.full((num_pages, num_layers, PAGE, width), float("nan"), **like)
        self.pools = pool.unbind(1)
        half = sizes.rope_dim // 2
        speeds = 10000.0 ** -(torch.arange(half, device=sizes.device) / half)
        angles = torch.arange(max(lens), device=sizes.device)[:, None] * speeds
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        heads, latent = sizes.num_heads, sizes.latent_dim
        self.weights = MlaWeights(
            q_kv_down=torch.empty(0),
            q_norm=None,
            q_up=None,
            kv_norm=torch.rand(latent, generator=generator, device=sizes.device) + 0.5,
            w_uk=draw(heads, sizes.nope_dim, latent, scale=latent**-0.5),
            w_uv=draw(heads, sizes.v_dim, latent, scale=latent**-0.5),
            out=torch.empty(0),
        )
        self.scale = (sizes.nope_dim + sizes.rope_dim) ** -0.5
        for layer in range(num_layers):
            for row, (past, _) in enumerate(specs):
                if past:
                    self._write(layer, row, draw(past, width))
        num = sum(new for _, new in specs)
        q_width = heads * (sizes.nope_dim + sizes.rope_dim)
        fused = draw(num, q_width + width + 8)
        self.q = fused[:, :q_width].view(num, heads, sizes.nope_dim + sizes.rope_dim)
        self.kv = fused[:, q_width : q_width + width]
        self.rows = self._step_rows(num, lens)

    def _step_rows(self, num: int, lens: list[int]) -> StepRows:
        specs, device = self.specs, self.sizes.device
        news = torch.tensor([new for _, new in specs], dtype=torch.int32)
        indptr = torch.cat((torch.zeros(1, dtype=torch.int32), news.cumsum(0))).to(torch.int32)
        seq_lens, slots = torch.tensor(lens, dtype=torch.int32), torch.arange(len(lens))
        on_host = (slots.to(torch.int32), indptr, seq_lens)
        positions = torch.cat([torch.arange(past, past + new) for past, new in specs]).to(device)
        token_slots = slots.repeat_interleave(news).to(device)
        pages = self.table[token_slots, positions // PAGE]
        return StepRows(
            positions=positions.to(torch.int32),
            slot_mapping=(pages * PAGE + positions % PAGE).to(torch.int32),
            row_indptr=indptr.to(device),
            row_slots=on_host[0].to(device),
            seq_lens=seq_lens.to(device),
            page_table=self.table,
            page_size=PAGE,
            num_prefill_rows=len(specs),
            num_prefill_tokens=num,
            prefill_on_host=on_host,
        )

    def _write(self, layer: int, row: int, kv: torch.Tensor) -> None:
        at = torch.arange(kv.shape[0], device=kv.device)
        mla_kv_write(
            kv.new_zeros(kv.shape[0], 1, self.sizes.rope_dim),
            kv,
            self.weights.kv_norm,
            INNER_EPS,
            at.to(torch.int32),
            self.cos_sin,
            self.pools[layer],
            (self.table[row, at // PAGE] * PAGE + at % PAGE).to(torch.int32),
        )

    def run(
        self, layer: int = 0, work: StepWork | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Values [T, H * V] of one layer; work: of the step, None for one of its own."""
        return prefill_values(
            self.q.clone(),
            self.kv,
            self.weights,
            self.rows,
            self.pools[layer],
            self.cos_sin,
            self.scale,
            work or StepWork(),
            out,
        )


def time_forms(past: int, new: int, kv: str) -> dict[str, Any]:
    """Time one row's attention in both forms, us: from queries and latents before rope to values.
    The queries are copied once a call, which is in both."""
    token_bytes = row_bytes(512, 64) if kv == "fp8" else 2 * 576
    num_layers = max(2, -(-ROTATED_BYTES // (past * token_bytes)))
    layers = PrefillLayers([(past, new)], kv, LayerSizes(), num_layers)
    line: dict[str, Any] = {"op": "mla_prefill_form", "past": past, "new": new, "kv": kv}
    results = []
    for form in ("absorbed", "expanded"):
        with override("mla_prefill_form", form):
            work = StepWork()
            results.append(layers.run(0, work))
            calls = [partial(layers.run, layer, work) for layer in range(num_layers)]
            line[f"{form}_us"] = round(time_calls_us(calls, repeats=5), 1)
    line["rel_difference"] = relative_error(*results)
    return line


def form_lines() -> Iterator[dict[str, Any]]:
    """Both forms on both sides of where they cross."""
    for kv in ("bf16", "fp8"):
        for past in (8192, 65536):
            for new in (16, 32, 64, 96, 128):
                yield time_forms(past, new, kv)
