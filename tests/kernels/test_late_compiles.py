# SPDX-License-Identifier: Apache-2.0
"""A kernel compiled behind the start is named in the log, with how long it took."""

from __future__ import annotations

import logging

import pytest

from kernels._triton import triton
from kernels.late_compiles import report_late_compiles


def test_a_form_compiled_late_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = triton.knobs.runtime
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(runtime, name, None)
    report_late_compiles()
    caplog.set_level(logging.WARNING)
    # As Triton's JITFunction calls both (runtime/jit.py), before and behind a compilation.
    facts = {"fn": None, "compile": {}, "is_manual_warmup": False, "already_compiled": False}
    assert not runtime.jit_cache_hook(key="k", repr="gather[num_warps=4](x: *bf16)", **facts)
    assert caplog.records == []
    assert not runtime.jit_post_compile_hook(key="k", repr="gather[num_warps=4](x: *bf16)", **facts)
    (record,) = caplog.records
    assert "gather[num_warps=4](x: *bf16)" in record.getMessage()
