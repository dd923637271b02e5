"""The embed command: a vector for each text, as JSON lines or as a NumPy file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from textmill.checkpoints.folders import StepChoice
from textmill.config import EmbedConfig, RunConfig
from textmill.errors import TextmillError, warn
from textmill.generation.prompts import read_file_lines, read_piped_lines
from textmill.models import Shape, find_run_model, open_family
from textmill.models.pooling import Pooling, read_pooling
from textmill.storage.files import atomic_writer, format_path, make_folder_for
from textmill.storage.progress import progress
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from textmill.generation.encoder import Embedder, Vectors


BLOCK_TEXTS = 4096
"""Texts that are read, sorted by length and computed together."""
SUFFIXES = (".npy", ".jsonl")


class Writer(Protocol):
    """Where embeddings go."""

    def write(self, texts: Sequence[str], encoded: Sequence[EncodedText], vectors: Vectors) -> None:
        """Add the next texts."""
        ...


@dataclass
class Truncated:
    """Counts texts that lost tokens."""

    texts: int = 0
    """All texts."""
    count: int = 0
    """Those that were truncated."""
    longest_text: int = 0
    """In tokens, before it was truncated."""

    def add(self, encoded: Sequence[EncodedText]) -> None:
        """Count a block of texts."""
        self.texts += len(encoded)
        self.count += sum(text.truncated for text in encoded)
        self.longest_text = max([self.longest_text, *(text.tokens for text in encoded)])

    def report(self, longest: int) -> None:
        """Warn if there were any."""
        if self.count:
            warn(
                f"{self.count:,} of {self.texts:,} texts are longer than {longest:,} tokens and were truncated; the "
                f"longest has {self.longest_text:,}"
            )


def embed(
    config: RunConfig, texts: Sequence[str] = (), step: StepChoice | None = None, out: str | None = None
) -> Vectors | None:
    """Compute the embedding of each text, of each line of a file, or of each line that is piped in.

    Prints JSON lines, or writes `out` (.npy or .jsonl), which need not fit into memory. Returns the vectors of texts
    that are given, unless they are written.
    """
    from textmill.generation.encoder import open_embedder  # imports torch, which is slow

    if out is not None and Path(out).suffix not in SUFFIXES:
        raise TextmillError(f"--out: '{out}' is no {' or '.join(SUFFIXES)} file; choose one of these endings")
    checkpoint = find_run_model(config, step)
    arguments = list(texts)
    all_texts = read_texts(arguments)
    total = count_texts(arguments)
    if out is not None:
        make_folder_for(Path(out), "--out")
    embedder = open_embedder(checkpoint, config.engine, config.embed)
    returned: list[Vectors] | None = [] if are_texts(arguments) and out is None else None
    with ExitStack() as stack:
        writer: Writer
        if out is None:
            writer = _JsonLines(partial(print, end="", flush=True), returned)
        else:
            stream = stack.enter_context(atomic_writer(Path(out)))
            if out.endswith(".jsonl"):
                writer = _JsonLines(lambda line: stream.write(line.encode()), None)
            else:
                writer = _NumpyFile(stream, embedder.texts.dimension)
        truncated = _embed_all(embedder, all_texts, total, writer, show_progress=out is not None)
        if isinstance(writer, _NumpyFile):
            writer.end()
    truncated.report(embedder.texts.longest)
    if out is not None:
        print(f"{format_path(Path(out))}: {truncated.texts:,} embeddings of {embedder.texts.dimension} numbers")
    return np.concatenate(returned) if returned else None


def _embed_all(
    embedder: Embedder, texts: Iterable[str], total: int | None, writer: Writer, *, show_progress: bool
) -> Truncated:
    truncated = Truncated()
    with ExitStack() as stack:
        bar = stack.enter_context(progress("embed", total, "texts", "tokens")) if show_progress else None
        for block in _blocks(texts):
            encoded = embedder.texts.encode(block)
            truncated.add(encoded)
            ids = [text.ids for text in encoded]
            vectors: Vectors = np.zeros((len(block), embedder.texts.dimension), np.float32)
            for numbers, batch_vectors in embedder.batches(ids):
                vectors[numbers] = batch_vectors
                if bar:
                    bar.advance(len(numbers), sum(len(ids[number]) for number in numbers))
            writer.write(block, encoded, vectors)
    return truncated


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    stream = iter(texts)
    while block := list(itertools.islice(stream, BLOCK_TEXTS)):
        yield block


class _JsonLines:
    """Lines such as {"text": "A mill.", "tokens": 4, "embedding": [0.1, ...]}; `returned` also gets the vectors."""

    def __init__(self, write_line: Callable[[str], object], returned: list[Vectors] | None) -> None:
        self.write_line = write_line
        self.returned = returned

    def write(self, texts: Sequence[str], encoded: Sequence[EncodedText], vectors: Vectors) -> None:
        """A line for each text."""
        for text, encoded_text, vector in zip(texts, encoded, vectors, strict=True):
            fields: dict[str, Any] = {"text": text, "tokens": len(encoded_text.ids)}
            if encoded_text.truncated:
                fields["truncated"] = True
            # The vector is formatted with nine digits; json.dumps would write up to 17.
            start = json.dumps(fields, ensure_ascii=False).removesuffix("}")
            self.write_line(f'{start}, "embedding": {format_vector(vector)}}}\n')
        if self.returned is not None:
            self.returned.append(vectors)


class _NumpyFile:
    """A NumPy file [texts, dimension]. Its header is written again at the end, when the number of texts is known."""

    def __init__(self, stream: BinaryIO, dimension: int) -> None:
        self.stream = stream
        self.dimension = dimension
        self.count = 0
        self._write_header()

    def _write_header(self) -> None:
        # NumPy leaves space in a header for a larger number of rows.
        np.lib.format.write_array_header_1_0(
            self.stream, {"descr": "<f4", "fortran_order": False, "shape": (self.count, self.dimension)}
        )

    def write(self, texts: Sequence[str], encoded: Sequence[EncodedText], vectors: Vectors) -> None:
        """Append rows."""
        self.count += len(vectors)
        self.stream.write(vectors.astype("<f4", copy=False).tobytes())

    def end(self) -> None:
        """Write how many rows there are."""
        self.stream.seek(0)
        self._write_header()


FILE_ENDINGS = (".txt", ".jsonl")
NO_TEXT = "no text; write: textmill embed MODEL 'a text', name a file of texts, or pipe lines in"


def read_texts(arguments: list[str]) -> Iterator[str]:
    """The texts; a single argument that names a file stands for its lines. Raises if there is none."""
    file = _file_of(arguments)
    _check_names(arguments, file)
    if file:
        texts = _read_lines(file)
    elif arguments:
        texts = (_check_text(text, f"text {number}") for number, text in enumerate(arguments, 1))
    else:
        texts = (line for line, _ in read_piped_lines("texts"))
    first = next(texts, None)
    if first is None:
        raise TextmillError(f"embed: {f'{file} is empty' if file else NO_TEXT}")
    return chain([first], texts)


def count_texts(arguments: list[str]) -> int | None:
    """How many texts there are, if that is known before they are read."""
    file = _file_of(arguments)
    if file is None:
        return len(arguments) or None
    if file.is_fifo():
        return None
    with file.open("rb") as stream:
        return sum(1 for _ in stream)


def are_texts(arguments: list[str]) -> bool:
    """Whether the arguments are the texts, and so few that all fit into memory."""
    return bool(arguments) and _file_of(arguments) is None


def _file_of(arguments: list[str]) -> Path | None:
    return Path(arguments[0]) if len(arguments) == 1 and _is_file(arguments[0]) else None


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file() or Path(text).is_fifo()
    except (OSError, ValueError):  # a text that cannot be a path
        return False


def _check_names(arguments: list[str], file: Path | None) -> None:
    """Refuse the name of a file that does not exist; warn about several names, which are embedded as texts."""
    if len(arguments) == 1:
        text = arguments[0]
        if file is None and text.endswith(FILE_ENDINGS) and len(text.split()) == 1:
            raise TextmillError(f"embed: {text}: no such file; name one, or write a text of several words")
        return
    for text in arguments:
        if _is_file(text):
            warn(f"{text}: is embedded as a text, though a file has this name; to embed its lines, name only this file")


def _read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, or the key "text" of JSON lines."""
    for line, place in read_file_lines(path):
        yield _parse(line, place) if path.suffix == ".jsonl" else line


