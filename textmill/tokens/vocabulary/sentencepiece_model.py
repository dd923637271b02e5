"""Reads sentencepiece .model files as equal tokenizers, and describes a tokenizer by such a model, for GGUF.

Without the sentencepiece library: its processor encodes on its own, while here a tokenizer of the tokenizers library is
built, and reading the fields of a file takes fewer lines than its generated classes and protobuf need.
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from textmill.errors import TextmillError
from textmill.tokens.protobuf import read_fields
from textmill.tokens.vocabulary.algorithms import split_reserved
from textmill.tokens.vocabulary.token_bytes import BYTE_TOKEN, SPACE, is_byte_level

UNIGRAM = 1
BPE = 2
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
RESERVED = (UNKNOWN, CONTROL, BYTE)
"""Types of pieces that no text is encoded as."""
ROLES = {"unk_token": 40, "bos_token": 41, "eos_token": 42, "pad_token": 43}
IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2, "pad_token": -1}
"""Default ids of models without these fields."""
SPLITTERS = {"Split", "Punctuation", "Digits", "Metaspace", "Sequence"}
"""What may split words: no token goes across its borders, so that sentencepiece finds the same tokens without it."""


@dataclass(frozen=True)
class SentencePiece:
    """An entry of the vocabulary; sentencepiece calls it a piece."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SpmModel:
    """The fields of a .model file that are needed for encoding."""

    pieces: list[SentencePiece]
    type: int
    byte_fallback: bool
    suffix: bool
    roles: dict[str, str]
    charsmap: bytes
    dummy_prefix: bool
    remove_extra: bool
    escape: bool


