"""The tokens whose perplexity is measured: a split of the run, existing tokens, or any text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from textmill.config import CorpusConfig, RunConfig
from textmill.corpus.find_sources import find_sources, read_records, source_state, split_into_chunks
from textmill.corpus.records import BadRecord
from textmill.corpus.source import Source
from textmill.errors import TextmillError
from textmill.evaluation.task import Scorer
from textmill.storage.files import hash_file, hash_json
from textmill.storage.stages import MANIFEST, open_manifest
from textmill.tokens.splits import Splits, open_splits
from textmill.tokens.store import StoreWriter, TokenStore, dtype_for, open_store
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

MAX_FILE_BYTES = 64 << 20
"""A plain text file up to this size is one document; a longer one is read in sections."""


@dataclass(frozen=True)
class SplitTokens:
    """The tokens that are measured."""

    stores: list[TokenStore]
    train: list[TokenStore]
    """What the baselines are counted on; empty for a text that belongs to no run."""
    counts: dict[str, int]
    """Documents and tokens, and words and bytes where they are known."""
    vocab: int
    facts: dict[str, Any]
    """How the tokens were made, as far as it changes the numbers."""
    trained_length: int | None = None
    """`train.length`."""
    is_chat: bool = False
    """Whether the model is trained on conversations."""

    @property
    def has_answers(self) -> bool:
        """Whether the stores mark the assistant's tokens."""
        return all(store.loss_mask is not None for store in (*self.stores, *self.train))


@contextmanager
def open_tokens(scorer: Scorer, config: RunConfig) -> Iterator[SplitTokens]:
    """The tokens of `evaluate.text`, or else of `evaluate.split`."""
    split = config.evaluate.split
    is_chat = config.train.layout == "chat"
    if config.evaluate.text:
        with _open_text(scorer.tokenizer, config.evaluate.text, config.corpus) as tokens:
            yield replace(tokens, trained_length=config.train.length)
    elif config.tokens.use:
        tokens = _open_used(open_splits(config, scorer.tokenizer), split)
        yield replace(tokens, trained_length=config.train.length, is_chat=is_chat)
    else:
        folder = config.folder_of("tokens")
        checkpoint = scorer.checkpoint.folder
        if config.model.init_from and not (folder / MANIFEST).is_file():
            raise TextmillError(
                f"{folder}: has no tokens to measure {checkpoint} on; name a text: evaluate.text=FILE, or other tasks: "
                "evaluate.tasks"
            )
        yield replace(_open_made(scorer, folder, split), trained_length=config.train.length, is_chat=is_chat)


def check_texts(names: list[str], corpus: CorpusConfig) -> None:
    """Read `evaluate.text` without a model; refuse what cannot be read or has no text."""
    if not sum(1 for _ in _find_texts(names, corpus)):
        raise _no_text(names)


@dataclass
class _Texts:
    """The documents of sources; counts them while they are read."""

    sources: list[Source]
    config: CorpusConfig
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("documents", "words", "bytes"), 0))

    def __iter__(self) -> Iterator[str]:
        for chunk in split_into_chunks(self.sources, self.config.documents):
            for record in read_records(chunk, self.config):
                if isinstance(record, BadRecord):
                    raise TextmillError(f"{record}; repair the file, or measure another")
                if record.text:
                    self.counts["documents"] += 1
                    self.counts["words"] += len(record.text.split())
                    self.counts["bytes"] += len(record.text.encode())
                    yield record.text


@contextmanager
def _open_text(tokenizer: TextTokenizer, names: list[str], corpus: CorpusConfig) -> Iterator[SplitTokens]:
    """Any files, tokenised into a temporary folder."""
    texts = _find_texts(names, corpus)
    with temporary_store(texts, tokenizer, append_end=True) as store:
        if not store.tokens:
            raise _no_text(names)
        files = {source.name: _fingerprint(source) for source in texts.sources}
        sha256 = next(iter(files.values())) if len(files) == 1 else hash_json(files)
        facts = {
            "text": list(names),
            "files": len(files),
            "sha256": sha256,
            "append_end": True,
            "document_unit": texts.config.documents,
        }
        counts = {"documents": texts.counts["documents"], "tokens": store.tokens}
        yield SplitTokens(
            [store],
            [],
            {**counts, "words": texts.counts["words"], "bytes": texts.counts["bytes"]},
            tokenizer.vocab,
            facts,
        )


