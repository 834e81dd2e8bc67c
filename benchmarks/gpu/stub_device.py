# SPDX-License-Identifier: Apache-2.0
"""A machine without a GPU that chooses and "launches" kernels as an H200 would: what a step costs
the host.

Tensors live on torch's meta device: they have shapes and cost a dispatch, hold nothing and compute
nothing. A Triton launch calls a form that does nothing but count. Does not know: models.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels.registry
import kernels.selection
from kernels._triton import triton
from kernels.platform import Capability
from kernels.signature import CallSignature

META = torch.device("meta")
_H200 = Capability(device="cuda", sm=(9, 0))
_PROPERTIES = types.SimpleNamespace(multi_processor_count=132)
# Operators that launch nothing on a device.
_FREE = {
    *("view", "as_strided", "slice", "select", "transpose", "t", "permute", "unsqueeze", "expand"),
    *("_unsafe_view", "detach", "alias", "unbind", "split_with_sizes", "_reshape_alias", "squeeze"),
    *("empty", "empty_strided", "new_empty", "empty_like", "split", "lift_fresh", "numpy_T"),
}


class Launches:
    """Launches by name: kernels of ours, and torch's operators behind "torch."; behind "analysed."
    how often Triton looked at all arguments to find a kernel's compiled form."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        # By kernel, the forms that Triton would have compiled, each once.
        self.forms: dict[str, set[str]] = {}

    def take(self) -> dict[str, int]:
        """What was launched since the last call."""
        taken = dict(sorted(self.counts.items()))
        self.counts.clear()
        return taken


class _Form:
    """A compiled kernel whose launch is counted."""

    def __init__(self, name: str, launches: Launches) -> None:
        self._name = name
        self._counts = launches.counts

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def runner(*arguments: object, stream: object = None) -> None:
            self._counts[self._name] += 1

        return runner


class _Driver:
    """What Triton asks of a GPU's driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        compiler = importlib.import_module("triton.backends.compiler")
        return compiler.GPUTarget("cuda", 90, 32)


class CountTorch(TorchDispatchMode):
    """Counts what torch itself would launch on a device. Slow: not for a run that is timed."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._counts = launches.counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = out[0] if isinstance(out, (tuple, list)) else out
        if name not in _FREE and isinstance(made, torch.Tensor) and made.device == META:
            self._counts[f"torch.{name}"] += 1
        return out


@contextmanager
def quick_products() -> Iterator[None]:
    """While it lasts, torch's products cost what an allocation does: on meta tensors they are
    Python, on a GPU they are not."""

    def mm(
        a: torch.Tensor,
        b: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is not None:
            return out
        return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype, device=a.device)

    def bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is not None:
            return out
        return torch.empty(*a.shape[:2], b.shape[2], dtype=a.dtype, device=a.device)

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)

    with (
        mock.patch.object(torch, "mm", mm),
        mock.patch.object(torch, "bmm", bmm),
        mock.patch.object(torch.nn.functional, "linear", linear),
    ):
        yield


@contextmanager
def stub_device() -> Iterator[Launches]:
    """While it lasts, ops on meta tensors run the kernels of an H200, and launch nothing.

    Enter it before anything imports `kernels.triton`: its launch wrappers keep what they find.
    """
    launches = Launches()
    real = kernels.registry.KernelSpec.reason_against
    address = torch.Tensor.data_ptr

    def data_ptr(tensor: torch.Tensor) -> int:
        """Where a view begins in what it is of: compiled forms know which addresses 16 divides."""
        if tensor.device != META:
            return address(tensor)
        return tensor.storage_offset() * tensor.element_size()

    forms: dict[Any, _Form] = {}

    def reason_against(spec: Any, signature: CallSignature, capability: Capability) -> str | None:
        return real(spec, dataclasses.replace(signature, device="cuda"), _H200)

    def run(jitted: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> _Form:
        # Triton's analysis of the arguments, without what compiles and launches.
        _, keys, _, _, analyse = jitted.device_caches[0]
        _, facts, chosen = analyse(*args, debug=False, **options)
        keys.setdefault((tuple(facts), str(chosen)), None)
        name = jitted.fn.__name__
        launches.forms.setdefault(name, set()).add(f"{facts} {chosen}")
        launches.counts[f"analysed.{name}"] += 1
        form = forms.setdefault(name, _Form(name, launches))
        form[grid](*args)
        return form

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(kernels.registry.KernelSpec, "reason_against", reason_against))
        enter(mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)))
        enter(mock.patch.object(torch.cuda, "get_device_properties", lambda *_: _PROPERTIES))
        enter(mock.patch.object(triton.JITFunction, "run", run))
        enter(mock.patch.object(torch.Tensor, "data_ptr", data_ptr))
        triton.runtime.driver.set_active(_Driver())
        importlib.import_module("kernels.triton")  # registers them, as a GPU would have it
        enter(torch.no_grad())
        yield launches
