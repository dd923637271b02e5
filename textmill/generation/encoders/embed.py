"""The embed command: a vector for each text, as JSON lines or as a NumPy file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np

from textmill.checkpoints.folders import StepChoice
from textmill.config import RunConfig
from textmill.errors import TextmillError, warn
from textmill.generation.encoders.embedding_files import are_texts, count_texts, read_texts
from textmill.generation.encoders.embedding_texts import EncodedText, format_vector
from textmill.models import find_run_model
from textmill.storage.files import atomic_writer, format_path, make_folder_for
from textmill.storage.progress import progress

if TYPE_CHECKING:
    from textmill.generation.encoders.embedder_torch import Embedder, Vectors

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
    from textmill.generation.encoders.embedder_torch import open_embedder  # imports torch, which is slow

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