def _find_texts(names: list[str], corpus: CorpusConfig) -> _Texts:
    """The documents of files, each file as one unless it is long."""
    sources = find_sources(names, encoding=corpus.encoding, setting="evaluate.text")
    longest = max(source_state(source).bytes for source in sources)
    unit = corpus.documents
    if unit == "section" and longest <= MAX_FILE_BYTES:
        unit = "file"  # a run's folder records the default too, so whether it was set does not count
    return _Texts(sources, corpus.model_copy(update={"documents": unit, "chat": None, "cut_records": False}))


def _no_text(names: list[str]) -> TextmillError:
    return TextmillError(f"{', '.join(names)}: has no text; evaluate.text names it")


def _fingerprint(source: Source) -> str:
    is_file = Path(source.address).is_file()
    return hash_file(source.path) if is_file else str(source_state(source).fingerprint)


def _open_made(scorer: Scorer, folder: Path, split: str) -> SplitTokens:
    """What `tokenize` wrote, after checking that the model can read it."""
    manifest = open_manifest(folder, "tokenize")
    if manifest["tokenizer"] != scorer.tokenizer.fingerprint:
        checkpoint = scorer.checkpoint.folder
        raise TextmillError(
            f"{folder}: made with another tokenizer than that of {checkpoint}; tokenize for this model: "
            f"tokenizer.use={checkpoint} with another tokenizer.folder and tokens.folder"
        )
    counts: dict[str, int] = manifest["splits"][split]
    store = open_store(folder / split)
    if not store.tokens:
        filled = [name for name, one in manifest["splits"].items() if one["tokens"]]
        raise _empty_split(folder, split, filled, " and run textmill prepare again with --force")
    if store.tokens != counts["tokens"]:
        raise TextmillError(
            f"{folder}: its {split} split holds {store.tokens:,} tokens, its manifest says {counts['tokens']:,}; "
            f"write it again with: textmill tokenize WHERE --force"
        )
    facts = {"append_end": bool(manifest["made_from"].get("tokens.append_end", True))}
    return SplitTokens([store], [open_store(folder / "train")], counts, manifest["vocab"], facts)


def _open_used(splits: Splits, split: str) -> SplitTokens:
    """Existing tokens, one store after the other, whatever their weights; their words and bytes are not known."""
    stores = splits.stores(split)
    if not stores:
        raise _empty_split("tokens.use", split, [name for name in splits.by_split if splits.stores(name)])
    counts = {"documents": sum(map(len, stores)), "tokens": sum(store.tokens for store in stores)}
    return SplitTokens(stores, splits.stores("train"), counts, splits.tokenizer.vocab, {"stores": len(stores)})


def _empty_split(where: Path | str, split: str, filled: list[str], then: str = "") -> TextmillError:
    return TextmillError(
        f"{where}: its {split} split is empty; measure another (evaluate.split={filled[0] if filled else 'train'}), "
        f"or give it a larger part in corpus.split{then}"
    )


BLOCK_CHARACTERS = 1 << 22
"""Characters of texts that are encoded at a time."""


@contextmanager
def temporary_store(texts: Iterable[str], tokenizer: TextTokenizer, *, append_end: bool) -> Iterator[TokenStore]:
    """The tokens of texts, each perhaps followed by an end-of-text token; removed when the block ends."""
    with TemporaryDirectory(prefix="textmill-evaluate-") as folder:
        with StoreWriter(Path(folder) / "text", dtype_for(tokenizer.vocab)) as writer:
            for block in _blocks(texts):
                ends = [tokenizer.eos_id] if append_end else []
                writer.add([[*ids.tolist(), *ends] for ids in tokenizer.encode_many(block)])
        yield open_store(Path(folder) / "text")


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    characters = 0
    for text in texts:
        block.append(text)
        characters += len(text)
        if characters >= BLOCK_CHARACTERS:
            yield block
            block = []
            characters = 0
    if block:
        yield block
