# SPDX-License-Identifier: Apache-2.0
"""The one import of Triton and Gluon; every kernel file takes its names from here.

Does not know: which kernels exist, or whether a GPU is there. `HAS_GLUON_HOPPER` says whether this
Triton carries the explicit-layout language the Hopper kernels are written in.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra.cuda import (  # type: ignore[import-untyped]
    gdc_launch_dependents,
    gdc_wait,
)

# Gluon has no interpreter: under TRITON_INTERPRET its standard library does not even import.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

HAS_GLUON_HOPPER = False
gluon: Any = None
gl: Any = None
hopper: Any = None
TensorDescriptor: Any = None
if not INTERPRETED:
    try:
        gluon = importlib.import_module("triton.experimental.gluon")
        gl = importlib.import_module("triton.experimental.gluon.language")
        hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
        TensorDescriptor = importlib.import_module(
            "triton.experimental.gluon.nvidia.hopper"
        ).TensorDescriptor
        HAS_GLUON_HOPPER = True
    except ImportError:  # a Triton built without the experimental package
        pass

__all__ = [
    "HAS_GLUON_HOPPER",
    "INTERPRETED",
    "TensorDescriptor",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "hopper",
    "tl",
    "triton",
]
