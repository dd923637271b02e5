"""Inspect a text: read a sample of its documents, and fit a trial vocabulary on a part of them."""

from __future__ import annotations

import hashlib
import json
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from textmill.config import CorpusConfig, TokenizerConfig
from textmill.corpus.accounts import format_count
from textmill.corpus.dedup.minhash import band_hashes, choose_bands, jaccard, shingle, shingle_set
from textmill.corpus.dedup.near_duplicates import SHINGLE_SIZE
from textmill.corpus.find_sources import describe_scans, group_chunks, read_records, source_state, split_into_chunks
from textmill.corpus.records import BadRecord
from textmill.corpus.source import BINARY_DOCUMENTS, Source, SourceChunk
from textmill.corpus.streams import decompress, open_raw
from textmill.errors import TextmillError
from textmill.planning.plan import TextProfile
from textmill.tokens.vocabulary.algorithms import cut_text, train_bpe_on_texts

SAMPLE_BYTES = 4 << 20
"""Text to read; the rest is estimated from it."""
SAMPLE_CHUNKS = 32
"""Places of the text to read from."""
SAMPLE_SECONDS = 10.0
"""Reading stops after so many seconds, whatever was read."""
HEAD_BYTES = 16 << 20
"""Decompressed bytes at a file's beginning that show how much of a file is text: many, since a compressed file is read
ahead."""
NO_STREAM = {"parquet": 0.4, "arrow": 1.0}
"""Formats that are not read from the beginning to the end: bytes of a file for a byte of its text."""
COMPARED_CHARACTERS = 20_000
"""The beginning of a document that is compared with those of others."""
SKETCHED_TEXTS = 256
"""Texts that are sketched at a time."""
GROUP_FIELDS = (
    "author",
    "book",
    "book_id",
    "series",
    "thread",
    "thread_id",
    "site",
    "domain",
    "host",
    "channel",
    "date",
)
"""Fields whose value texts have in common that are more alike than others, the first that fits counts."""
MIN_GROUPS = 20
MIN_GROUP_DOCUMENTS = 1.5
"""Different values of such a field in the sample, at least, and documents of each in the mean."""
MIN_WITH_VALUE = 0.9
"""The fraction of the documents that have a value."""
HELD_OUT = 8
"""One document in this many, or one piece of long documents, is not used to fit the trial vocabulary."""


@dataclass
class _Sample:
    texts: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    bytes: int = 0
    squared_bytes: int = 0
    """The sum of the squares of the documents' bytes."""
    duplicate_bytes: int = 0
    documents: int = 0
    bad_records: int = 0
    first_bad_record: str = ""
    scans: list[str] = field(default_factory=list)
    pieces: int = 0
    beginnings: list[str] = field(default_factory=list)
    """Of all different documents."""
    values: dict[str, Counter[str]] = field(default_factory=dict)
    """How many documents have each value of a field that is kept."""

    def add(self, text: str, limit: int) -> int:
        """Count a document, and keep it; of a long one, pieces of about `limit` bytes in all. Returns its bytes."""
        encoded = _encoded(text)
        size = len(encoded)
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        self.documents += 1
        self.bytes += size
        self.squared_bytes += size * size
        if digest in self.seen:
            self.duplicate_bytes += size
            return size
        self.seen.add(digest)
        self.beginnings.append(text[:COMPARED_CHARACTERS])
        for piece in cut_text(text):
            self.pieces += 1
            (self.held_out if self.pieces % HELD_OUT == 0 else self.texts).append(piece)
            limit -= len(_encoded(piece))
            if limit <= 0:
                break
        return size


