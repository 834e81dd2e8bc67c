# SPDX-License-Identifier: Apache-2.0
"""Child of test_amx_emulated.py: `python -m tests.kernels.amx_emulated EXTENSION` verifies the AMX
kernels of an extension that was built with MOORAGE_EMULATE_AMX, on a CPU without AMX. Prints a JSON
line per case: family, case, error (null where the kernel refuses the call), allowed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys

KERNEL = "cpu_amx"


def main() -> None:
    spec = importlib.util.spec_from_file_location("_cpu_kernels", sys.argv[1])
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    sys.modules["_cpu_kernels"] = extension  # before any of ours imports the one for this CPU
    spec.loader.exec_module(extension)

    from kernels import ops, platform  # noqa: F401 - ops registers every kernel
    from kernels.registry import REGISTRY
    from kernels.verify import all_cases, verify_case

    real = platform.cpu_capability()
    emulated = dataclasses.replace(real, features=real.features | {"amx_tile", "amx_bf16"})
    platform.cpu_capability = lambda: emulated  # type: ignore[assignment]
    for family, cases in all_cases().items():
        if KERNEL not in {spec.name for spec in REGISTRY.specs(family)}:
            continue
        for case in cases:
            print(json.dumps(dataclasses.asdict(verify_case(family, KERNEL, case))), flush=True)


if __name__ == "__main__":
    main()
