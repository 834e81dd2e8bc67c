# SPDX-License-Identifier: Apache-2.0
"""Child of test_verify.py: the registered Triton kernels, run by the interpreter (no GPU, fp32) on
the cases of `python -m kernels verify`.

Each is taken for one of a CPU, and for one that takes fp32. Prints a JSON line per kernel.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from dataclasses import replace
from unittest import mock

import torch

# The interpreter rounds to e4m3 towards zero, a GPU to nearest (triton_decode_interpreted.py).
ROUNDED_OTHERWISE = ("mla_absorb", "mla_kv_write")


def take_for_cpu_kernels() -> None:
    """Every Triton kernel of a GPU, in the registry again."""
    from kernels.registry import REGISTRY

    for family in REGISTRY.families():
        for spec in reversed(REGISTRY.specs(family)):
            if spec.device != "cuda" or not spec.fn.__module__.startswith("kernels.triton"):
                continue
            formats = {
                argument: names | {"fp32"} if "bf16" in names else names
                for argument, names in spec.formats.items()
            }
            REGISTRY.remove(family, spec.name)
            REGISTRY.add(replace(spec, device="any", min_sm=(0, 0), formats=formats))


def main(families: list[str]) -> None:
    import kernels.triton  # noqa: F401 - registers them
    from kernels.verify import verify_family

    take_for_cpu_kernels()
    for family in families:
        num_run, failed = Counter[str](), list[str]()
        for verdict in verify_family(family):
            if family in ROUNDED_OTHERWISE and " fp8 " in verdict.case:
                continue
            num_run[verdict.kernel] += verdict.error is not None
            if not verdict.passes:
                failed.append(f"{verdict.kernel}: {verdict.case} {verdict.error}")
        print(json.dumps({"family": family, "run": num_run, "failed": failed}), flush=True)


if __name__ == "__main__":
    with (
        warnings.catch_warnings(),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy, of arithmetic with NaN
        main(sys.argv[1:])
