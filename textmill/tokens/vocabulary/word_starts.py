"""Which tokens start a word, for whole-word masking: found in the vocabulary, for any kind of tokenizer."""

from __future__ import annotations

import json
import re

import numpy as np
from numpy.typing import NDArray

from textmill.tokens.vocabulary.token_bytes import read_token_bytes
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

_NO_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
_LEAD_BYTES = range(0xE3, 0xEA)
"""The first byte of most Japanese and Chinese characters in UTF-8."""


def find_word_starts(tokenizer: TextTokenizer) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[vocabulary]: true for tokens that start a word; and true for special tokens, and for ids without a token.

    WordPiece: tokens without the prefix ##. Others: tokens that begin with a space (▁ in sentencepiece), a punctuation
    mark, or a character of a script without spaces.
    """
    starts = np.zeros(tokenizer.vocab, np.bool_)
    special = np.ones(tokenizer.vocab, np.bool_)
    is_wordpiece = json.loads(tokenizer.inner.to_str())["model"]["type"] == "WordPiece"
    for id_, token in read_token_bytes(tokenizer).items():
        starts[id_] = token.data[:1] == b" " if is_wordpiece else _starts_word(token.data)
        special[id_] = token.special
    special[[id_ for id_ in map(tokenizer.inner.token_to_id, tokenizer.roles.values()) if id_ is not None]] = True
    return starts, special


def _starts_word(data: bytes) -> bool:
    first = data.decode("utf-8", "ignore")[:1]
    if not first or not data.startswith(first.encode()):  # part of a character
        return data[:1] != b"" and data[0] in _LEAD_BYTES
    return not first.isalnum() or _NO_SPACES.match(first) is not None
