"""One piece of the corpus encoded: a stretch of a shard to a store of its own, with its lineage and what could not be encoded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from textmill.corpus.conversations import turns_from_json
from textmill.corpus.shards import read_groups
from textmill.storage.files import read_json, write_bytes, write_json
from textmill.tokens.chat_rendering import Form as ChatForm
from textmill.tokens.chat_rendering import render
from textmill.tokens.lineage import LineageWriter, lineage_path
from textmill.tokens.store_writer import StoreWriter
from textmill.tokens.text_counts import buffers_of, count_words
from textmill.tokens.vocabulary.encoder import Encoder
from textmill.tokens.vocabulary.encoders import REFERENCE, is_refusal, open_encoder_in

BATCH = 2 << 20
"""Bytes of text that are encoded at a time: few enough to stay near the processor, enough to be worth a call."""
COUNTED = ("documents", "tokens", "bytes", "words", "quarantined")
COLUMNS = ["text", "source", "id"]
Level = Literal["document", "sentence"]
Ids = NDArray[Any]
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Form:
    """What a document becomes."""

    level: Level
    begin: int | None
    """The token before each document, if any."""
    end: int | None
    """The token after each document, if any."""
    dtype: str
    chat: ChatForm | None = None
    """Of conversations: what stands around each turn."""


@dataclass(frozen=True)
class Piece:
    """Some groups of rows of a shard, and the store that comes of them."""

    shard: Path
    groups: range
    prefix: Path
    tokenizer: Path
    fingerprint: str
    """The tokenizer's: a process may see two in one folder, one after the other."""
    encoder: str
    form: Form

    def path(self, ending: str) -> Path:
        """A file of this piece."""
        return self.prefix.with_name(f"{self.prefix.name}.{ending}")


@dataclass(frozen=True)
class Encoded:
    """Documents as ids: `lengths` of the sequences, and how many `sequences` each document has."""

    ids: Ids
    lengths: Lengths
    sequences: Lengths
    asked: NDArray[np.uint8] | None = None
    """Of conversations: which ids bear loss."""


def encode_piece(piece: Piece) -> dict[str, int]:
    """Encode one piece into its own store; done already, if its facts stand there."""
    if piece.path("json").exists():
        found: dict[str, int] = read_json(piece.path("json"))
        return found
    counts = dict.fromkeys(COUNTED, 0)
    refused: list[bytes] = []
    chat = piece.form.chat is not None
    new_store = StoreWriter(piece.prefix, np.dtype(piece.form.dtype), masked=chat)
    with new_store as store, LineageWriter(lineage_path(piece.prefix)) as lineage:
        for table in read_groups(piece.shard, piece.groups, [*COLUMNS, "messages"] if chat else COLUMNS):
            for batch in _batches_of(table):
                kept, encoded, reasons = encode_batch(batch.column(-1 if chat else 0).to_pylist(), piece)
                refused += [_line(batch, piece.shard, row, reason) for row, reason in reasons.items()]
                if reasons:
                    batch = batch.take(kept)
                encoded = marked(encoded, piece.form)
                sequences = None if piece.form.level == "document" else encoded.sequences
                store.add_flat(encoded.ids, encoded.lengths, sequences, encoded.asked)
                lineage.add(batch.column(1), batch.column(2))
                octets, bounds = buffers_of(batch.column(0))
                amounts = (len(kept), len(encoded.ids), len(octets), count_words(octets, bounds), len(reasons))
                for name, amount in zip(COUNTED, amounts, strict=True):
                    counts[name] += amount
    if refused:
        write_bytes(piece.path("quarantine.jsonl"), refused)
    write_json(piece.path("json"), counts)
    return counts


@lru_cache(maxsize=2)
def _open(folder: Path, fingerprint: str, kind: str) -> Encoder:
    return open_encoder_in(folder, kind)


