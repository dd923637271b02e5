"""The verb fit-tokenizer: a vocabulary for the corpus, fitted or taken as it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from textmill.config import RunConfig
from textmill.corpus.shards import read_texts, shards_of
from textmill.files import account_of, shown
from textmill.progress import progress
from textmill.stages import Force, Stage, open_manifest
from textmill.tokens.tokenizer import FILES, TextTokenizer, fit, open_tokenizer

REPORT_TEXTS = 2000


def fit_tokenizer(config: RunConfig, force: Force = "no") -> Path:
    """Fit a tokenizer on the train split, or copy the one that `tokenizer.use` names; return its folder."""
    folder, corpus = config.folder_of("tokenizer"), config.folder_of("corpus")
    made_from = config.results("tokenizer")
    used = open_tokenizer(Path(config.tokenizer.use)) if config.tokenizer.use else None
    if used is not None:
        made_from = {"tokenizer.use": used.fingerprint}
    else:
        made_from["corpus"] = open_manifest(corpus)["fingerprint"]
    stage = Stage("fit-tokenizer", folder, made_from, config.to_yaml())
    if stage.done(force):
        print(f"fit-tokenizer: done already: {shown(folder)} ({open_manifest(folder)['vocab']:,} pieces)")
        return folder
    with stage.building() as part:
        tokenizer = used or fit(_texts(corpus), config.tokenizer)
        tokenizer.save(part)
        stage.finish(part, {name: account_of(part / name) for name in FILES}, _facts(tokenizer))
    _report(tokenizer, config, corpus, folder)
    return folder


def _facts(tokenizer: TextTokenizer) -> dict[str, object]:
    return {"vocab": tokenizer.vocab, "tokenizer": tokenizer.fingerprint, "end": tokenizer.end}


def _texts(corpus: Path) -> Iterator[list[str]]:
    shards = shards_of(corpus, "train")
    with progress("fit-tokenizer", total=sum(path.stat().st_size for path in shards), unit="bytes") as bar:
        for path in shards:
            yield from read_texts(path)
            bar.advance(path.stat().st_size)


def _report(tokenizer: TextTokenizer, config: RunConfig, corpus: Path, folder: Path) -> None:
    """One line on what the vocabulary does with this corpus."""
    line = f"fit-tokenizer: {tokenizer.vocab:,} pieces in {shown(folder)}"
    if config.tokenizer.use is None and tokenizer.vocab < config.tokenizer.vocab:
        line += f" (the corpus has no more pairs worth merging; {config.tokenizer.vocab:,} were asked)"
    shards = shards_of(corpus, "train") if corpus.exists() else []
    texts = [text for path in shards[:1] for text in itertools.chain.from_iterable(itertools.islice(read_texts(path), 1))][:REPORT_TEXTS]
    if texts:
        tokens = sum(len(ids) for ids in tokenizer.encode_many(texts))
        line += f"; {sum(len(text.encode()) for text in texts) / max(1, tokens):.2f} bytes a token on a sample"
    print(line)
