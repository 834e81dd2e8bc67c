# SPDX-License-Identifier: Apache-2.0
"""The bytes of one KV page: how large, in which order, and a fingerprint of both.

Does not know: torch, where pages live, who owns them. A page is one contiguous blob. With keys and
values it holds, layer after layer, its keys, then its values: [num_layers, 2, page_size,
num_kv_heads, head_dim]; with latents (MLA), layer after layer, one row a token: [num_layers,
page_size, latent_dim + rope_dim], the normed latent, then the rotated key part in rotate-half
order; in fp8, layer after layer, three planes of all its tokens: the latents in e4m3, one fp32
scale per 128 of them, the rotated key parts in bf16.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Protocol

from kvtiers.errors import TierConfigError

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
FP8_GROUP = 128  # latents that share a scale
# Raised when the order of bytes changes, so that stored pages of an older order never match.
LAYOUT_VERSION = 1


class KvLayout(Protocol):
    """What pools, transfers and stores need of a layout."""

    @property
    def num_layers(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    def pool_shape(self, num_pages: int) -> tuple[int, ...]: ...
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Keys and values. Raises TierConfigError for a size below 1 or an unknown dtype."""

    num_layers: int
    page_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: str  # float32 | bfloat16

    def __post_init__(self) -> None:
        _check(self, ("num_layers", "page_size", "num_kv_heads", "head_dim"))

    @property
    def plane_bytes(self) -> int:
        """The keys, or the values, of one page in one layer."""
        row = self.num_kv_heads * self.head_dim
        return self.page_size * row * ELEMENT_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one page in one layer."""
        return 2 * self.plane_bytes

    @property
    def page_bytes(self) -> int:
        """One page, all layers: what a store keeps as one object."""
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """One token, all layers."""
        return self.page_bytes // self.page_size

    def plane_offset(self, layer: int, is_value: bool) -> int:
        """Where the keys (or values) of a layer begin in a page; bytes."""
        return layer * self.layer_bytes + (self.plane_bytes if is_value else 0)

    def pool_shape(self, num_pages: int) -> tuple[int, int, int, int, int, int]:
        """Shape of a pool that holds whole pages one after the other."""
        return (
            num_pages,
            self.num_layers,
            2,
            self.page_size,
            self.num_kv_heads,
            self.head_dim,
        )

    def fingerprint(self) -> str:
        """32 hex digits; two layouts share it only if their pages are interchangeable."""
        return _fingerprint("page", asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayout:
    """MLA latents. Raises TierConfigError for a size below 1 or an unknown dtype."""

    num_layers: int
    page_size: int  # tokens
    latent_dim: int
    rope_dim: int
    dtype: str  # float32 | bfloat16 | fp8

    def __post_init__(self) -> None:
        _check(self, ("num_layers", "page_size", "latent_dim", "rope_dim"), ("fp8",))
        if self.dtype == "fp8" and self.latent_dim % FP8_GROUP:
            allowed = f"a multiple of {FP8_GROUP} where layout.dtype is fp8"
            raise TierConfigError("layout.latent_dim", self.latent_dim, allowed)

    @property
    def row_bytes(self) -> int:
        """One token in one layer."""
        if self.dtype == "fp8":
            return self.latent_dim + self.latent_dim // FP8_GROUP * 4 + self.rope_dim * 2
        return (self.latent_dim + self.rope_dim) * ELEMENT_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """One page in one layer."""
        return self.page_size * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """One page, all layers: what a store keeps as one object."""
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """One token, all layers."""
        return self.page_bytes // self.page_size

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        """Shape of a pool that holds whole pages one after the other; of bytes in fp8."""
        if self.dtype == "fp8":
            return (num_pages, self.num_layers, self.layer_bytes)
        return (num_pages, self.num_layers, self.page_size, self.latent_dim + self.rope_dim)

    def fingerprint(self) -> str:
        """32 hex digits; two layouts share it only if their pages are interchangeable."""
        return _fingerprint("latent-page", asdict(self))


def _check(
    layout: PageLayout | LatentLayout, sizes: tuple[str, ...], more_dtypes: tuple[str, ...] = ()
) -> None:
    dtypes = (*ELEMENT_BYTES, *more_dtypes)
    if layout.dtype not in dtypes:
        raise TierConfigError("layout.dtype", layout.dtype, " | ".join(dtypes))
    for name in sizes:
        if getattr(layout, name) < 1:
            raise TierConfigError(f"layout.{name}", getattr(layout, name), "1 or more")


def _fingerprint(kind: str, fields: dict[str, object]) -> str:
    spelled = ";".join(f"{key}={value}" for key, value in sorted(fields.items()))
    text = f"moorage-{kind}-v{LAYOUT_VERSION};{spelled}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
