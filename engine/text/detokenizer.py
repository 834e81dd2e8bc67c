# SPDX-License-Identifier: Apache-2.0
"""Token ids to text as they come: whole characters only, and stop strings.

The text is the same however the ids are cut into pushes. A control token leaves no text, unless it
is one that the caller reads (a marker of its tool calls); no stop string matches in it or over it.
Does not know: requests, events, tool calls.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """Where a stop string cut the output.

    `num_tokens_kept`: tokens that lie wholly before the match.
    `tail_text`: text before the match that belongs to the token after those, "" mostly: kept
    tokens followed by `tokenizer.encode(tail_text)` spell exactly the text that was given out.
    """

    stop_string: str
    num_tokens_kept: int
    tail_text: str


class Detokenizer:
    """One output stream. Not to be used after a stop match or `flush`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        shown_control: frozenset[int] = frozenset(),
    ) -> None:
        """Raises ValueError for an empty stop string."""
        if any(not stop for stop in stop_strings):
            raise ValueError("stop: an empty stop string; allowed: one or more characters")
        self._tokenizer = tokenizer
        self._stops = [(stop.encode("utf-8", "replace"), stop) for stop in stop_strings]
        self._shown = shown_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Bytes since the end of the last kept token. [0, _num_given) was given out,
        # [_num_given, end) is held because it may become a stop string.
        self._buffer = b""
        self._num_given = 0
        self._num_kept = 0  # tokens that lie wholly in what was given out
        self._open_lens: deque[int] = deque()  # byte lengths of the tokens in _buffer
        self.stop: StopMatch | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """Take tokens, give out the text that is now certain; look at `stop` afterwards."""
        given = []
        for token_id in token_ids:
            if self.stop is not None:
                break
            given.append(self.push_bytes(token_id))
        return self._decoder.decode(b"".join(given), final=self.stop is not None)

    def flush(self) -> str:
        """The rest of the text, when no more tokens come."""
        return self._decoder.decode(self.flush_bytes(), final=True)

    def push_bytes(self, token_id: int) -> bytes:
        """Take one token, give out the bytes that are now certain, whole characters or not."""
        if token_id in self._shown:
            return self._push_control(token_id)
        spelled = self._tokenizer.token_bytes(token_id)
        if not self._stops:
            self._num_kept += 1
            return spelled
        num_old = len(self._buffer)
        self._buffer += spelled
        self._open_lens.append(len(spelled))
        match = self._first_match(num_old)
        if match is not None:
            return self._cut(*match)
        return self._give(len(self._buffer) - self._open_stop_len())

    def plain_bytes(self, token_ids: Collection[int]) -> bytes | None:
        """The bytes of tokens in which there is nothing to look for, so that they need not be
        pushed; None where they must."""
        if self._stops or not self._shown.isdisjoint(token_ids):
            return None
        return b"".join(map(self._tokenizer.token_bytes, token_ids))

    def flush_bytes(self) -> bytes:
        """What was held back, when no more tokens come."""
        return self._give(len(self._buffer))

    def _push_control(self, token_id: int) -> bytes:
        """A marker: what was held in front of it becomes no stop string any more."""
        held = self._give(len(self._buffer))
        spelled = self._tokenizer.token_bytes(token_id, with_control=True)
        self._num_kept += 1 + len(self._open_lens)
        self._buffer, self._num_given = b"", 0
        self._open_lens.clear()
        return held + spelled

    def _first_match(self, num_old: int) -> tuple[int, str] | None:
        """(start, stop) of the match that is complete first; the longest of those."""
        best: tuple[int, int, str] | None = None
        for spelled, stop in self._stops:
            start = max(self._num_given, num_old - len(spelled) + 1)
            at = self._buffer.find(spelled, start)
            if at >= 0 and (best is None or (at + len(spelled), at) < best[:2]):
                best = (at + len(spelled), at, stop)
        return None if best is None else (best[1], best[2])

    def _open_stop_len(self) -> int:
        """Length of the longest end of the held bytes that may yet become a stop string."""
        longest = 0
        num_held = len(self._buffer) - self._num_given
        for spelled, _ in self._stops:
            for size in range(min(len(spelled) - 1, num_held), longest, -1):
                if self._buffer.endswith(spelled[:size]):
                    longest = size
                    break
        return longest

    def _give(self, end: int) -> bytes:
        """Give out the buffer up to `end`, then forget the tokens that are wholly given out."""
        given = self._buffer[self._num_given : end]
        num_done = 0
        while self._open_lens and num_done + self._open_lens[0] <= end:
            num_done += self._open_lens.popleft()
            self._num_kept += 1
        self._buffer = self._buffer[num_done:]
        self._num_given = end - num_done
        return given

    def _cut(self, at: int, stop: str) -> bytes:
        """Give out what lies before the match and say which tokens that is."""
        given = self._give(at)
        tail = self._buffer[: self._num_given]
        self._buffer, self._num_given = b"", 0
        self.stop = StopMatch(
            stop_string=stop,
            num_tokens_kept=self._num_kept,
            tail_text=tail.decode("utf-8", "replace"),
        )
        return given
