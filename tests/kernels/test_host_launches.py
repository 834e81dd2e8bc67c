# SPDX-License-Identifier: Apache-2.0
"""What one layer of a prefill step launches on a GPU, counted without one.

Each launch costs the host tens of microseconds, 27 times a step: one more is meant, or a mistake.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

# From the algorithm: norm, expansion and product of the first projection; rope and store; gather,
# keys, values, attention, merge; expansion, product and sum of the output projection; norm, scores
# and choice; sort, gather, two products and sum of the experts.
PREFILL = {
    "rms_norm_kernel": 2,
    "w4_expand_kernel": 2,
    "mla_kv_write_kernel": 1,
    "gather_latents_kernel": 1,
    "mla_prefill_hopper_kernel": 1,
    "mla_prefill_merge_kernel": 1,
    "moe_topk_kernel": 1,
    "moe_count_kernel": 1,
    "moe_place_kernel": 1,
    "moe_gather_kernel": 1,
    "moe_w4_hopper_kernel": 2,
    "moe_combine_kernel": 1,
    "torch.mm": 5,
    "torch.add_": 1,
}
# Beside decode rows: theirs of the attention, the output projection, and both parts joined.
DECODE_ROWS = {
    "mla_absorb_kernel": 1,
    "mla_decode_hopper_kernel": 1,
    "mla_merge_values_kernel": 1,
    "w4_rows_kernel": 1,
    "torch.cat": 1,
}


def _said(*arguments: str) -> Any:
    """The JSON of a process of its own: no test process loads triton."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def _launches(*arguments: str) -> dict[str, int]:
    said = _said("-m", "benchmarks.gpu.host_time", "--repeats", "1", *arguments)
    found: dict[str, int] = said["launches_a_layer"]
    return found


def test_a_layer_of_a_prefill_step_launches_what_it_needs_and_looks_up_each_form() -> None:
    """No name says "analysed": Triton's own look at the arguments costs as much as a launch."""
    assert _launches() == PREFILL


def test_decode_rows_beside_a_prefill_add_their_own_launches_alone() -> None:
    assert _launches("--decodes", "7") == {**PREFILL, **DECODE_ROWS}


def test_fp8_pages_are_decoded_where_they_are_gathered() -> None:
    gathers = {"gather_latents_kernel": 0, "gather_planes_kernel": 1}
    wanted = {name: num for name, num in {**PREFILL, **gathers}.items() if num}
    assert _launches("--kv", "fp8") == wanted


def test_in_captured_pieces_a_layer_launches_its_attention_and_one_graph() -> None:
    """Values go to the pieces' buffer by one copy of each kind of row."""
    attention = {
        "graph": 1,
        "mla_kv_write_kernel": 1,
        "gather_latents_kernel": 1,
        "mla_prefill_hopper_kernel": 1,
        "mla_prefill_merge_kernel": 1,
        "torch.mm": 2,
        "torch.copy_": 1,
    }
    assert _launches("--pieces") == attention
    decode_rows = {
        "mla_absorb_kernel": 1,
        "mla_decode_hopper_kernel": 1,
        "mla_merge_values_kernel": 1,
        "torch.copy_": 2,
    }
    assert _launches("--pieces", "--decodes", "7") == {**attention, **decode_rows}


def test_a_short_prefill_launches_less_and_expands_nothing() -> None:
    """Absorb, attention, merge, values; fp8 pages are decoded first; more than 64 tokens are
    absorbed in two launches. Values go where they belong without a copy."""
    short = {
        "graph": 1,
        "mla_absorb_kernel": 1,
        "mla_decode_hopper_kernel": 1,
        "mla_merge_kernel": 1,
        "torch.bmm": 1,
    }
    assert _launches("--pieces", "--new", "33") == short
    fp8 = {**short, "mla_expand_pages_kernel": 1}
    assert _launches("--pieces", "--new", "20", "--past", "4096", "--kv", "fp8") == fp8
    assert _launches("--pieces", "--new", "128") == {**short, "mla_absorb_kernel": 2}
    for beyond in (("--new", "129"), ("--new", "128", "--past", "4095")):
        assert _launches("--pieces", *beyond)["mla_prefill_hopper_kernel"] == 1


@pytest.mark.parametrize(("kv", "cases"), [("bf16", "8x1 8x4 8x8"), ("fp8", "8x1 8x2")])
def test_folded_rows_launch_what_rows_of_one_token_launch(kv: str, cases: str) -> None:
    """No gather in front and none behind; and the start compiles few kernels more."""
    found = _said("-m", "tests.kernels.folded_launches", kv, *cases.split())

    def families(layer: dict[str, float]) -> dict[str, float]:
        return {name.split("_fp8")[0]: num for name, num in layer.items()}

    one_token, *folded = (families(layer) for layer in found["layers"].values())
    assert one_token["mla_absorb_kernel"] == one_token["mla_merge_values_kernel"] == 1
    assert folded == [one_token] * len(folded)
    assert sum(found["added_forms"].values()) <= 10, found["added_forms"]


def test_groups_fill_a_tile_of_queries_on_hopper_in_bf16() -> None:
    script = (
        "import json, torch\n"
        "from benchmarks.gpu.stub_device import META, stub_device\n"
        "from kernels.ops.mla_decode_form import rows_of_group\n"
        "from kernels.selection import override\n"
        "with stub_device():\n"
        "    pool = torch.empty(1, 64, 576, dtype=torch.bfloat16, device=META)\n"
        "    planes = torch.empty(1, 64 * 656, dtype=torch.uint8, device=META)\n"
        "    def group(heads, layer=pool, dtype=torch.bfloat16):\n"
        "        return rows_of_group(heads, 512, 64, dtype, layer)\n"
        "    found = [group(heads) for heads in (1, 3, 16, 24, 33, 64, 128)]\n"
        "    found += [group(16, planes), group(16, pool.float(), torch.float32)]\n"
        "    with override('mla_decode_group', 'apart'):\n"
        "        found.append(group(16))\n"
        "    print(json.dumps(found))\n"
    )
    assert _said("-c", script) == [16, 16, 4, 2, 1, 1, 1, 1, 1, 1]
