"""EncDecTokenizer's own way (Yuan, CPM-2): jieba cuts a text into words, each gets the longest tokens that fit.

Without jieba, `foreign_files.open_encdec` cuts words where the script changes, which transformers can repeat from the
files alone. A model that was trained on ids of jieba's words needs these ids. jieba and the loop here
are pure Python: about five times slower than the other way.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from textmill.errors import TextmillError
from textmill.tokens.vocabulary.foreign_files import LONGEST_WORD, MARK, NEWLINE, SPACE, is_chinese, is_encdec

KEY = "textmill_jieba"
"""Our own key in tokenizer_config.json."""
CACHED_WORDS = 1 << 18


@dataclass(frozen=True)
class JiebaWords:
    """Encodes texts with the vocabulary of a tokenizer that `open_encdec` opened."""

    cut: Any
    """jieba.cut."""
    vocab: dict[str, int]
    """Names of `open_encdec`: MARK before what begins a word without Chinese characters."""
    unknown: int
    words: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Words that were encoded before."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ids: list[int] = []
        for word in self.cut(text, cut_all=False):
            if (found := self.words.get(word)) is None:
                found = tuple(self._encode_word(word.replace(" ", SPACE).replace("\n", NEWLINE)))
                if len(self.words) < CACHED_WORDS:
                    self.words[word] = found
            ids += found
        return ids

    def _encode_word(self, word: str) -> list[int]:
        """The longest token from the left, again and again; a character without one is unknown."""
        if len(word) > LONGEST_WORD:
            return [self.unknown]
        ids: list[int] = []
        start = 0
        while start < len(word):
            for end in range(len(word), start, -1):
                id_ = self._id_of(word[start:end], begins=start == 0)
                if id_ is not None:
                    break
            else:
                id_, end = self.unknown, start + 1
            ids.append(id_)
            start = end
        return ids

    def _id_of(self, part: str, *, begins: bool) -> int | None:
        if is_chinese(part):
            return self.vocab.get(part)
        if part in (SPACE, NEWLINE):
            return self.vocab.get(part) if begins else None
        return self.vocab.get(MARK + part if begins else part)


def open_words(inner: Tokenizer) -> JiebaWords:
    """jieba's words of an opened vocab.txt of EncDecTokenizer."""
    try:
        import jieba
    except ImportError:
        raise TextmillError("tokenizer.jieba needs jieba; run: pip install 'textmill[chinese]'") from None
    special = {token.content: id_ for id_, token in inner.get_added_tokens_decoder().items()}
    known = inner.get_vocab(with_added_tokens=True)
    if not is_encdec(list(known)):
        raise TextmillError(
            "tokenizer.jieba: is for tokenizer.use=vocab.txt of EncDecTokenizer (Yuan, CPM-2), whose lines have <unk>, "
            f"{SPACE} and {NEWLINE}; remove it"
        )
    jieba.setLogLevel(logging.WARNING)  # it reports where its dictionary is cached
    vocab = {token: id_ for token, id_ in known.items() if token not in special}
    return JiebaWords(jieba.cut, vocab, special["<unk>"])
