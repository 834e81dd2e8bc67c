# SPDX-License-Identifier: Apache-2.0
"""Folded decode rows: each token sees what it sees in a row of its own, and attention gives it
what the definition gives; nothing comes of places that no token has."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpu.prefill_layer import PAGE, LayerSizes, PrefillLayers
from engine.execution import decode_inputs
from engine.execution.batch import ForwardBatch
from engine.execution.decode_inputs import DecodeInputs
from engine.execution.folding import (
    chains_of,
    choose_q_len,
    fill_folded,
    folded_rows,
    usable_forms,
)
from engine.execution.host_ring import HostRing
from kernels import selection
from kernels.errors import KernelInputError
from kernels.fixed_order import FIXED_ORDER
from kernels.ops.mla import mla_absorb
from kernels.ops.mla_decode_form import FoldForm, fold_forms
from kernels.platform import Capability
from kernels.selection import explain_selection, override
from kernels.signature import CallSignature
from kernels.triton import mla, mla_fp8
from tests.fakes.attention_by_hand import attention_by_hand
from tests.fakes.folded_layers import FoldedLayers

FORMS = (FoldForm(4, 1.05), FoldForm(8, 1.8))


def _batch(chains: list[tuple[int, int, int]]) -> ForwardBatch:
    """Rows of one token: chains (slot, first position, tokens)."""
    rows = [(slot, first + place) for slot, first, num in chains for place in range(num)]
    slots, positions = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    num = len(rows)
    return ForwardBatch(
        step_id=0,
        input_ids=positions * 3,
        positions=positions,
        slot_mapping=slots * 1000 + positions,
        row_indptr=torch.arange(num + 1, dtype=torch.int32),
        row_slots=slots,
        seq_lens=positions + 1,
        sample_rows=torch.arange(num, dtype=torch.int32),
        page_table=torch.empty(0, dtype=torch.int32),
        page_copies=torch.empty((0, 3), dtype=torch.int32),
    )


def _random_chains(rng: random.Random, most: int) -> list[tuple[int, int, int]]:
    chains, left, slots = [], most, list(range(20))
    rng.shuffle(slots)
    while left and (not chains or rng.random() < 0.8):
        num = rng.choice((1, 1, 2, 3, rng.randrange(1, 17)))
        num = min(num, left)
        chains.append((slots.pop(), rng.choice((0, 1, 62, 63, 64, rng.randrange(5000))), num))
        left -= num
    return chains


@pytest.mark.parametrize("seed", range(60))
def test_each_token_sees_in_its_place_what_it_sees_in_a_row_of_its_own(seed: int) -> None:
    rng = random.Random(seed)
    chains = _random_chains(rng, 16)
    batch = _batch(chains)
    found = chains_of(batch)
    assert list(zip(found.slots, found.ends - found.lens, found.lens, strict=True)) == chains
    num, sentinel = batch.row_slots.shape[0], 20
    size = num + rng.randrange(4)
    for q_len in (2, 4, 8):
        columns = np.full((3, size), -7, dtype=np.int32)
        num_rows = fill_folded(found, q_len, sentinel, columns)
        places, slots, seq_lens = columns.tolist()
        assert num_rows == sum(-(-tokens // q_len) for _, _, tokens in chains)
        for token in range(num):
            row, query = divmod(places[token], q_len)
            # As mla_decode defines it: query i of a row sees all but the last q_len - 1 - i.
            assert seq_lens[row] - q_len + query + 1 == int(batch.seq_lens[token])
            assert slots[row] == int(batch.row_slots[token]) and row < num_rows
        for token in range(num, size):
            row = places[token] // q_len
            assert num_rows <= row < size
        assert len(set(places)) == size
        assert all(length == 0 for length in seq_lens[num_rows:])
        assert set(slots[num_rows:]) <= {sentinel}


def test_rows_of_other_sequences_or_of_the_same_far_apart_are_not_one_chain() -> None:
    for chains in ([(3, 10, 1), (4, 11, 1)], [(3, 10, 2), (3, 30, 2)], [(3, 11, 1), (3, 10, 1)]):
        assert len(chains_of(_batch(chains)).lens) == 2


@pytest.mark.parametrize(
    ("chains", "q_len"),
    [
        ([(0, 5000, 1)], 1),
        ([(slot, 5000, 1) for slot in range(8)], 1),
        ([(0, 5000, 2)], 4),
        ([(0, 5000, 4)], 4),
        ([(0, 5000, 5)], 8),  # two rows of four are 2.1 passes, one of eight 1.8
        ([(0, 5000, 8)], 8),
        ([(0, 5000, 9)], 4),  # 3.15 against 3.6
        ([(0, 5000, 5), *((slot, 5000, 1) for slot in range(1, 12))], 4),
        # The one that drafts is short: not worth 5 % of the long ones.
        ([(0, 10, 5), *((slot, 60000, 1) for slot in range(1, 6))], 1),
    ],
)
def test_rows_are_folded_to_what_reads_least(
    chains: list[tuple[int, int, int]], q_len: int
) -> None:
    assert choose_q_len(chains_of(_batch(chains)), FORMS) == q_len


@pytest.mark.parametrize(
    ("chains", "q_len"),
    [
        ([(0, 8192, 5)], 1),  # 32,800 tokens are spared: fewer than folding costs
        ([(0, 65536, 2)], 4),  # 1.05 of 65,536 instead of 2
        ([(0, 49000, 2)], 1),
        ([(slot, 8192, 4) for slot in range(3)], 4),  # three times 24,000
    ],
)
def test_rows_are_folded_where_it_spares_more_than_it_costs(
    chains: list[tuple[int, int, int]], q_len: int
) -> None:
    forms = [replace(form, fixed=50_000) for form in FORMS]
    assert choose_q_len(chains_of(_batch(chains)), forms) == q_len


def test_forms_fill_tiles_of_query_rows() -> None:
    def forms(num_heads: int, *, fp8: bool = False) -> list[int]:
        layer = torch.empty(1, 64, 576, dtype=torch.bfloat16)
        if fp8:
            layer = torch.empty(1, 64 * 656, dtype=torch.uint8)
        return [form.q_len for form in fold_forms(num_heads, 512, 64, torch.bfloat16, layer)]

    assert forms(16) == forms(16, fp8=True) == []  # unless asked for
    with override("mla_decode_form", "folded"):
        assert forms(16) == [4, 8]
        assert forms(4) == [8]
        assert forms(32) == forms(128) == [2, 4, 8]
        assert forms(16, fp8=True) == [2]
        assert forms(4, fp8=True) == [8]
        assert forms(32, fp8=True) == []
    assert FIXED_ORDER["mla_decode_form"] == "rows"  # engine.deterministic


@pytest.mark.parametrize("kv", ["bf16", "fp8_planes"])
@pytest.mark.parametrize(
    ("sm", "dims", "form"),
    [
        ((9, 0), (16, 512, 64), "folded_on_hopper"),
        ((10, 0), (16, 512, 64), "rows"),
        ((8, 0), (16, 512, 64), "rows"),
        ((9, 0), (16, 256, 64), "rows"),
    ],
)
def test_rows_are_folded_unasked_where_the_kernels_run_whose_costs_are_known(
    monkeypatch: pytest.MonkeyPatch,
    kv: str,
    sm: tuple[int, int],
    dims: tuple[int, int, int],
    form: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: sm)
    monkeypatch.setattr(selection, "capability_of", lambda device: Capability(device=device, sm=sm))
    for module in (mla, mla_fp8):
        monkeypatch.setattr(module, "HAS_GLUON_HOPPER", True)
    names = ("num_heads", "latent_dim", "rope_dim")
    pool = (("page_size", 64), ("page_stride_rows_exact", kv == "bf16"))
    traits = (*zip(names, dims, strict=True), *pool)
    call = CallSignature("mla_decode_form", "cuda", (("q", "bf16"), ("kv", kv)), traits)
    chosen = explain_selection(call).chosen
    assert chosen is not None and chosen.name == form


def test_only_forms_that_a_step_can_gain_by_are_captured() -> None:
    def q_lens(num_tokens: int, chain: int) -> list[int]:
        return [form.q_len for form in usable_forms(FORMS, num_tokens, chain)]

    assert q_lens(1, 9) == q_lens(16, 1) == []
    assert q_lens(2, 9) == q_lens(4, 9) == q_lens(16, 2) == q_lens(16, 4) == [4]
    assert q_lens(8, 9) == q_lens(16, 5) == [4, 8]


@pytest.mark.parametrize(
    ("num_heads", "q_lens"), [(4, [8]), (16, [4, 8]), (32, [2, 4]), (64, [2]), (128, [])]
)
def test_forms_that_are_never_the_cheapest_are_not_captured(
    num_heads: int, q_lens: list[int]
) -> None:
    """Each has graphs of its own, and scratch that grows with heads: 0.5 GB at 128 and q_len 8."""
    layer = torch.empty(1, 64, 576, dtype=torch.bfloat16)
    with override("mla_decode_form", "folded"):
        forms = fold_forms(num_heads, 512, 64, torch.bfloat16, layer)
    usable = usable_forms(forms, 16, 9)
    assert [form.q_len for form in usable] == q_lens
    rng = random.Random(num_heads)
    for _ in range(300):
        chains = chains_of(_batch(_random_chains(rng, rng.randint(1, 16))))
        assert choose_q_len(chains, usable) == choose_q_len(chains, forms)


@pytest.mark.parametrize("seed", range(20))
def test_no_step_is_folded_to_what_was_not_captured(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    sizes, forms, each = [1, 2, 4, 8, 16, 24], [], 1.0
    for q_len in (2, 4, 8):
        each *= rng.uniform(0.5, 0.95)  # a token costs less the more of them share a row
        forms.append(FoldForm(q_len, each * q_len))
    inputs = DecodeInputs(
        sizes,
        torch.zeros(21, 4, dtype=torch.int32),
        page_size=16,
        sentinel_slot=20,
        sentinel_page=3,
        forms=forms,
        drafted_tokens=16,
        longest_chain=9,
    )
    assert inputs.q_lens(24) == (1,)
    ring, met = HostRing(torch.device("cpu"), 64, 24, 1, 1), set()
    for _ in range(50):
        batch = _batch(_random_chains(rng, rng.choice(sizes)))
        num = batch.row_slots.shape[0]
        size = next(size for size in sizes if size >= num)
        ring.advance()
        q_len = inputs.fill(batch, size, ring)
        assert q_len in inputs.q_lens(size)
        rows = inputs.rows(size, q_len)
        assert torch.equal(rows.slot_mapping[:num], batch.slot_mapping)
        assert set(rows.slot_mapping[num:].tolist()) <= {3 * 16}
        assert (rows.folded is None) == (q_len == 1)
        met.add(q_len)
    assert len(met) > 1
    for chosen in (1, 8):  # as benchmarks choose for it
        monkeypatch.setattr(decode_inputs, "choose_q_len", lambda *_, chosen=chosen: chosen)
        assert inputs.fill(_batch([(0, 50, 8)]), 8, ring) == chosen


def test_on_the_host_rows_are_folded_without_padding() -> None:
    found = folded_rows(_batch([(2, 9, 5), (1, 63, 1), (7, 0, 3)]), FORMS[:1])
    assert found is not None and found.q_len == 4
    assert found.row_slots.tolist() == [2, 2, 1, 7]
    assert found.seq_lens.tolist() == [10, 14, 64, 3]
    assert found.places.tolist() == [3, 4, 5, 6, 7, 11, 13, 14, 15]
    assert folded_rows(_batch([(2, 9, 1), (1, 63, 1)]), FORMS) is None
    assert folded_rows(_batch([(2, 9, 5)]), ()) is None


_SIZES = LayerSizes(
    num_heads=2,
    nope_dim=6,
    rope_dim=4,
    v_dim=5,
    latent_dim=128,
    dtype=torch.float32,
    device="cpu",
)
# (past, tokens of the step): drafts over page borders, rows shorter than q_len, many and none.
_STEPS = [
    [(0, 1), (0, 3)],
    [(63, 2), (64, 1), (62, 5), (1, 4)],
    [(126, 9), (500, 1)],
    [(5000, 5)],
    [(60, 16)],
]


@pytest.mark.parametrize("kv", ["plain", "fp8"])
@pytest.mark.parametrize("specs", _STEPS)
@pytest.mark.parametrize("q_len", [2, 4, 8])
def test_folded_rows_give_the_values_of_the_definition(
    specs: list[tuple[int, int]], q_len: int, kv: str
) -> None:
    num = sum(new for _, new in specs)
    step = FoldedLayers(PrefillLayers(specs, kv, _SIZES), q_len, num + 3)
    found = step.run()
    wanted = attention_by_hand(step.layers)
    torch.testing.assert_close(found[:num].double(), wanted, rtol=1e-4, atol=1e-5)
    assert not bool(found[num:].any())  # padding: rows without KV
    # Whatever stands where no token is.
    again = FoldedLayers(PrefillLayers(specs, kv, _SIZES), q_len, num + 3)
    assert torch.equal(again.run(no_tokens=float("nan")), found)


@pytest.mark.parametrize("kv", ["plain", "fp8"])
def test_only_the_steps_tokens_and_the_page_of_nobody_are_written(kv: str) -> None:
    specs = [(63, 2), (64, 1), (30, 5)]
    step = FoldedLayers(PrefillLayers(specs, kv, _SIZES), 4, 16)
    before = step.layers.pools[0].clone()
    step.run()
    changed = step.layers.pools[0].view(torch.uint8) != before.view(torch.uint8)
    pages = set(changed.flatten(1).any(dim=1).nonzero()[:, 0].tolist())
    table = step.layers.table
    mine = [(0, 63), (0, 64), (1, 64), *((2, at) for at in range(30, 35))]
    assert pages - {step.sentinel_page} == {int(table[row, at // PAGE]) for row, at in mine}
    if kv == "plain":
        places = changed.flatten(2).any(dim=2).nonzero().tolist()
        wanted = {(int(table[row, at // PAGE]), at % PAGE) for row, at in mine}
        wanted.add((step.sentinel_page, 0))
        assert {tuple(place) for place in places} == wanted


def test_places_without_room_for_them_are_refused() -> None:
    step = FoldedLayers(PrefillLayers([(5, 2)], "plain", _SIZES), 2, 2)
    layers = step.layers

    def absorb(out: torch.Tensor | None, places: torch.Tensor) -> None:
        mla_absorb(
            step.q,
            step.kv,
            step.weights.kv_norm,
            1e-6,
            step.rows.positions,
            layers.cos_sin,
            layers.pools[0],
            step.rows.slot_mapping,
            step.weights.w_uk,
            out,
            places,
        )

    with pytest.raises(KernelInputError, match="out"):
        absorb(None, step.folded.places)
    with pytest.raises(KernelInputError, match="places"):
        absorb(step.queries(0.0), step.folded.places[:1])
    with pytest.raises(KernelInputError, match="places"):
        absorb(step.queries(0.0), step.folded.places.long())
