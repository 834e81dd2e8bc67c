# SPDX-License-Identifier: Apache-2.0
"""What a figure was measured on and with: hardware, versions, source. Does not know: figures."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import torch

from benchmarks.source_tree import source_facts


def machine_facts() -> dict[str, Any]:
    """The first line of a benchmark's results."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda or "",
        **source_facts(),
        "date": time.strftime("%Y-%m-%d"),
    }
