# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.kernels.amx_emulated EXTENSION`: verify the AMX kernels of an extension that was
built with MOORAGE_EMULATE_AMX, on a CPU without AMX. Exits with the command's own code."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys

FAMILIES = ("linear", "paged_attention", "llama_forward")


def main() -> None:
    spec = importlib.util.spec_from_file_location("_cpu_kernels", sys.argv[1])
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    sys.modules["_cpu_kernels"] = extension  # before any of ours imports the one for this CPU
    spec.loader.exec_module(extension)

    from kernels import platform
    from kernels.__main__ import main as kernels_main

    real = platform.cpu_capability()
    emulated = dataclasses.replace(real, features=real.features | {"amx_tile", "amx_bf16"})
    platform.cpu_capability = lambda: emulated  # type: ignore[assignment]
    kernels_main(["verify", "--verbose", *FAMILIES])


if __name__ == "__main__":
    main()