def inspect_text(sources: Sequence[Source], corpus: CorpusConfig, vocabs: Sequence[int]) -> TextProfile:
    """The profile of a text, from a sample of at most SAMPLE_BYTES, read at SAMPLE_CHUNKS places of it."""
    sizes = [source_state(source).bytes for source in sources]
    total = sum(sizes)
    groups = list(group_chunks(split_into_chunks(sources, corpus.documents, sizes), total))
    sample, read_bytes = _read_sample(groups, corpus)
    if not sample.texts:
        found = "no text"
        if sample.bad_records:
            found = f"{format_count(sample.bad_records, 'unreadable record')}, {_describe_bad_records(sample)}"
        raise TextmillError(f"{sources[0].name}: found {found}; name files with text, or see textmill prepare --help")
    if sample.bad_records > corpus.max_unreadable * sample.documents:
        found = f"{sample.bad_records:,} of {sample.bad_records + sample.documents:,} records"
        raise TextmillError(
            f"{found} of a sample cannot be read, so that prepare would stop; {_describe_bad_records(sample)}; "
            "leave such files out, or correct them"
        )
    scale = total / read_bytes if read_bytes else 1.0
    scripts = count_scripts(text[:2000] for text in sample.texts[:500])
    return TextProfile(
        bytes=max(sample.bytes, round(sample.bytes * scale)),
        documents=max(sample.documents, round(sample.documents * scale)),
        duplicates=sample.duplicate_bytes / max(1, sample.bytes),
        bytes_per_token=_bytes_per_token(sample, vocabs),
        scripts={script: count / max(1, scripts.total()) for script, count in scripts.most_common(4)},
        typical_document_bytes=sample.squared_bytes / max(1, sample.bytes),
        split_by=_find_group_field(sample) or "document",
        near_duplicates=0.0 if corpus.chat else _near_duplicates(sample.beginnings, corpus),
        scans=describe_scans(sample.scans) if sample.scans else "",
    )


def _describe_bad_records(sample: _Sample) -> str:
    all_scans = len(sample.scans) == sample.bad_records
    return describe_scans(sample.scans) if all_scans else f"the first: {sample.first_bad_record}"


def _find_group_field(sample: _Sample) -> str | None:
    """The `corpus.split_by` of the first kept field whose values many documents have in common."""
    for name, counts in sample.values.items():
        is_common = counts.total() >= MIN_WITH_VALUE * sample.documents
        if is_common and len(counts) >= MIN_GROUPS and counts.total() >= MIN_GROUP_DOCUMENTS * len(counts):
            return f"field:{name}"
    return None


def _near_duplicates(texts: Sequence[str], corpus: CorpusConfig) -> float:
    """The fraction of the characters in texts that nearly repeat an earlier one, as `corpus.dedup=near` finds them."""
    unit = corpus.dedup_shingles
    bands, rows = choose_bands(corpus.dedup_threshold)
    blocks = [texts[start : start + SKETCHED_TEXTS] for start in range(0, len(texts), SKETCHED_TEXTS)]
    sketches = [band_hashes(*shingle(block, unit, SHINGLE_SIZE), bands, rows).tolist() for block in blocks]
    first_in_band: dict[tuple[int, int], int] = {}
    repeated = 0
    for number, hashes in enumerate(chain.from_iterable(sketches)):
        earlier = {first_in_band.setdefault(band, number) for band in enumerate(hashes)} - {number}
        pairs = ([shingle_set(texts[one], unit, SHINGLE_SIZE) for one in (number, other)] for other in earlier)
        if any(jaccard(*pair) >= corpus.dedup_threshold for pair in pairs):
            repeated += len(texts[number])
    return repeated / max(1, sum(map(len, texts)))


