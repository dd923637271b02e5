"""Writes a unigram or BPE tokenizer as a sentencepiece .model and .vocab, without that library."""

from __future__ import annotations

import base64
import json
import re
import struct
from typing import Any

from textmill.errors import TextmillError
from textmill.tokens.vocabulary.algorithms import SPACE
from textmill.tokens.vocabulary.sentencepiece_model import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    ROLES,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    SentencePiece,
)
from textmill.tokens.vocabulary.token_bytes import is_byte_level
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SPLITTERS = {"Split", "Punctuation", "Digits", "Metaspace", "Sequence"}
"""What may split words: no token goes across its borders, so that sentencepiece finds the same tokens without it."""
Tree = dict[str, Any]


def is_sentencepiece(tree: Tree) -> bool:
    """Whether a tokenizer.json has a model that a .model file can hold."""
    return tree["model"]["type"] == "Unigram" or (tree["model"]["type"] == "BPE" and not is_byte_level(tree))


def sentencepiece_files(tokenizer: TextTokenizer) -> tuple[bytes, str]:
    """The contents of the .model and the .vocab file."""
    tree: Tree = json.loads(tokenizer.inner.to_str())
    pieces = _pieces_of(tree, tokenizer)
    vocab = "".join(f"{piece.text}\t{piece.score:g}\n" for piece in pieces)
    model = tree["model"]
    ids = {"unk_token": _id_of(pieces, UNKNOWN), "bos_token": tokenizer.begin, "eos_token": tokenizer.end}
    ids["pad_token"] = tokenizer.pad
    trainer = _number(3, UNIGRAM if model["type"] == "Unigram" else BPE) + _number(4, len(pieces))
    trainer += _number(35, bool(model.get("byte_fallback")))
    for role, field in ROLES.items():
        id_ = ids[role]
        trainer += _number(field, -1 if id_ is None else id_)
        if id_ is not None:
            trainer += _bytes(field + 5, pieces[id_].text.encode())
    encoded = b"".join(_bytes(1, _piece(piece)) for piece in pieces)
    return encoded + _bytes(2, trainer) + _bytes(3, _normalizer(tree)), vocab


def _pieces_of(tree: Tree, tokenizer: TextTokenizer) -> list[SentencePiece]:
    model = tree["model"]
    ids = tokenizer.inner.get_vocab(with_added_tokens=True)
    if sorted(ids.values()) != list(range(len(ids))):
        raise TextmillError("a sentencepiece model numbers its tokens from 0 without gaps; this vocabulary has gaps")
    unknown = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
    if unknown is None:
        raise TextmillError("a sentencepiece model needs a token for unknown text; this vocabulary has none")
    if model["type"] == "Unigram":
        scores = {text: float(score) for text, score in model["vocab"]}
    else:
        merged = [left + right for left, right in model["merges"]]
        scores = {text: -float(rank) for rank, text in reversed(list(enumerate(merged)))}
    added = {token["content"]: token["special"] for token in tree["added_tokens"]}

    def piece(text: str) -> SentencePiece:
        if text == unknown:
            return SentencePiece(text, 0.0, UNKNOWN)
        if text in added:
            return SentencePiece(text, 0.0, CONTROL if added[text] else USER_DEFINED)
        if model.get("byte_fallback") and _BYTE.fullmatch(text):
            return SentencePiece(text, 0.0, BYTE)
        return SentencePiece(text, scores.get(text, 0.0), NORMAL)

    return [piece(text) for text in sorted(ids, key=lambda text: ids[text])]


def _id_of(pieces: list[SentencePiece], kind: int) -> int:
    return next(number for number, piece in enumerate(pieces) if piece.type == kind)


def _normalizer(tree: Tree) -> bytes:
    """The normalizer's fields; a step that sentencepiece does not have is an error that names it."""
    charsmap = b""
    prefix = False
    remove = False
    escape = False
    top = tree["normalizer"] or {}
    for step in top.get("normalizers", [top] if top else []):
        pattern = (step.get("pattern") or {}).get("Regex")
        if step["type"] == "Precompiled":
            charsmap = base64.b64decode(step["precompiled_charsmap"])
        elif step["type"] == "Prepend" and step["prepend"] == SPACE:
            prefix = True
        elif step["type"] == "Replace" and pattern in (r"\A +| +\z", r" +\z", " {2,}"):
            remove = True
        elif step["type"] == "Replace" and step["pattern"].get("String") == " " and step["content"] == SPACE:
            escape = True
        else:
            raise TextmillError(f"a sentencepiece model has no place for the normalizer {step['type']}")
    for step in _splitters(tree["pre_tokenizer"]):
        if step["type"] not in SPLITTERS:
            raise TextmillError(f"a sentencepiece model has no place for the pre-tokenizer {step['type']}")
        if step["type"] == "Metaspace":
            escape = True
            prefix = prefix or step.get("prepend_scheme") in ("first", "always")
    fields = _bytes(1, b"nmt_nfkc" if charsmap else b"identity") + (_bytes(2, charsmap) if charsmap else b"")
    return fields + _number(3, prefix) + _number(4, remove) + _number(5, escape)


def _splitters(part: Any) -> list[Tree]:
    if not isinstance(part, dict):
        return []
    return [step for one in part["pretokenizers"] for step in _splitters(one)] if "pretokenizers" in part else [part]


def _piece(piece: SentencePiece) -> bytes:
    kind = b"" if piece.type == NORMAL else _number(3, piece.type)
    return _bytes(1, piece.text.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", piece.score) + kind


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value) & (1 << 64) - 1)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
