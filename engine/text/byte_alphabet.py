# SPDX-License-Identifier: Apache-2.0
"""The printable alphabet in which byte-level BPE vocabularies spell bytes.

Source: the GPT-2 byte encoder ("Language Models are Unsupervised Multitask Learners", 2019).
"""

from __future__ import annotations

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PRINTABLE)]

CHAR_OF_BYTE: dict[int, str] = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + index) for index, byte in enumerate(_OTHERS)
}
BYTE_OF_CHAR: dict[str, int] = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def bytes_of_spelling(spelling: str) -> bytes | None:
    """The bytes a vocabulary entry stands for; None where it is not byte-level spelling."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in spelling])
    except KeyError:
        return None
