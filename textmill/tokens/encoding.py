"""Encodes row groups of one corpus shard into a token store, with lineage and a list of documents that failed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from textmill.corpus.conversations import turns_from_json
from textmill.corpus.shards import read_groups
from textmill.storage.files import read_json, write_bytes, write_json
from textmill.tokens.chat import render
from textmill.tokens.lineage import lineage_path, new_lineage
from textmill.tokens.store import StoreWriter
from textmill.tokens.vocabulary.encoders import REFERENCE, Encoder, is_encoding_error, open_encoder_in
from textmill.tokens.vocabulary.tokenizer import TurnTokens

BATCH = 2 << 20
"""Bytes of text encoded per call: small enough for the CPU cache, large enough to be worth a call."""
COUNT_NAMES = ("documents", "tokens", "bytes", "words", "quarantined")
COLUMNS = ["text", "source", "id"]
Level = Literal["document", "sentence"]
Ids = NDArray[Any]
Lengths = NDArray[np.int64]

LONG_SPACES = [
    space.encode()
    for space in "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008"
    "\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
]
"""White-space characters that take two or three bytes in UTF-8."""


@dataclass(frozen=True)
class DocumentFormat:
    """How a document is written as token ids."""

    level: Level
    bos_id: int | None
    """The token put before each document, if any."""
    eos_id: int | None
    """The token put after each document, if any."""
    dtype: str
    chat: TurnTokens | None = None
    """Conversations only: the special tokens around each turn."""


@dataclass(frozen=True)
class EncodingTask:
    """A task for one worker: row groups of a shard, and the store to write them to."""

    shard: Path
    groups: range
    prefix: Path
    tokenizer: Path
    fingerprint: str
    """Of the tokenizer; the same folder can contain another tokenizer later in the life of a process."""
    encoder: str
    document_format: DocumentFormat

    def path(self, suffix: str) -> Path:
        """An output file of this task."""
        return self.prefix.with_name(f"{self.prefix.name}.{suffix}")


@dataclass(frozen=True)
class Encoded:
    """Documents as ids, with the length of each sequence and the number of sequences in each document."""

    ids: Ids
    lengths: Lengths
    sequences: Lengths
    loss_mask: NDArray[np.uint8] | None = None
    """Conversations only: 1 for each id with loss."""


def encode_task(task: EncodingTask) -> dict[str, int]:
    """Run one task unless its counts exist already; return the counts."""
    if task.path("json").exists():
        found: dict[str, int] = read_json(task.path("json"))
        return found
    counts = dict.fromkeys(COUNT_NAMES, 0)
    failed: list[bytes] = []
    chat = task.document_format.chat is not None
    new_store = StoreWriter(task.prefix, np.dtype(task.document_format.dtype), has_loss_mask=chat)
    with new_store as store, new_lineage(lineage_path(task.prefix)) as lineage:
        tables = read_groups(task.shard, task.groups, [*COLUMNS, "messages"] if chat else COLUMNS)
        for batch in chain.from_iterable(map(_split_batches, tables)):
            kept, encoded, reasons = encode_batch(batch.column(-1 if chat else 0).to_pylist(), task)
            failed += [_quarantine_line(batch, task.shard, row, reason) for row, reason in reasons.items()]
            documents = batch.take(kept) if reasons else batch
            encoded = add_begin_and_end(encoded, task.document_format)
            sequences = None if task.document_format.level == "document" else encoded.sequences
            store.add_flat(encoded.ids, encoded.lengths, sequences, encoded.loss_mask)
            lineage.add(documents.column(1), documents.column(2))
            octets, bounds = buffers_of(documents.column(0))
            amounts = (len(kept), len(encoded.ids), len(octets), count_words(octets, bounds), len(reasons))
            for name, amount in zip(COUNT_NAMES, amounts, strict=True):
                counts[name] += amount
    if failed:
        write_bytes(task.path("quarantine.jsonl"), failed)
    write_json(task.path("json"), counts)
    return counts


def format_counts(splits: Mapping[str, Mapping[str, int]]) -> str:
    """The tokens of each split in words, and the documents that could not be encoded, if they were counted."""
    texts = [f"{split} {counts['tokens']:,} tokens" for split, counts in splits.items() if counts["tokens"]]
    if bad := sum(counts.get("quarantined", 0) for counts in splits.values()):
        texts.append(f"{bad:,} documents quarantined")
    return ", ".join(texts)


@lru_cache(maxsize=2)
def _open(folder: Path, fingerprint: str, kind: str) -> Encoder:
    return open_encoder_in(folder, kind)


def _split_batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Batches of about BATCH bytes of text, at least one row each."""
    for large in table.to_batches():
        ends = buffers_of(large.column(0))[1][1:]
        start = 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + BATCH, side="right")))
            yield large.slice(start, stop - start)
            start = stop


