# SPDX-License-Identifier: Apache-2.0
"""Says when Triton compiles a kernel in somebody's first token, which the start should have done.

Does not know: which forms there are.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from kernels._triton import triton

logger = logging.getLogger(__name__)


def report_late_compiles() -> None:
    """From now on, log each form of a kernel that is compiled or read from Triton's cache."""
    start_s: dict[Any, float] = {}

    def begin(*, key: Any, **_: Any) -> None:
        start_s[key] = time.perf_counter()

    def end(*, key: Any, repr: str, **_: Any) -> None:
        took_ms = (time.perf_counter() - start_s.pop(key, time.perf_counter())) * 1e3
        logger.warning("compiled after the start, in %.0f ms: %s", took_ms, repr)

    triton.knobs.runtime.jit_cache_hook = begin
    triton.knobs.runtime.jit_post_compile_hook = end
