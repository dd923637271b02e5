"""From ids to text as it becomes sure: whole characters, and nothing of what a stop string may yet take away."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import pre_tokenizers

from textmill.tokens.vocabulary.token_bytes import byte_signs
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"


class Stream(Protocol):
    """Ids in, text out as soon as it is sure."""

    tokens: int

    def add(self, id_: int) -> str: ...
    def end(self) -> str: ...


class WindowTextDecoder:
    """Ids in, text out as soon as it is sure: a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: TextTokenizer, context: list[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(context)
        # Decoding begins a little before the new ids, since a tokenizer may write a first token otherwise than a later one.
        self.start, self.said, self.tokens = 0, len(context), 0

    def add(self, id_: int) -> str:
        """The text that one more id settles; often none."""
        self.ids.append(id_)
        self.tokens += 1
        text = self._unsaid()
        if not text or text.endswith(BROKEN):
            return ""
        self.start, self.said = self.said, len(self.ids)
        return text

    def end(self) -> str:
        """What was held back; bytes that never became a character are shown as replacement characters."""
        return self._unsaid()

    def _unsaid(self) -> str:
        before = self.tokenizer.decode(self.ids[self.start : self.said])
        return self.tokenizer.decode(self.ids[self.start :])[len(before) :]


class ByteTextDecoder:
    """The same for tokens that are bytes, many times as fast."""

    def __init__(self, pieces: list[bytes], texts: list[str | None], context: Sequence[int]) -> None:
        self.pieces, self.texts, self.tokens = pieces, texts, 0
        self.decoder: Any = codecs.getincrementaldecoder("utf-8")("replace")
        # A prompt of ids may end within a character; four tokens hold the longest there is.
        self.decoder.decode(b"".join(pieces[id_] for id_ in context[-4:]))

    def add(self, id_: int) -> str:
        """The text that one more id settles; often none."""
        self.tokens += 1
        whole = self.texts[id_]
        text: str = self.decoder.decode(self.pieces[id_]) if whole is None or self.decoder.buffer else whole
        return text

    def end(self) -> str:
        """What was held back, as replacement characters."""
        text: str = self.decoder.decode(b"", final=True)
        return text


def text_decoder_factory(tokenizer: TextTokenizer) -> Callable[[Sequence[int]], Stream]:
    """What makes a stream after a prompt's ids, the fastest that the tokenizer allows."""
    pieces = bytes_of(tokenizer)
    if pieces is None:
        return lambda context: WindowTextDecoder(tokenizer, list(context))
    texts = [_whole(piece) for piece in pieces]
    return lambda context: ByteTextDecoder(pieces, texts, context)


def _whole(piece: bytes) -> str | None:
    """The text of bytes that are whole characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def bytes_of(tokenizer: TextTokenizer) -> list[bytes] | None:
    """The bytes of each token, where a text is its tokens' bytes laid end to end: byte-level BPE."""
    if ((json.loads(tokenizer.inner.to_str())["decoder"]) or {}).get("type") != "ByteLevel":
        return None
    table, signs = byte_signs(), set(pre_tokenizers.ByteLevel.alphabet())
    pieces = [b""] * tokenizer.vocab
    for token, id_ in tokenizer.inner.get_vocab(with_added_tokens=True).items():
        # A token with a sign that stands for no byte is written as it is.
        pieces[id_] = bytes(table[sign] for sign in token) if signs.issuperset(token) else token.encode()
    return pieces


class StopStringFilter:
    """Text in, text out up to the first stop string, wherever its pieces meet; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.hit = [stop for stop in stops if stop], "", False

    def add(self, text: str) -> str:
        """The text that is sure now; `hit` says whether it was the last."""
        if not self.stops:
            return text
        text = self.held + text
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            self.held, self.hit = "", True
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back in vain."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that may be the beginning of a stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
