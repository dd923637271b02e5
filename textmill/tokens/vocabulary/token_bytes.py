"""What the tokens of a vocabulary spell, in bytes, whatever kind it is: so that two vocabularies can be held side by side."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import pre_tokenizers

from textmill.tokens.vocabulary.tokenizer import TextTokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Sentencepiece's sign for a space."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Spelling:
    """A token's text in bytes; a special token's name is not text."""

    data: bytes
    special: bool = False


def spellings_of(tokenizer: TextTokenizer) -> dict[int, Spelling]:
    """The spelling of every id; a piece that begins a word has a space before it, as byte-level and sentencepiece vocabularies have."""
    tree, added = json.loads(tokenizer.inner.to_str()), tokenizer.inner.get_added_tokens_decoder()
    spell = _by_kind(tree)
    found = {id_: Spelling(spell(token)) for token, id_ in tokenizer.inner.get_vocab(with_added_tokens=False).items()}
    return found | {id_: Spelling(token.content.encode(), bool(token.special)) for id_, token in added.items()}


def _by_kind(tree: dict[str, Any]) -> Any:
    """How a vocabulary of this kind spells a piece."""
    model = tree["model"]
    if "ByteLevel" in _kinds(tree["decoder"]) | _kinds(tree["pre_tokenizer"]):
        table, signs = byte_signs(), set(pre_tokenizers.ByteLevel.alphabet())
        # A token with a sign that stands for no byte is written as it is.
        return lambda token: bytes(table[sign] for sign in token) if signs.issuperset(token) else token.encode()
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        return lambda token: token[len(prefix) :].encode() if token.startswith(prefix) else b" " + token.encode()

    def spelled(token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if model.get("byte_fallback") else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()

    return spelled


def _kinds(part: Any) -> set[str]:
    """The types in a part of tokenizer.json, those of a sequence too."""
    if not isinstance(part, dict):
        return set()
    inner = [one for name in ("decoders", "pretokenizers") for one in part.get(name, [])]
    return {str(part.get("type"))}.union(*map(_kinds, inner))


def byte_signs() -> dict[str, int]:
    """Which byte each sign of byte-level BPE stands for: printable bytes for themselves, the others from 256 on in their order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
