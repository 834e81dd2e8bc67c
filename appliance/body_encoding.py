# SPDX-License-Identifier: Apache-2.0
"""Request bodies that come compressed: which encodings are read, and never more than is allowed.

Does not know: what a body says.

Source: RFC 9110 section 8.4 (Content-Encoding), RFC 1952 (gzip), RFC 1950 (deflate).
"""

from __future__ import annotations

import zlib

READ_ENCODINGS = ("identity", "gzip", "deflate")
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # told apart by their first bytes


class BodyDecoder:
    """Takes a compressed body piece by piece."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._inflate = zlib.decompressobj(_GZIP_OR_ZLIB)

    def decode(self, piece: bytes) -> bytes:
        """Return what a piece adds: at most one byte more than is allowed in all.

        Raises: zlib.error where it is not compressed so.
        """
        return self._inflate.decompress(piece, self.max_bytes + 1)

    @property
    def is_whole(self) -> bool:
        """The end has come, and nothing behind it."""
        return self._inflate.eof and not self._inflate.unused_data


def decoder_for(content_encoding: str, max_bytes: int) -> BodyDecoder | None:
    """Return what reads such a body; None: it is not compressed.

    Raises: ValueError for an encoding that nobody here reads.
    """
    name = content_encoding.strip().lower().removeprefix("x-")
    if name in ("", "identity"):
        return None
    if name not in READ_ENCODINGS:
        raise ValueError(
            f"Content-Encoding: {content_encoding[:64]!r} is not read here; allowed: "
            + ", ".join(READ_ENCODINGS)
        )
    return BodyDecoder(max_bytes)
