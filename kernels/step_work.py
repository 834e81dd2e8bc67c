# SPDX-License-Identifier: Apache-2.0
"""What a kernel computes once for all layers of a step: plans, scratch, descriptors of scratch.

The caller makes an empty one where a step begins and drops it where the step ends; it never looks
inside. A kernel keeps there what follows from arguments that are the same for each layer, under a
key of its own that names the others. Does not know: kernels, layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

Value = TypeVar("Value")


class StepWork:
    """Kept values by key. One thread, one stream: layers use the same scratch one after another."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, object] = {}

    def keep(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value under the key, made by the first who asks."""
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
        return cast(Value, found)  # a key has one maker


def keep(work: StepWork | None, key: Hashable, make: Callable[[], Value]) -> Value:
    """`work.keep`, or a new value where the caller keeps nothing."""
    return make() if work is None else work.keep(key, make)