def _batches_of(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Rows of about BATCH bytes of text, at least one."""
    for whole in table.to_batches():
        ends = buffers_of(whole.column(0))[1][1:]
        start = 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + BATCH, side="right")))
            yield whole.slice(start, stop - start)
            start = stop


def _line(batch: pa.RecordBatch, shard: Path, row: int, reason: str) -> bytes:
    place = {
        "file": batch.column(1)[row].as_py(),
        "place": batch.column(2)[row].as_py(),
        "shard": shard.name,
        "reason": reason,
    }
    return json.dumps(place, ensure_ascii=False).encode() + b"\n"


def encode_batch(texts: list[str], piece: Piece) -> tuple[Lengths, Encoded, dict[int, str]]:
    """The rows that could be encoded, their ids, and for each other row the reason."""
    kept, reasons = np.arange(len(texts)), dict[int, str]()
    try:
        encoded = _encode(texts, piece.form, _open(piece.tokenizer, piece.fingerprint, piece.encoder))
    except BaseException as error:
        if not is_refusal(error):
            raise
        encoded, reasons = _encode_one_by_one(texts, piece.form, _open(piece.tokenizer, piece.fingerprint, REFERENCE))
        kept = np.setdiff1d(kept, list(reasons))
    empty = encoded.sequences == 0
    if empty.any():
        reasons |= dict.fromkeys(map(int, kept[empty]), "the tokenizer leaves nothing of it")
        kept, encoded = kept[~empty], replace(encoded, sequences=encoded.sequences[~empty])
    return kept, encoded, dict(sorted(reasons.items()))


def _encode_one_by_one(texts: list[str], form: Form, encoder: Encoder) -> tuple[Encoded, dict[int, str]]:
    done, reasons = [], {}
    for row, text in enumerate(texts):
        try:
            done.append(_encode([text], form, encoder))
        except BaseException as error:
            if not is_refusal(error):
                raise
            reasons[row] = str(error).partition("\n")[0]
    nothing = Encoded(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    parts = [nothing, *done]
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "lengths", "sequences")]
    asked = np.concatenate([np.zeros(0, np.uint8), *(part.asked for part in done if part.asked is not None)])
    return Encoded(joined[0], joined[1], joined[2], None if form.chat is None else asked), reasons


def _encode(texts: list[str], form: Form, encoder: Encoder) -> Encoded:
    """Encode documents, their lines, or conversations; a sequence without ids is left out, as Megatron does."""
    if form.chat is not None:
        made = render([turns_from_json(text) for text in texts], form.chat, encoder)
        return Encoded(made.ids, made.lengths, np.ones(len(texts), np.int64), made.asked)
    if form.level == "document":
        ids, lengths = encoder.encode(texts)
        return Encoded(ids, lengths[lengths > 0], (lengths > 0).astype(np.int64))
    lines = [text.split("\n") for text in texts]
    ids, lengths = encoder.encode([line for document in lines for line in document])
    counts = np.fromiter(map(len, lines), np.int64, len(lines))
    sequences = np.add.reduceat((lengths > 0).astype(np.int64), np.cumsum(counts) - counts)
    return Encoded(ids, lengths[lengths > 0], sequences)


def marked(encoded: Encoded, form: Form) -> Encoded:
    """With the begin token before the first sequence of each document and the end token after its last, as asked."""
    if form.begin is None and form.end is None:
        return encoded
    lengths, ends = encoded.lengths.copy(), np.cumsum(encoded.lengths)
    last = np.cumsum(encoded.sequences) - 1
    first = last + 1 - encoded.sequences
    places, values = [np.zeros(0, np.int64)], [encoded.ids[:0]]
    # An end and a begin at one place stay in this order: the insertion is stable.
    for token, where, rows in ((form.end, ends, last), (form.begin, ends - encoded.lengths, first)):
        if token is not None:
            places.append(where[rows])
            values.append(np.full(len(rows), token, encoded.ids.dtype))
            lengths[rows] += 1
    return Encoded(np.insert(encoded.ids, np.concatenate(places), np.concatenate(values)), lengths, encoded.sequences)
