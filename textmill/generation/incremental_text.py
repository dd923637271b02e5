"""Turns token ids into text one by one, and holds back incomplete characters and possible stop strings."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any

from textmill.tokens.vocabulary.token_bytes import byte_level_alphabet
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class WindowTextDecoder:
    """Works with every tokenizer: decodes the last few ids again, and holds back an incomplete character."""

    def __init__(self, tokenizer: TextTokenizer, context: list[int]) -> None:
        self.tokenizer = tokenizer
        self.ids = list(context)
        # The window starts a little before the new ids, because a tokenizer may write the first token differently.
        self.start = 0
        self.emitted = len(context)
        self.tokens = 0

    def add(self, id_: int) -> str:
        """Return the text that one more id completes; often none."""
        self.ids.append(id_)
        self.tokens += 1
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self.start = self.emitted
        self.emitted = len(self.ids)
        return text

    def end(self) -> str:
        """Return what was held back; bytes that form no character become replacement characters."""
        return self._new_text()

    def _new_text(self) -> str:
        emitted_text = self.tokenizer.decode(self.ids[self.start : self.emitted])
        return self.tokenizer.decode(self.ids[self.start :])[len(emitted_text) :]


class ByteTextDecoder:
    """Works with byte-level tokenizers, and is many times as fast."""

    def __init__(self, token_bytes: list[bytes], texts: list[str | None], context: Sequence[int]) -> None:
        self.token_bytes = token_bytes
        self.texts = texts
        self.tokens = 0
        self.decoder: Any = codecs.getincrementaldecoder("utf-8")("replace")
        # A prompt of token ids may end within a character. A character has at most four bytes, so four tokens suffice.
        self.decoder.decode(b"".join(token_bytes[id_] for id_ in context[-4:]))

    def add(self, id_: int) -> str:
        """Return the text that one more id completes; often none."""
        self.tokens += 1
        complete = self.texts[id_]
        text: str = self.decoder.decode(self.token_bytes[id_]) if complete is None or self.decoder.buffer else complete
        return text

    def end(self) -> str:
        """Return what was held back, as replacement characters."""
        text: str = self.decoder.decode(b"", final=True)
        return text


TextDecoder = WindowTextDecoder | ByteTextDecoder
"""Receives token ids and returns text as soon as it cannot change any more."""


def text_decoder_factory(tokenizer: TextTokenizer) -> Callable[[Sequence[int]], TextDecoder]:
    """Return a function from a prompt's ids to the fastest text decoder for this tokenizer."""
    token_bytes = read_token_bytes(tokenizer)
    if token_bytes is None:
        return lambda context: WindowTextDecoder(tokenizer, list(context))
    texts = [_decode_or_none(raw) for raw in token_bytes]
    return lambda context: ByteTextDecoder(token_bytes, texts, context)


def _decode_or_none(raw: bytes) -> str | None:
    """Decode bytes that are complete characters; None otherwise."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def read_token_bytes(tokenizer: TextTokenizer) -> list[bytes] | None:
    """Return each token's bytes if the tokenizer is byte-level BPE: a text is then its tokens' bytes joined."""
    if ((json.loads(tokenizer.inner.to_str())["decoder"]) or {}).get("type") != "ByteLevel":
        return None
    table = byte_level_alphabet()
    token_bytes = [b""] * tokenizer.vocab
    for token, id_ in tokenizer.inner.get_vocab(with_added_tokens=True).items():
        # A token with a character outside the byte alphabet is written as it is.
        is_bytes = table.keys() >= set(token)
        token_bytes[id_] = bytes(table[character] for character in token) if is_bytes else token.encode()
    return token_bytes


class StopStringFilter:
    """Passes text through up to the first stop string, and holds back what may be the start of one.

    With the stop string "END": add("a E") returns "a " and holds "E" back, add("Nx") returns "ENx".
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """Return the text before a stop string; `hit` is true once one was found."""
        if not self.stops:
            return text
        text = self.held + text
        stop_places = [text.find(stop) for stop in self.stops if stop in text]
        if stop_places:
            self.held = ""
            self.hit = True
            return text[: min(stop_places)]
        held_length = max(_overlap(text, stop) for stop in self.stops)
        self.held = text[len(text) - held_length :]
        return text[: len(text) - held_length]

    def end(self) -> str:
        """Return the held-back text: no stop string followed."""
        held = self.held
        self.held = ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of a text that may be the start of a stop string."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
