# SPDX-License-Identifier: Apache-2.0
"""The stand-in tokenizer of a model that brings none: dummy weights, token ids in and out.

Ids 0-255 are bytes, the last three ids are the control tokens of ChatML, any other id i spells
"<i>". Does not know: when it is used (assets.py).
"""

from __future__ import annotations

from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import pre_tokenizers
from tokenizers.models import BPE

from engine.text.byte_alphabet import CHAR_OF_BYTE
from engine.text.tokenizer import AddedToken, Tokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LEAST_VOCAB_SIZE = len(CHAR_OF_BYTE) + len(CONTROL)  # an id for every byte


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer that gives every id of the vocabulary a spelling of its own.

    Args:
        vocab_size: at least `LEAST_VOCAB_SIZE`.
    """
    first_control = vocab_size - len(CONTROL)
    vocabulary = {
        CHAR_OF_BYTE[i] if i < len(CHAR_OF_BYTE) else f"<{i}>": i for i in range(first_control)
    }
    plain = BpeTokenizer(BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    added = [
        AddedToken(token_id=first_control + place, text=text) for place, text in enumerate(CONTROL)
    ]
    return Tokenizer(plain, added, vocab_size=vocab_size)
