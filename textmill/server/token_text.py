"""TokenTexts: single tokens as text and as bytes, for replies that tell them one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from textmill.tokens.vocabulary.tokenizer import TextTokenizer

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """A tokenizer's single tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.inner.get_added_tokens_decoder()
        self.added = set(added)
        self.marks = {token.content: id_ for id_, token in added.items() if token.special}
        self.letters = _letters() if type(tokenizer.inner.decoder).__name__ == "ByteLevel" else None
        self.bytes_of = lru_cache(maxsize=100_000)(self._bytes_of)

    def _bytes_of(self, id_: int) -> bytes:
        """The bytes of one token; an id without a token has none."""
        piece: str | None = self.tokenizer.inner.id_to_token(id_)
        if piece is None:
            return b""
        if id_ in self.added:
            return piece.encode()
        if self.letters is not None and all(letter in self.letters for letter in piece):
            return bytes(self.letters[letter] for letter in piece)
        if byte := BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if "\N{LOWER ONE EIGHTH BLOCK}" in piece:
            return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        return self.tokenizer.decode([id_]).encode()

    def parts_of(self, text: str) -> Iterator[str | int]:
        """A text, cut where a special token stands in it; that token as its id."""
        if not self.marks:
            yield text
            return
        marks = sorted(map(re.escape, self.marks), key=len, reverse=True)
        for part in re.split(f"({'|'.join(marks)})", text):
            if part:
                yield self.marks.get(part, part)

    def text_of(self, id_: int) -> str:
        """A token as text; one that is only a part of a character is told by its bytes, as OpenAI does."""
        raw = self.bytes_of(id_)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _letters() -> dict[str, int]:
    """The byte that each letter of byte-level BPE stands for: printable Latin-1 for itself, the rest counted on from 256."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(rest)}