def _parse(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    text = record.get("text") if isinstance(record, dict) else record
    if not isinstance(text, str):
        raise TextmillError(f'{where}: is not a text; write each line as {{"text": "TEXT"}}')
    return _check_text(text, where)


def _check_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TextmillError(f"{where}: has a lone surrogate (half of a character); give it as UTF-8 text") from None
    return text


Ids = NDArray[np.int64]


@dataclass(frozen=True)
class EncodedText:
    """The ids of a text, and how many tokens it had before it was truncated."""

    ids: Ids
    tokens: int

    @property
    def truncated(self) -> bool:
        """Whether it lost tokens."""
        return self.tokens > len(self.ids)


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer with the special tokens around a text and the longest text."""

    tokenizer: TextTokenizer
    longest: int
    """In tokens, special ones included."""
    dimension: int
    """Numbers in an embedding."""
    first: tuple[int, ...] = ()
    """[CLS], for a masked model."""
    last: tuple[int, ...] = ()
    """[SEP], for a masked model."""

    def encode(self, texts: list[str]) -> list[EncodedText]:
        """The ids of each text, special tokens included; tokens at the end of a long one are left out."""
        return [self.surround(ids) for ids in self.tokenizer.encode_many(texts)]

    def surround(self, ids: Ids) -> EncodedText:
        """One text, from its tokens without special ones."""
        special = len(self.first) + len(self.last)
        kept = np.concatenate([self.first, ids[: self.longest - special], self.last]).astype(np.int64)
        if not len(kept):  # an empty text for a model without special tokens
            return EncodedText(np.array([self.tokenizer.end]), 1)
        return EncodedText(kept, len(ids) + special)


def format_vector(vector: NDArray[np.float32]) -> str:
    """A vector as JSON; nine digits are enough to read the same numbers back."""
    return "[" + ", ".join(["%.9g"] * len(vector)) % tuple(vector.tolist()) + "]"


def can_embed(shape: Shape) -> bool:
    """Whether several texts in a row do not affect each other in this model."""
    return "documents" in open_family(shape.family).BATCH_FIELDS


def new_text_encoder(
    shape: Shape, tokenizer: TextTokenizer, config: EmbedConfig, folder: Path
) -> tuple[TextEncoder, Pooling]:
    """The encoder and the pooling of a model, with the settings that override those of its folder."""
    family = open_family(shape.family)
    if not can_embed(shape):
        raise TextmillError(f"{folder}: a {shape.family} cannot read several texts in a row, so there is no embedding")
    if tokenizer.vocab > shape.vocab:
        raise TextmillError(
            f"{folder}: the tokenizer has {tokenizer.vocab:,} tokens, but the embedding has only {shape.vocab:,} rows; "
            "put the tokenizer that the model was trained with into this folder"
        )
    pooling = _pooling_of(folder, config)
    if (config.length or 0) > shape.positions:
        raise TextmillError(f"embed.length: {config.length:,} is more than the model's {shape.positions:,}; lower it")
    longest = min(pooling.longest or shape.positions, shape.positions)
    first: Sequence[int] = ()
    last: Sequence[int] = ()
    if family.OBJECTIVE == "masked":
        if tokenizer.classifier is None:
            raise TextmillError(f"{folder}: its tokenizer has no [CLS] token; use the one the model was trained with")
        first = [tokenizer.classifier]
        last = [tokenizer.separator]
    elif pooling.kind == "cls":
        raise TextmillError(f"embed.pooling: {folder} has no [CLS] token at the start of a text; set it to mean")
    if longest <= len(first) + len(last):
        raise TextmillError(f"embed.length: {longest} has no space for a text; raise it")
    return TextEncoder(tokenizer, longest, shape.width, tuple(first), tuple(last)), pooling


def _pooling_of(folder: Path, config: EmbedConfig) -> Pooling:
    own = read_pooling(folder, None if config.pooling == "auto" else config.pooling)
    normalize = own.normalize if config.normalize is None else config.normalize
    return Pooling(own.kind, normalize, config.length or own.longest)
