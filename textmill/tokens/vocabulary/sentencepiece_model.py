"""Opens a sentencepiece .model without that library: reads its protobuf fields and builds an equal tokenizer."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from textmill.errors import TextmillError
from textmill.tokens.vocabulary.algorithms import SPACE, split_reserved

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
        return _build_tokenizer(model), model.roles
    except Exception as error:  # the library raises plain Exception
        raise TextmillError(f"{path}: a damaged sentencepiece model ({error}); download it again") from None


def parse_model(data: bytes) -> SpmModel:
    """Parse the fields of a ModelProto that matter for encoding."""
    top = list(_fields(data))
    pieces = [_parse_piece(value) for number, value in top if number == 1 and isinstance(value, bytes)]
    trainer, normalizer = (
        dict(_fields(b"".join(v for n, v in top if n == field and isinstance(v, bytes)))) for field in (2, 3)
    )
    if not pieces or len({piece.text for piece in pieces}) != len(pieces):
        raise ValueError("it has no pieces, or a piece occurs twice")
    charsmap = normalizer.get(2, b"")
    ids = {role: _signed(trainer.get(field, IDS[role])) for role, field in ROLES.items()}
    return SpmModel(
        pieces=pieces,
        type=_number(trainer.get(3, UNIGRAM)),
        byte_fallback=bool(trainer.get(35, 0)),
        suffix=bool(trainer.get(24, 0)),
        roles={
            role: pieces[id_].text
            for role, id_ in ids.items()
            if 0 <= id_ < len(pieces) and pieces[id_].type in (UNKNOWN, CONTROL)
        },
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra=bool(normalizer.get(4, 1)),
        escape=bool(normalizer.get(5, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message; strings, messages and floats are returned as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire} at byte {at:,}")
        length, at = _varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        if at + length > len(data):
            raise ValueError(f"it ends inside a field, at byte {at:,}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends inside a varint")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError(f"a varint without end at byte {at:,}")


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("found bytes, expected a number")
    return value


def _signed(value: int | bytes) -> int:
    number = _number(value) & (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _parse_piece(data: bytes) -> SentencePiece:
    fields = dict(_fields(data))
    text = fields.get(1, b"")
    score = fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece without text or score")
    return SentencePiece(text.decode(), struct.unpack("<f", score)[0], _number(fields.get(3, NORMAL)))


def _build_tokenizer(model: SpmModel) -> Tokenizer:
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
