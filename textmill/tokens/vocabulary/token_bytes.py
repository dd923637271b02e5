"""The bytes of every token of a vocabulary, for any kind of tokenizer, so that two vocabularies can be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character that sentencepiece writes for a space."""
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
"""The tokens of single bytes in a vocabulary with byte fallback."""
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenBytes:
    """The text of a token in bytes; for a special token, its name."""

    data: bytes
    special: bool = False


def read_token_bytes(inner: Tokenizer) -> dict[int, TokenBytes]:
    """The bytes of every id. A token that starts a word has a space before it, also for WordPiece."""
    to_bytes = _byte_converter(json.loads(inner.to_str()))
    found = {id_: TokenBytes(to_bytes(token)) for token, id_ in inner.get_vocab(with_added_tokens=False).items()}
    for id_, token in inner.get_added_tokens_decoder().items():
        found[id_] = TokenBytes(token.content.encode(), bool(token.special))
    return found


def _byte_converter(tree: dict[str, Any]) -> Callable[[str], bytes]:
    """A function from a token to its bytes, for the kind of vocabulary in a tokenizer.json."""
    model = tree["model"]
    if is_byte_level(tree):
        table = byte_level_alphabet()
        # A token with a character outside the byte-level alphabet is plain UTF-8.
        return lambda token: (
            bytes(table[character] for character in token) if table.keys() >= set(token) else token.encode()
        )
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        return lambda token: token[len(prefix) :].encode() if token.startswith(prefix) else b" " + token.encode()

    def sentencepiece_bytes(token: str) -> bytes:
        byte = BYTE_TOKEN.fullmatch(token) if model.get("byte_fallback") else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()

    return sentencepiece_bytes


def is_byte_level(tree: dict[str, Any]) -> bool:
    """Whether the tokens of a tokenizer.json are bytes, written as the characters of `byte_level_alphabet`."""
    return "ByteLevel" in _kinds(tree["decoder"]) | _kinds(tree["pre_tokenizer"])


def _kinds(part: Any) -> set[str]:
    """All types in a part of tokenizer.json, including those inside a sequence."""
    if not isinstance(part, dict):
        return set()
    nested = [one for name in ("decoders", "pretokenizers") for one in part.get(name, [])]
    return {str(part.get("type"))}.union(*map(_kinds, nested))


def byte_level_alphabet() -> dict[str, int]:
    """The byte of each character of byte-level BPE: printable bytes are themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}
