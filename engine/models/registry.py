# SPDX-License-Identifier: Apache-2.0
"""Which class holds an architecture: each model module exports its own as `EntryClass`.

Does not know: configs, weights.
"""

from __future__ import annotations

from engine.models import llama
from engine.weights.errors import UnsupportedModelError

_CLASSES = {"LlamaForCausalLM": llama.EntryClass}


def model_class(architecture: str) -> type[llama.LlamaForCausalLM]:
    """The class of an architecture. Raises UnsupportedModelError naming those we have."""
    try:
        return _CLASSES[architecture]
    except KeyError:
        raise UnsupportedModelError(
            f"architecture {architecture!r}; supported: {', '.join(sorted(_CLASSES))}"
        ) from None
