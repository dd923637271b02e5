"""The embed command: a vector for each text, as JSON lines or as a NumPy file.

`TextEncoder` makes the token ids that an embedding is computed from; without torch, since the server encodes texts too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from textmill.checkpoints.folders import StepChoice
from textmill.config import EmbedConfig, RunConfig
from textmill.errors import TextmillError, warn
from textmill.generation.prompts import check_unicode, parse_json_line, read_file_lines, read_piped_lines
from textmill.models import Shape, find_run_model, open_family
from textmill.models.pooling import Pooling, read_pooling
from textmill.storage.files import atomic_writer, format_path, make_folder_for
from textmill.storage.progress import Bar, progress
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from textmill.generation.encoder import Embedder, Vectors


Ids = NDArray[np.int64]
BLOCK_TEXTS = 4096
"""Texts that are read, sorted by length and computed together."""
SUFFIXES = (".npy", ".jsonl")
FILE_ENDINGS = (".txt", ".jsonl")
NO_TEXT = "no text; write: textmill embed MODEL 'a text', name a file of texts, or pipe lines in"


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
    file = Path(arguments[0]) if len(arguments) == 1 and _is_file(arguments[0]) else None
    all_texts = _read_texts(arguments, file)
    total = _count_lines(file) if file else len(arguments) or None
    if out is not None:
        make_folder_for(Path(out), "--out")
    embedder = open_embedder(checkpoint, config.engine, config.embed)
    returned: list[Vectors] | None = [] if arguments and file is None and out is None else None
    with ExitStack() as stack:
        writer: _JsonLines | _NumpyFile
        if out is None:
            writer = _JsonLines(partial(print, end="", flush=True), returned)
        else:
            stream = stack.enter_context(atomic_writer(Path(out)))
            if out.endswith(".jsonl"):
                writer = _JsonLines(lambda line: stream.write(line.encode()), None)
            else:
                writer = _NumpyFile(stream, embedder.texts.dimension)
        bar = nullcontext() if out is None else progress("embed", total, "texts", "tokens")
        count = _embed_all(embedder, all_texts, writer, bar)
        if isinstance(writer, _NumpyFile):
            writer.end()
    if out is not None:
        print(f"{format_path(Path(out))}: {count:,} embeddings of {embedder.texts.dimension} numbers")
    return np.concatenate(returned) if returned else None


def _embed_all(
    embedder: Embedder,
    texts: Iterator[str],
    writer: _JsonLines | _NumpyFile,
    progress_bar: AbstractContextManager[Bar | None],
) -> int:
    """Write the embeddings of all texts; warn if some were truncated. Return the number of texts."""
    count = 0
    truncated = 0
    longest = 0
    with progress_bar as bar:
        while block := list(islice(texts, BLOCK_TEXTS)):
            encoded = embedder.texts.encode(block)
            count += len(encoded)
            truncated += sum(text.truncated for text in encoded)
            longest = max([longest, *(text.tokens for text in encoded)])
            ids = [text.ids for text in encoded]
            vectors: Vectors = np.zeros((len(block), embedder.texts.dimension), np.float32)
            for numbers, batch_vectors in embedder.batches(ids):
                vectors[numbers] = batch_vectors
                if bar:
                    bar.advance(len(numbers), sum(len(ids[number]) for number in numbers))
            writer.write(block, encoded, vectors)
    if truncated:
        warn(
            f"{truncated:,} of {count:,} texts are longer than {embedder.texts.longest:,} tokens and were truncated; "
            f"the longest has {longest:,}"
        )
    return count


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


def _read_texts(arguments: list[str], file: Path | None) -> Iterator[str]:
    """The lines of a file, the arguments, or the lines of standard input. Raises if there is no text."""
    _check_names(arguments, file)
    if file:
        texts = _read_lines(file)
    elif arguments:
        texts = (check_unicode(text, f"text {number}") for number, text in enumerate(arguments, 1))
    else:
        texts = (line for line, _ in read_piped_lines("texts"))
    first = next(texts, None)
    if first is None:
        raise TextmillError(f"embed: {f'{file} is empty' if file else NO_TEXT}")
    return chain([first], texts)


def _count_lines(file: Path) -> int | None:
    """The number of lines, if that is known before they are read."""
    if file.is_fifo():
        return None
    with file.open("rb") as stream:
        return sum(1 for _ in stream)


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
        yield check_unicode(parse_json_line(line, "text", place), place) if path.suffix == ".jsonl" else line


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
            return EncodedText(np.array([self.tokenizer.eos_id]), 1)
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
        if tokenizer.cls_id is None:
            raise TextmillError(f"{folder}: its tokenizer has no [CLS] token; use the one the model was trained with")
        first = [tokenizer.cls_id]
        last = [tokenizer.sep_id]
    elif pooling.kind == "cls":
        raise TextmillError(f"embed.pooling: {folder} has no [CLS] token at the start of a text; set it to mean")
    if longest <= len(first) + len(last):
        raise TextmillError(f"embed.length: {longest} has no space for a text; raise it")
    return TextEncoder(tokenizer, longest, shape.width, tuple(first), tuple(last)), pooling


def _pooling_of(folder: Path, config: EmbedConfig) -> Pooling:
    own = read_pooling(folder, None if config.pooling == "auto" else config.pooling)
    normalize = own.normalize if config.normalize is None else config.normalize
    return Pooling(own.kind, normalize, config.length or own.longest)