def _quarantine_line(batch: pa.RecordBatch, shard: Path, row: int, reason: str) -> bytes:
    record = {
        "file": batch.column(1)[row].as_py(),
        "place": batch.column(2)[row].as_py(),
        "shard": shard.name,
        "reason": reason,
    }
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def encode_batch(texts: list[str], task: EncodingTask) -> tuple[Lengths, Encoded, dict[int, str]]:
    """The rows that could be encoded, their ids, and the reason for each row that could not."""
    kept = np.arange(len(texts))
    reasons = dict[int, str]()
    try:
        encoded = _encode(texts, task.document_format, _open(task.tokenizer, task.fingerprint, task.encoder))
    except BaseException as error:
        if not is_encoding_error(error):
            raise
        reference = _open(task.tokenizer, task.fingerprint, REFERENCE)
        reasons = _find_failures(texts, task.document_format, reference)
        kept = np.setdiff1d(kept, list(reasons))
        encoded = _encode([texts[row] for row in kept], task.document_format, reference)
    empty = encoded.sequences == 0
    if empty.any():
        reasons |= dict.fromkeys(map(int, kept[empty]), "no tokens are left after encoding")
        kept = kept[~empty]
        encoded = replace(encoded, sequences=encoded.sequences[~empty])
    return kept, encoded, dict(sorted(reasons.items()))


def _find_failures(texts: list[str], document_format: DocumentFormat, encoder: Encoder) -> dict[int, str]:
    """The texts that cannot be encoded, each tried alone, with the reasons."""
    reasons = {}
    for row, text in enumerate(texts):
        try:
            _encode([text], document_format, encoder)
        except BaseException as error:
            if not is_encoding_error(error):
                raise
            reasons[row] = str(error).partition("\n")[0]
    return reasons


def _encode(texts: list[str], document_format: DocumentFormat, encoder: Encoder) -> Encoded:
    """Encode documents, the lines of documents, or conversations; sequences without ids are dropped, as in Megatron."""
    if document_format.chat is not None:
        rendered = render([turns_from_json(text) for text in texts], document_format.chat, encoder)
        return Encoded(rendered.ids, rendered.lengths, np.ones(len(texts), np.int64), rendered.loss_mask)
    if document_format.level == "document":
        ids, lengths = encoder.encode(texts)
        return Encoded(ids, lengths[lengths > 0], (lengths > 0).astype(np.int64))
    lines = [text.split("\n") for text in texts]
    ids, lengths = encoder.encode([line for document in lines for line in document])
    counts = np.fromiter(map(len, lines), np.int64, len(lines))
    sequences = np.add.reduceat((lengths > 0).astype(np.int64), np.cumsum(counts) - counts)
    return Encoded(ids, lengths[lengths > 0], sequences)


def add_begin_and_end(encoded: Encoded, document_format: DocumentFormat) -> Encoded:
    """Add the begin token before the first sequence of each document and the end token after the last, if requested."""
    if document_format.bos_id is None and document_format.eos_id is None:
        return encoded
    lengths = encoded.lengths.copy()
    ends = np.cumsum(encoded.lengths)
    last = np.cumsum(encoded.sequences) - 1
    first = last + 1 - encoded.sequences
    positions = [np.zeros(0, np.int64)]
    values = [encoded.ids[:0]]
    # Where an end and a begin token meet, the end comes first: np.insert is stable.
    for token, where, rows in (
        (document_format.eos_id, ends, last),
        (document_format.bos_id, ends - encoded.lengths, first),
    ):
        if token is not None:
            positions.append(where[rows])
            values.append(np.full(len(rows), token, encoded.ids.dtype))
            lengths[rows] += 1
    return Encoded(
        np.insert(encoded.ids, np.concatenate(positions), np.concatenate(values)), lengths, encoded.sequences
    )


def buffers_of(column: Any) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The UTF-8 bytes of an Arrow string column, and the offset of each text plus the end of the last one."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
    octets = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return octets[bounds[0] : bounds[-1]], bounds - bounds[0]


def count_words(octets: NDArray[np.uint8], bounds: NDArray[np.int32]) -> int:
    """Words separated by white space, in all texts: the sum of len(text.split())."""
    spaces = octets - np.uint8(9) <= 23  # tab to space; bytes below 9 wrap around to large numbers
    controls = octets - np.uint8(14) <= 13  # control characters between them that are not white space
    if controls.any():
        spaces &= ~controls
    if len(octets) and int(octets.max()) >= 0x80:
        _mark_long_spaces(octets, spaces)
    # A word starts after white space, or at the start of a text.
    starts = int(np.count_nonzero(spaces[:-1] > spaces[1:]))
    firsts = bounds[:-1][np.diff(bounds) > 0]
    inner = firsts[firsts > 0]
    return starts + int(np.count_nonzero(~spaces[firsts])) - int(np.count_nonzero(spaces[inner - 1] & ~spaces[inner]))


def _mark_long_spaces(octets: NDArray[np.uint8], spaces: NDArray[np.bool_]) -> None:
    leads = np.flatnonzero((octets == 0xC2) | (octets - np.uint8(0xE1) <= 2))
    for lead in (0xC2, 0xE1, 0xE2, 0xE3):
        here = leads[octets[leads] == lead]
        follow = octets[here + 1].astype(np.uint16)
        if lead != 0xC2:  # three bytes long
            follow = follow * np.uint16(256) + octets[here + 2]
        tails = [int.from_bytes(space[1:], "big") for space in LONG_SPACES if space[0] == lead]
        found = here[np.isin(follow, np.array(tails, np.uint16))]
        for step in range(2 if lead == 0xC2 else 3):
            spaces[found + step] = True
