# SPDX-License-Identifier: Apache-2.0
"""Repeated launches of a Triton kernel without its argument analysis. Does not know: kernels.

Triton looks at every argument of every launch to find the compiled form that suits them (types,
alignment, the number one), 20 us of Python and more; an eager step has hundreds of launches. Here
the form is found by a short key over the same facts, and is the one that Triton chose for it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from kernels._triton import INTERPRETED, TensorDescriptor, triton

Kernel = TypeVar("Kernel")

_INT32_END = 1 << 31


def _facts(argument: Any) -> Any:
    """All that a compiled form may depend on in an argument."""
    kind = type(argument)
    if kind is torch.Tensor:
        return argument.dtype, argument.data_ptr() & 15 == 0
    if kind is int:
        return argument & 15 == 0, argument == 1, -_INT32_END <= argument < _INT32_END
    if kind is float:
        return kind
    if kind is TensorDescriptor:
        return argument.base.dtype, tuple(argument.block_shape), argument.layout
    if isinstance(argument, torch.Tensor):  # a subclass
        return argument.dtype, argument.data_ptr() & 15 == 0
    return kind, argument


def quick_launch(kernel: Kernel) -> Kernel:
    """Decorate a jitted kernel whose constants and options are given by name, and whose other
    arguments by position."""
    if INTERPRETED:
        return kernel
    jitted: Any = kernel
    analyse = jitted.run
    names = [parameter.name for parameter in jitted.params]
    forms: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def run(*args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        device = triton.runtime.driver.active.get_current_device()
        key = (device, tuple([_facts(argument) for argument in args]), tuple(options.items()))
        found = forms.get(key)
        if found is not None and not warmup:
            form, constants = found
            form[(*grid, 1, 1)[:3]](*args, *constants)
            return form
        form = analyse(*args, grid=grid, warmup=warmup, **options)
        rest = names[len(args) :]
        if form is not None and not warmup and all(name in options for name in rest):
            forms[key] = form, tuple(options[name] for name in rest)
        return form

    jitted.run = run
    return kernel
