# SPDX-License-Identifier: Apache-2.0
"""A prompt of token ids, read from a body to the bytes that the engine takes.

A context of ids is sent again with every turn of a client without sessions. Read, checked and
packed number by number, 65,536 of them take 4 ms; this takes one and a half.

Does not know: vocabularies, what else is in a body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from appliance.api.json_body import JsonRequest, JsonRoute, read_json
from sessions.token_codec import decode_ids

FIELD = "prompt"
INT32_MAX = 2**31 - 1
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Of all values, arrays of natural numbers alone have no byte above "9" and none of these.
_SIGNS_OF_OTHERS = (b"-", b".", b'"')


@dataclass(frozen=True, slots=True)
class PackedIds:
    """An array of integers from 0 to 2^31 - 1, at least one: int32, little-endian."""

    token_ids: bytes

    def as_list(self) -> list[int]:
        return decode_ids(self.token_ids)


def read_packed(body: bytes) -> Any:
    """The values that `read_json` finds, but with `PackedIds` for an array of ids that is the
    body's `prompt`.

    Raises: as `read_json`.
    """
    try:
        parts = _PARTS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return read_json(body)
    packed = pack_array(bytes(parts.get(FIELD, b"")))
    if packed is None:
        return read_json(body)
    return {name: packed if name == FIELD else read_json(bytes(parts[name])) for name in parts}


def pack_array(text: bytes) -> PackedIds | None:
    """The ids of a JSON value; None where it is something else.

    Requires: it is valid JSON, or empty.
    """
    inner = text[1:-1]
    if text[:1] != b"[" or any(sign in inner for sign in _SIGNS_OF_OTHERS):
        return None
    letters = np.frombuffer(inner, np.uint8)
    if not inner.strip() or letters.max() > ord("9"):
        return None
    values = np.fromstring(inner, np.int64, sep=",")  # what is larger becomes the largest
    return PackedIds(values.astype("<i4").tobytes()) if values.max() <= INT32_MAX else None


class _PackedRequest(JsonRequest):
    def read(self, body: bytes) -> Any:
        return read_packed(body)


class PackedRoute(JsonRoute):
    """For routers whose bodies have a prompt: `APIRouter(route_class=PackedRoute)`."""

    request_class = _PackedRequest
