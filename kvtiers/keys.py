# SPDX-License-Identifier: Apache-2.0
"""Names of stored pages: what must agree before bytes may be read back as KV.

Does not know: how page hashes come about (the control plane chains them), stores.
"""

from __future__ import annotations

import hashlib

from kvtiers.errors import TierConfigError
from kvtiers.layout import KvLayout

PAGE_HASH_BYTES = 16


class ObjectKeys:
    """Builds keys within one namespace: a model, a layout with its dtype, a rank, a tenant's salt.

    Equal tokens under another of these get another key, so one tenant's pages can never answer
    for another's, nor one rank's part of a page for another rank's.

    Args:
        salt: what keeps a tenant's pages apart.
        rank, num_ranks: whose part of the heads the pages hold.

    Raises:
        TierConfigError: the rank is not one of `num_ranks`.
    """

    def __init__(
        self,
        model_fingerprint: str,
        layout: KvLayout,
        salt: str = "",
        *,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise TierConfigError("rank", rank, f"0 to {num_ranks - 1}")
        # The parts are length-prefixed: no two namespaces may spell the same bytes.
        digest = hashlib.sha256()
        # The layout's fingerprint covers sizes, dtype and the order of bytes.
        for part in (model_fingerprint, layout.fingerprint(), f"{rank}/{num_ranks}", salt):
            raw = part.encode("utf-8")
            digest.update(len(raw).to_bytes(4, "big") + raw)
        self._namespace = digest.hexdigest()[:32]

    @property
    def namespace(self) -> str:
        """32 hex digits all keys of this namespace begin with."""
        return self._namespace

    def key(self, page_hash: bytes) -> str:
        """The object key of a page: namespace/first two digits/hash, safe as a file path.

        Raises:
            TierConfigError: the hash is not 16 bytes.
        """
        if len(page_hash) != PAGE_HASH_BYTES:
            raise TierConfigError(
                "page_hash", f"{len(page_hash)} bytes", f"{PAGE_HASH_BYTES} bytes"
            )
        name = page_hash.hex()
        return f"{self._namespace}/{name[:2]}/{name}"

    def keys(self, page_hashes: bytes) -> list[str]:
        """Keys of hashes that lie one after the other, as a finished request reports them."""
        if len(page_hashes) % PAGE_HASH_BYTES:
            raise TierConfigError(
                "page_hashes", f"{len(page_hashes)} bytes", f"a multiple of {PAGE_HASH_BYTES}"
            )
        starts = range(0, len(page_hashes), PAGE_HASH_BYTES)
        return [self.key(page_hashes[at : at + PAGE_HASH_BYTES]) for at in starts]
