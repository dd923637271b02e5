"""A sentencepiece .model, read without that library: its few protobuf fields, and the same tokenizer built of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from textmill.errors import TextmillError
from textmill.tokens.vocabulary.algorithms import SPACE, apart

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
RESERVED = (UNKNOWN, CONTROL, BYTE)
"""Types that no text leads to, whatever it looks like."""
ROLES = {"unk_token": 40, "bos_token": 41, "eos_token": 42, "pad_token": 43}
IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2, "pad_token": -1}
"""What a model without these fields has."""


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SpmModel:
    """What a .model file says."""

    pieces: list[Piece]
    type: int
    byte_fallback: bool
    suffix: bool
    roles: dict[str, str]
    charsmap: bytes
    dummy_prefix: bool
    remove_extra: bool
    escape: bool


def open_spm(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a .model file, and its special tokens by the names that transformers has for them."""
    try:
        model = parse_model(path.read_bytes())
    except (ValueError, struct.error, OSError) as error:
        raise TextmillError(
            f"{path}: not a sentencepiece model ({error}); give the .model file that spm_train wrote"
        ) from None
    if model.type not in (UNIGRAM, BPE) or model.suffix:
        kind = "spaces behind words" if model.suffix else f"model type {model.type}"
        raise TextmillError(
            f"{path}: a sentencepiece model with {kind}; textmill opens unigram (1) and bpe (2), spaces before words"
        )
    if any(piece.type == UNUSED for piece in model.pieces):
        raise TextmillError(
            f"{path}: a model with unused pieces, which textmill cannot open; write it without a restricted vocabulary"
        )
    try:
        return _inner_of(model), model.roles
    except Exception as error:  # the library raises plain Exception
        raise TextmillError(f"{path}: a damaged sentencepiece model ({error}); fetch it anew") from None


def parse_model(data: bytes) -> SpmModel:
    """The fields of a ModelProto that decide what text becomes."""
    top = list(_fields(data))
    pieces = [_piece(value) for number, value in top if number == 1 and isinstance(value, bytes)]
    trainer, normalizer = (
        dict(_fields(b"".join(v for n, v in top if n == wanted and isinstance(v, bytes)))) for wanted in (2, 3)
    )
    if not pieces or len({piece.text for piece in pieces}) != len(pieces):
        raise ValueError("it has no pieces, or one twice")
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
    """Field numbers and values of a protobuf message: numbers, or the bytes of texts, messages and floats."""
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
            raise ValueError("it ends inside a number")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError(f"a number without end at byte {at:,}")


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value


def _signed(value: int | bytes) -> int:
    number = _number(value) & (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece without text or score")
    return Piece(text.decode(), struct.unpack("<f", score)[0], _number(fields.get(3, NORMAL)))


def _inner_of(model: SpmModel) -> Tokenizer:
    inner = Tokenizer(_unigram(model) if model.type == UNIGRAM else _bpe(model))
    own = [piece.text for piece in model.pieces if piece.type == USER_DEFINED]
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    prefix_once = model.dummy_prefix and bool(own)  # text behind a user's own symbol gets no space of its own
    if model.remove_extra:  # a first space that stays stands for the one that would be put there
        steps += [
            normalizers.Replace(Regex(r" +\z" if prefix_once else r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    known = {piece.text for piece in model.pieces if piece.type == NORMAL}
    reserved = [piece.text for piece in model.pieces if piece.type in RESERVED]
    cuts: list[pre_tokenizers.PreTokenizer] = [apart(reserved, known)] if reserved else []
    space = SPACE if model.escape else " "
    if prefix_once:
        cuts.append(pre_tokenizers.Metaspace(space, prepend_scheme="first", split=False))
    elif model.dummy_prefix:
        steps.append(normalizers.Prepend(space))
    if model.escape:
        steps.append(normalizers.Replace(" ", SPACE))
    if all(space not in piece.text.lstrip(space) for piece in model.pieces):
        # No piece reaches over the beginning of a word, so words can be looked up one by one.
        cuts.append(pre_tokenizers.Split(Regex(f"{space}+[^{space}]*"), "isolated"))
    inner.normalizer = normalizers.Sequence(steps)
    if cuts:
        inner.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if model.dummy_prefix else undo)
    inner.add_special_tokens([piece.text for piece in model.pieces if piece.type in (UNKNOWN, CONTROL)])
    inner.add_tokens([AddedToken(text, normalized=False, special=False) for text in own])
    return inner


def _unigram(model: SpmModel) -> models.Model:
    lowest = min(
        (piece.score for piece in model.pieces if piece.type == NORMAL), default=0.0
    )  # what is unknown is measured by it
    pieces = [(piece.text, piece.score if piece.type in (NORMAL, USER_DEFINED) else lowest) for piece in model.pieces]
    unknown = next((number for number, piece in enumerate(model.pieces) if piece.type == UNKNOWN), None)
    return models.Unigram(pieces, unk_id=unknown, byte_fallback=model.byte_fallback)


def _bpe(model: SpmModel) -> models.Model:
    """Sentencepiece joins the two neighbours whose piece has the best score; here every way to make a piece is a merge of its rank."""
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
