# SPDX-License-Identifier: Apache-2.0
"""Public, silicon-neutral ops. Importing it registers every built-in implementation."""

from kernels.llama_stack import LlamaLayer, LlamaShape, LlamaStack, PagedRows
from kernels.ops.activation import silu_and_mul
from kernels.ops.attention import paged_attention
from kernels.ops.bitmask import apply_bitmask
from kernels.ops.linear import linear
from kernels.ops.llama import llama_forward
from kernels.ops.norm import add_rms_norm, rms_norm
from kernels.ops.page_copy import copy_pages
from kernels.ops.rope import rope_kv_write
from kernels.ops.sampling import argmax
from kernels.packed_weight import PackedWeight, Weight, concat_rows, pack_linear
from kernels.providers import load_builtin_kernels

load_builtin_kernels()

__all__ = [
    "LlamaLayer",
    "LlamaShape",
    "LlamaStack",
    "PackedWeight",
    "PagedRows",
    "Weight",
    "add_rms_norm",
    "apply_bitmask",
    "argmax",
    "concat_rows",
    "copy_pages",
    "linear",
    "llama_forward",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope_kv_write",
    "silu_and_mul",
]
