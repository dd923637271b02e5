"""The text and bytes of single tokens, for log-probabilities and /tokenize."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property, lru_cache

from textmill.tokens.vocabulary.token_bytes import BYTE_TOKEN, SPACE, byte_level_alphabet
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

LANGUAGES = {
    "ko": (re.compile("[\uac00-\ud7a3]"), 0.2),
    "ja": (re.compile("[\u3040-\u30ff]"), 0.1),
    "zh": (re.compile("[\u4e00-\u9fff]"), 0.2),
    "ru": (re.compile("[\u0400-\u04ff]"), 0.2),
    "ar": (re.compile("[\u0600-\u06ff]"), 0.2),
    "tr": (re.compile("[\u011f\u0131\u0130\u015f]"), 0.04),
}
"""Letters of a language, and the share of a vocabulary's tokens that have one if it was made for that language."""
SAMPLED_TOKENS = 2000


class TokenTexts:
    """Looks up the text and bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.inner.get_added_tokens_decoder()
        self.added = set(added)
        self.special_ids = {token.content: id_ for id_, token in added.items() if token.special}
        is_byte_level = type(tokenizer.inner.decoder).__name__ == "ByteLevel"
        self.byte_letters = byte_level_alphabet() if is_byte_level else None
        self.get_bytes = lru_cache(maxsize=100_000)(self._find_bytes)

    @cached_property
    def language(self) -> str:
        """The language that the vocabulary was made for, as far as its letters tell; else en."""
        vocab = self.tokenizer.vocab
        texts = [self.get_text(id_) for id_ in range(0, vocab, max(1, vocab // SAMPLED_TOKENS))]
        for language, (letters, share) in LANGUAGES.items():
            if sum(letters.search(text) is not None for text in texts) > share * len(texts):
                return language
        return "en"

    def _find_bytes(self, id_: int) -> bytes:
        """Return the bytes of one token; empty for an unused id."""
        token: str | None = self.tokenizer.inner.id_to_token(id_)
        if token is None:
            return b""
        if id_ in self.added:
            return token.encode()
        if self.byte_letters is not None and all(letter in self.byte_letters for letter in token):
            return bytes(self.byte_letters[letter] for letter in token)
        if byte := BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        if SPACE in token:
            return token.replace(SPACE, " ").encode()
        return self.tokenizer.decode([id_]).encode()

    def split_special_tokens(self, text: str) -> Iterator[str | int]:
        """Split a text at its special tokens; yield the texts between them, and the ids of the special tokens."""
        if not self.special_ids:
            yield text
            return
        patterns = sorted(map(re.escape, self.special_ids), key=len, reverse=True)
        for part in re.split(f"({'|'.join(patterns)})", text):
            if part:
                yield self.special_ids.get(part, part)

    def get_text(self, id_: int) -> str:
        """Return a token's text; an incomplete character is written as its bytes, as OpenAI does."""
        raw = self.get_bytes(id_)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