def open_sentencepiece(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a .model file, and its special tokens by transformers' names for them."""
    try:
        model = parse_model(path.read_bytes())
    except (ValueError, struct.error, OSError) as error:
        raise TextmillError(
            f"{path}: not a sentencepiece model ({error}); name a .model file written by spm_train"
        ) from None
    if model.type not in (UNIGRAM, BPE) or model.suffix:
        kind = "spaces after words" if model.suffix else f"model type {model.type}"
        raise TextmillError(
            f"{path}: is a sentencepiece model with {kind}; "
            f"supported are unigram (1) and bpe (2) with spaces before words"
        )
    if any(piece.type == UNUSED for piece in model.pieces):
        raise TextmillError(
            f"{path}: has unused pieces, which are not supported; write the model without a restricted vocabulary"
        )
    try:
        return build_tokenizer(model), model.roles
    except Exception as error:  # the library raises plain Exception
        raise TextmillError(f"{path}: a damaged sentencepiece model ({error}); download it again") from None


def parse_model(data: bytes) -> SpmModel:
    """Parse the fields of a ModelProto that matter for encoding."""
    _, parts = read_fields(data)
    pieces = [_parse_piece(piece) for piece in parts.get(1, [])]
    trainer, _ = read_fields(b"".join(parts.get(2, [])))
    normalizer, normalizer_bytes = read_fields(b"".join(parts.get(3, [])))
    if not pieces or len({piece.text for piece in pieces}) != len(pieces):
        raise ValueError("it has no pieces, or a piece occurs twice")
    roles = {}
    for role, field in ROLES.items():
        id_ = trainer.get(field, IDS[role])  # a negative number, for no such token, is beyond the pieces
        if 0 <= id_ < len(pieces) and pieces[id_].type in (UNKNOWN, CONTROL):
            roles[role] = pieces[id_].text
    return SpmModel(
        pieces=pieces,
        type=trainer.get(3, UNIGRAM),
        byte_fallback=bool(trainer.get(35, 0)),
        suffix=bool(trainer.get(24, 0)),
        roles=roles,
        charsmap=normalizer_bytes.get(2, [b""])[-1],
        dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra=bool(normalizer.get(4, 1)),
        escape=bool(normalizer.get(5, 1)),
    )


def _parse_piece(data: bytes) -> SentencePiece:
    integers, others = read_fields(data)
    (score,) = struct.unpack("<f", others.get(2, [bytes(4)])[-1])
    return SentencePiece(others.get(1, [b""])[-1].decode(), score, integers.get(3, NORMAL))


def build_tokenizer(model: SpmModel) -> Tokenizer:
    """A tokenizer that encodes as the model does."""
    inner = Tokenizer(_unigram(model) if model.type == UNIGRAM else _bpe(model))
    user_defined = [piece.text for piece in model.pieces if piece.type == USER_DEFINED]
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    prefix_once = model.dummy_prefix and bool(user_defined)  # text after a user-defined symbol gets no dummy prefix
    if model.remove_extra:  # with prefix_once a leading space stays, because it takes the place of the dummy prefix
        steps += [
            normalizers.Replace(Regex(r" +\z" if prefix_once else r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    known = {piece.text for piece in model.pieces if piece.type == NORMAL}
    reserved = [piece.text for piece in model.pieces if piece.type in RESERVED]
    splits: list[pre_tokenizers.PreTokenizer] = [split_reserved(reserved, known)] if reserved else []
    space = SPACE if model.escape else " "
    if prefix_once:
        splits.append(pre_tokenizers.Metaspace(space, prepend_scheme="first", split=False))
    elif model.dummy_prefix:
        steps.append(normalizers.Prepend(space))
    if model.escape:
        steps.append(normalizers.Replace(" ", SPACE))
    if all(space not in piece.text.lstrip(space) for piece in model.pieces):
        # No piece contains the start of a second word, so words can be encoded one by one.
        splits.append(pre_tokenizers.Split(Regex(f"{space}+[^{space}]*"), "isolated"))
    inner.normalizer = normalizers.Sequence(steps)
    if splits:
        inner.pre_tokenizer = pre_tokenizers.Sequence(splits)
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if model.dummy_prefix else undo)
    inner.add_special_tokens([piece.text for piece in model.pieces if piece.type in (UNKNOWN, CONTROL)])
    inner.add_tokens([AddedToken(text, normalized=False, special=False) for text in user_defined])
    return inner


def _unigram(model: SpmModel) -> models.Model:
    lowest = min(
        (piece.score for piece in model.pieces if piece.type == NORMAL), default=0.0
    )  # the library derives the score of unknown characters from it
    pieces = [(piece.text, piece.score if piece.type in (NORMAL, USER_DEFINED) else lowest) for piece in model.pieces]
    unknown = next((number for number, piece in enumerate(model.pieces) if piece.type == UNKNOWN), None)
    return models.Unigram(pieces, unk_id=unknown, byte_fallback=model.byte_fallback)


def _bpe(model: SpmModel) -> models.Model:
    """The merges of a BPE model: every pair of pieces that forms a piece, ordered by the score of the result.

    Sentencepiece itself has no merges; it joins the neighbours whose result has the best score.
    """
    vocab = {piece.text: number for number, piece in enumerate(model.pieces)}
    usable = {piece.text for piece in model.pieces if piece.type == NORMAL}
    ranked = sorted(
        (piece for piece in model.pieces if piece.type == NORMAL and len(piece.text) > 1),
        key=lambda piece: -piece.score,
    )
    merges = []
    for piece in ranked:
        halves = [(piece.text[:cut], piece.text[cut:]) for cut in range(1, len(piece.text))]
        merges += [(left, right) for left, right in halves if left in usable and right in usable]
    unknown = next((piece.text for piece in model.pieces if piece.type == UNKNOWN), None)
    return models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


def is_sentencepiece(tree: dict[str, Any]) -> bool:
    """Whether a tokenizer.json has a model that a .model file can hold."""
    return tree["model"]["type"] == "Unigram" or (tree["model"]["type"] == "BPE" and not is_byte_level(tree))


def describe_tokenizer(inner: Tokenizer) -> SpmModel:
    """The model that encodes as a tokenizer does, without the roles of its special tokens."""
    tree: dict[str, Any] = json.loads(inner.to_str())
    charsmap, prefix, remove, escape = _normalizer_of(tree)
    return SpmModel(
        pieces=_pieces_of(tree, inner),
        type=UNIGRAM if tree["model"]["type"] == "Unigram" else BPE,
        byte_fallback=bool(tree["model"].get("byte_fallback")),
        suffix=False,
        roles={},
        charsmap=charsmap,
        dummy_prefix=prefix,
        remove_extra=remove,
        escape=escape,
    )


def _pieces_of(tree: dict[str, Any], inner: Tokenizer) -> list[SentencePiece]:
    model = tree["model"]
    ids = inner.get_vocab(with_added_tokens=True)
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
        if model.get("byte_fallback") and BYTE_TOKEN.fullmatch(text):
            return SentencePiece(text, 0.0, BYTE)
        return SentencePiece(text, scores.get(text, 0.0), NORMAL)

    return [piece(text) for text in sorted(ids, key=lambda text: ids[text])]


def _normalizer_of(tree: dict[str, Any]) -> tuple[bytes, bool, bool, bool]:
    """(charsmap, dummy_prefix, remove_extra, escape); a step that sentencepiece does not have is an error."""
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
    for step in _flatten(tree["pre_tokenizer"]):
        if step["type"] not in SPLITTERS:
            raise TextmillError(f"a sentencepiece model has no place for the pre-tokenizer {step['type']}")
        if step["type"] == "Metaspace":
            escape = True
            prefix = prefix or step.get("prepend_scheme") in ("first", "always")
    return charsmap, prefix, remove, escape


def _flatten(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The pre-tokenizers of a sequence, also of nested ones."""
    if step is None:
        return []
    return [inside for one in step["pretokenizers"] for inside in _flatten(one)] if "pretokenizers" in step else [step]