def _read_sample(groups: Sequence[Sequence[SourceChunk]], corpus: CorpusConfig) -> tuple[_Sample, float]:
    """The sample, and how many bytes of the files it stands for."""
    places = groups[:: max(1, len(groups) // SAMPLE_CHUNKS)]
    share = SAMPLE_BYTES // len(places)
    end = time.monotonic() + SAMPLE_SECONDS
    sample = _Sample()
    read_bytes = 0.0
    ratios = dict[str, float]()
    for group in places:
        left = share
        for chunk in group:
            taken = 0
            for text in _texts(chunk, corpus, sample):
                taken += sample.add(text, left - taken)
                if taken >= left or time.monotonic() > end:
                    break
            size = chunk.stop - chunk.start
            is_cut = taken >= left or time.monotonic() > end
            if is_cut and (name := chunk.source.address) not in ratios:
                ratios[name] = _file_bytes_per_text_byte(chunk.source, corpus)
            read_bytes += min(size, taken * ratios[name]) if is_cut else size
            left -= taken
            if is_cut:
                break
        if time.monotonic() > end:
            break
    return sample, read_bytes


def _texts(chunk: SourceChunk, corpus: CorpusConfig, sample: _Sample) -> Iterator[str]:
    for record in read_records(chunk, corpus):
        if isinstance(record, BadRecord):
            sample.bad_records += 1
            sample.first_bad_record = sample.first_bad_record or str(record)
            sample.scans += [record.source] if record.is_scan else []
        elif record.turns is not None:
            yield "\n".join(text for _, text in record.turns)
        elif record.text:
            for name, value in json.loads(record.meta or "{}").items():
                if value is not None and name in corpus.keep_fields:
                    sample.values.setdefault(name, Counter())[str(value)] += 1
            yield record.text


def _file_bytes_per_text_byte(source: Source, corpus: CorpusConfig) -> float:
    """Bytes of a file, which may be compressed and have markup, for a byte of its text; from the file's beginning."""
    if source.format in NO_STREAM:
        return NO_STREAM[source.format]
    if source.format in BINARY_DOCUMENTS:
        chunk = SourceChunk(source, 0, 0)
        return source_state(source).bytes / max(
            1, sum(len(_encoded(text)) for text in _texts(chunk, corpus, _Sample()))
        )
    with TemporaryDirectory() as folder:
        begin = Path(folder) / "begin"
        with open_raw(source.address) as raw:
            stream = decompress(raw, source.address)
            data = stream.read(HEAD_BYTES)
            file_bytes = raw.tell()
        begin.write_bytes(data[: data.rfind(b"\n") + 1] or data)
        part = source._replace(address=str(begin))
        chunk = SourceChunk(part, 0, begin.stat().st_size)
        text_bytes = sum(len(_encoded(text)) for text in _texts(chunk, corpus, _Sample()))
    return file_bytes / text_bytes if text_bytes else 1.0


def _bytes_per_token(sample: _Sample, vocabs: Sequence[int]) -> dict[int, float]:
    """One vocabulary is fitted, the largest; a smaller one is its beginning, since merges are found in that order."""
    held_out = sample.held_out or sample.texts
    size = sum(len(_encoded(text)) for text in held_out)
    with _one_thread():
        fitted = train_bpe_on_texts(sample.texts, TokenizerConfig(vocab=max(vocabs)))
        encoded = fitted.encode_batch_fast(held_out, add_special_tokens=False)
    ids = Counter(number for one in encoded for number in one.ids)
    model = json.loads(fitted.to_str())["model"]
    found = {}
    for vocab in sorted(vocabs):
        lengths = _token_lengths(model["vocab"], model["merges"], vocab)
        tokens = sum(lengths[number] * count for number, count in ids.items())
        found[vocab] = size / max(1, tokens + len(held_out))  # and an end token for each document
        if fitted.get_vocab_size() < vocab:
            break  # the sample has no more merges
    return found


def _token_lengths(numbers: dict[str, int], merges: Sequence[tuple[str, str]], vocab: int) -> dict[int, int]:
    """How many tokens of the first `vocab` each token of a vocabulary is made of."""
    lengths = dict.fromkeys(numbers.values(), 1)
    for left, right in merges:
        number = numbers[left + right]
        if number >= vocab and lengths[number] == 1:
            lengths[number] = lengths[numbers[left]] + lengths[numbers[right]]
    return lengths


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tokenizers library fits this little text faster on one thread: its threads mostly wait for each other."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def count_scripts(texts: Iterable[str]) -> Counter[str]:
    """Letters by script, with which Unicode names begin: HANGUL SYLLABLE GA, LATIN SMALL LETTER A."""
    counts: Counter[str] = Counter()
    for letter, count in Counter(chain.from_iterable(texts)).items():
        if letter.isalpha():
            counts[unicodedata.name(letter, "OTHER").partition(" ")[0].capitalize()] += count
    return counts
