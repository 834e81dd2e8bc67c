# SPDX-License-Identifier: Apache-2.0
"""The start compiles every form of a kernel that a step with prefill rows can ask for: one that is
first met in a request is compiled in its first token, for up to a second.

In processes of their own: kernels are chosen as on an H200, and launch nothing.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

# The first is what a lone prompt's steps have by default (engine.lone_token_budget).
MAX_TOKENS, LONGEST, MAX_SLOTS = 16384, 131072, 16


def _forms_met_late(kv: str) -> dict[str, int]:
    """By kernel, how many forms the start did not meet. Call it before Triton is imported."""
    from benchmarks.gpu.host_time import HostStep, prefill_rows
    from benchmarks.gpu.stub_device import stub_device
    from engine.execution.device_launcher import warm_up_steps

    rng = random.Random(kv)
    with stub_device() as launches:
        step = HostStep(launches, "v2-lite", 2, kv, pieces=True)
        for num, past, decodes in warm_up_steps(MAX_TOKENS, LONGEST, MAX_SLOTS):
            step.run(prefill_rows([(past, num)], decodes))
        met = {name: set(forms) for name, forms in launches.forms.items()}
        for _ in range(300):
            num_prefills = rng.choice((1, 1, 1, 2, 3))
            lens = [
                (
                    rng.choice((0, rng.randrange(1, 70_000), 64 * rng.randrange(1, 1000))),
                    rng.choice((800, rng.randrange(2, 300), 16 * rng.randrange(1, 80))),
                )
                for _ in range(num_prefills)
            ]
            step.run(prefill_rows(lens, rng.randrange(MAX_SLOTS - num_prefills)))
        for past in (0, 100, 8192, 60_000):  # of a prompt that has the engine to itself
            step.run(prefill_rows([(past, MAX_TOKENS)], 0))
            step.run(prefill_rows([(past, rng.randrange(4097, MAX_TOKENS))], 0))
    late = {name: len(forms - met.get(name, set())) for name, forms in launches.forms.items()}
    return {name: num for name, num in late.items() if num}


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_no_step_asks_for_a_form_that_the_start_did_not_meet(kv: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_compiled_forms", kv],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {}


if __name__ == "__main__":
    print(json.dumps(_forms_met_late(sys.argv[1])))
