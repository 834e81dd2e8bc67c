# SPDX-License-Identifier: Apache-2.0
"""Request bodies that come compressed: which encodings are read, and never more than is allowed.

Does not know: what a body says.

Source: RFC 9110 section 8.4 (Content-Encoding), RFC 1952 (gzip), RFC 1950 (deflate), RFC 8878 and
9659 (zstd: frames, and the window that a decoder of HTTP must allow, which is all it allows here).
"""

from __future__ import annotations

import sys
import zlib
from typing import Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

READ_ENCODINGS = ("identity", "gzip", "deflate", "zstd")
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # told apart by their first bytes
ZSTD_WINDOW_LOG = 23  # 8 MiB: what a frame may make us allocate before it says anything


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class NotCompressedError(ValueError):
    """The bytes are not compressed as the header says."""


class BodyDecoder:
    """Takes a compressed body piece by piece."""

    def __init__(self, decompressor: _Decompressor, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._decompressor = decompressor
        self._has_more = False  # behind the end of what was compressed

    def decode(self, piece: bytes) -> bytes:
        """Return what a piece adds: at most one byte more than is allowed in all.

        Raises: NotCompressedError.
        """
        if self._decompressor.eof:
            self._has_more |= bool(piece)
            return b""
        try:
            return self._decompressor.decompress(piece, self.max_bytes + 1)
        except (zlib.error, zstd.ZstdError) as error:
            raise NotCompressedError(str(error)) from None

    @property
    def is_whole(self) -> bool:
        """The end has come, and nothing behind it."""
        unpacker = self._decompressor
        return unpacker.eof and not unpacker.unused_data and not self._has_more


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
    if name == "zstd":
        options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
        return BodyDecoder(zstd.ZstdDecompressor(options=options), max_bytes)
    return BodyDecoder(zlib.decompressobj(_GZIP_OR_ZLIB), max_bytes)
