"""The command tokenize: every document of the corpus as token ids, in one store a split."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import RunConfig
from textmill.corpus.document import SPLITS, Split
from textmill.corpus.shards import count_group_bytes, list_shards, read_groups
from textmill.errors import TextmillError, warn
from textmill.runners import open_runner
from textmill.storage.files import format_path, manifest_entry, read_json, remove_folder, write_bytes
from textmill.storage.progress import progress
from textmill.storage.stages import MANIFEST, Force, Stage, open_manifest
from textmill.tokens.chat_rendering import Template
from textmill.tokens.existing_tokens import tokenize_used
from textmill.tokens.features import write_features
from textmill.tokens.index_formats import Format
from textmill.tokens.lineage import LineageWriter, lineage_path
from textmill.tokens.shard_encoding import COLUMNS, COUNTED, Form, Piece, encode_piece
from textmill.tokens.store import dtype_for, open_store
from textmill.tokens.store_writer import StoreWriter
from textmill.tokens.vocabulary.encoder import Encoder
from textmill.tokens.vocabulary.encoders import (
    FAST,
    REFERENCE,
    ReferenceEncoder,
    Sample,
    doubt_of,
    first_difference,
    open_encoder_in,
)
from textmill.tokens.vocabulary.fitting import check_fitted, fit_tokenizer
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

PARTS = "parts"
PIECE = 32 << 20
"""Bytes of the corpus, about, that one worker takes at a time: small, so that none waits long for the last."""
ENDINGS = ("bin", "idx", "lineage.parquet")
CHAT_ENDINGS = (*ENDINGS, "mask")
SAMPLED = (256 << 10, 4 << 20)
"""Bytes of the corpus on which encoders are compared, at least and at most; a thousandth in between."""
WINDOW = 2000
"""Characters of a document that are compared; many documents say more than one long one."""
ROWS = 16
"""Documents in a row that are looked at in one place of the corpus."""

Facts = dict[str, int]
Pieces = dict[Split, list[Piece]]


def tokenize(config: RunConfig, force: Force = "no") -> Path:
    """Make the token stores of all splits; return their folder."""
    if config.tokens.use:
        return tokenize_used(config, force)
    folder, corpus = config.folder_of("tokens"), config.folder_of("corpus")
    source = open_manifest(corpus)
    _check_sentences(config, source)
    chat = bool(source["made_from"].get("corpus.chat"))
    if not (config.folder_of("tokenizer") / MANIFEST).is_file():
        print("tokenize: no tokenizer yet; fitting one first")
        fit_tokenizer(config)
    check_fitted(config)
    tokenizer = open_manifest(config.folder_of("tokenizer"))
    made_from = {**config.results("tokens"), "corpus": source["fingerprint"], "tokenizer": tokenizer["tokenizer"]}
    if chat:
        made_from["chat"] = dict(check_chat(config).turns)
    stage = Stage("tokenize", folder, made_from, config.to_yaml())
    if stage.is_done(force):
        print(f"tokenize: done already: {format_path(folder)} ({_spoken(open_manifest(folder)['splits'])})")
        return folder
    with stage.unfinished_folder() as part:
        pieces, facts = _encode_all(config, part / PARTS)
        splits: dict[str, Facts] = {split: _sum([facts[piece] for piece in pieces[split]]) for split in SPLITS}
        quarantine = write_bytes(part / "quarantine.jsonl", _quarantine_lines(facts))
        _check_quarantine(config, splits, part)
        _join(part, pieces, dtype_for(tokenizer["vocab"]), config.tokens.index_format, chat)
        endings = CHAT_ENDINGS if chat else ENDINGS
        files = {f"{split}.{end}": manifest_entry(part / f"{split}.{end}") for split in SPLITS for end in endings}
        files |= write_features(config, part)
        shared = {name: tokenizer[name] for name in ("tokenizer", "vocab", "end")}
        remove_folder(part / PARTS)
        stage.write_manifest(part, {**files, "quarantine.jsonl": quarantine}, {**shared, "splits": splits})
    print(f"tokenize: {format_path(folder)}: {_spoken(splits)}")
    return folder


def _check_sentences(config: RunConfig, source: dict[str, Any]) -> None:
    if config.tokens.level == "sentence" and source["made_from"].get("corpus.sentences", "none") == "none":
        raise TextmillError(
            f"tokens.level=sentence: the corpus in {format_path(config.folder_of('corpus'))} has no sentence a line; "
            "make it anew with corpus.sentences=split (or lines, if it comes so), or set tokens.level=document"
        )


def check_chat(config: RunConfig) -> Template:
    """The template of the tokenizer, with which conversations can be written as ids."""
    if config.tokens.level == "sentence" or config.tokens.kind == "features":
        key = "level" if config.tokens.level == "sentence" else "kind"
        raise TextmillError(f"tokens.{key}: is for plain text, and the corpus has conversations; take it out")
    folder = config.folder_of("tokenizer")
    tokenizer = open_tokenizer(folder)
    if tokenizer.chat is not None:
        return tokenizer.chat
    found = "has none"
    if tokenizer.jinja is not None:
        found = "has one that others wrote" + (
            "" if "add_generation_prompt" in tokenizer.jinja else ", without a generation prompt"
        )
    raise TextmillError(
        f"{format_path(folder)}: the corpus has conversations, and this tokenizer's chat template {found}; set tokenizer.chat=default, "
        f"or say the turns in tokenizer.chat_turns, and make it anew with: textmill fit-tokenizer --force"
    )


def _encode_all(config: RunConfig, folder: Path) -> tuple[Pieces, dict[Piece, Facts]]:
    """Encode with the fast encoder while its ids are compared with the reference's; if they differ, with the reference."""
    tokenizer = open_tokenizer(config.folder_of("tokenizer"))
    reference = ReferenceEncoder(tokenizer)
    if doubt := doubt_of(tokenizer):
        print(f"tokenize: with {reference.name}, the slow way, because of {FAST}: {doubt}")
    else:
        pieces = _pieces(config, folder, tokenizer, FAST)
        shards = [shard for split in SPLITS for shard in list_shards(config.folder_of("corpus"), split)]
        with ThreadPoolExecutor(1) as thread:
            verdict = thread.submit(_compare, config.folder_of("tokenizer"), reference, shards)
            facts = _run(config, pieces, verdict)
        if (different := verdict.result()) is None:
            return pieces, facts
        warn(f"{different}; {reference.name} is used instead, and takes longer")
    pieces = _pieces(config, folder, tokenizer, REFERENCE)
    return pieces, _run(config, pieces)


def _compare(folder: Path, reference: Encoder, shards: list[Path]) -> str | None:
    """What is wrong with the fast encoder, found on hard texts and on a sample of this very corpus; None: nothing."""
    try:
        fast = open_encoder_in(folder, FAST)
    except (ImportError, ValueError) as error:
        return f"{FAST} does not open this tokenizer ({error})"
    other = first_difference(fast, reference, _samples(shards))
    return None if other is None else f"{fast.name} encodes {other.name} otherwise than {reference.name}"


def _pieces(config: RunConfig, folder: Path, tokenizer: TextTokenizer, encoder: str) -> Pieces:
    """The corpus in pieces of about PIECE bytes, in its order; what another encoder made is not taken up."""
    parts = folder / f"{encoder}-{metadata.version(encoder)}"
    parts.mkdir(parents=True, exist_ok=True)
    chat = tokenizer.chat_form if open_manifest(config.folder_of("corpus"))["made_from"].get("corpus.chat") else None
    begin = begin_of(tokenizer) if config.tokens.prepend_begin and chat is None else None
    end = tokenizer.end if config.tokens.append_end and chat is None else None
    form = Form(config.tokens.level, begin, end, dtype_for(tokenizer.vocab).name, chat)
    opened = (config.folder_of("tokenizer"), tokenizer.fingerprint, encoder)
    return {
        split: [
            Piece(shard, groups, parts / f"{shard.stem}-{groups.start:05d}", *opened, form)
            for shard in list_shards(config.folder_of("corpus"), split)
            for groups in _spans(count_group_bytes(shard))
        ]
        for split in SPLITS
    }


def begin_of(tokenizer: TextTokenizer) -> int:
    """The token before a document: its own, or the end-of-text token, which serves as both in GPT-2."""
    return tokenizer.end if tokenizer.begin is None else tokenizer.begin


def _spans(sizes: list[int]) -> Iterator[range]:
    """Groups in a row that have about PIECE bytes together."""
    start = held = 0
    for group, size in enumerate(sizes):
        if held and held + size > PIECE:
            yield range(start, group)
            start, held = group, 0
        held += size
    if sizes:
        yield range(start, len(sizes))


def _samples(shards: list[Path]) -> Iterator[Sample]:
    """Stretches of documents from places spread evenly over the corpus, the same at every run."""
    places = [(shard, group) for shard in shards for group in range(len(count_group_bytes(shard)))]
    least, most = SAMPLED
    wanted = min(max(sum(shard.stat().st_size for shard in shards) // 1000, least), most)
    count = min(len(places), max(1, wanted // (ROWS * WINDOW)))
    for number in range(count):
        shard, group = places[number * len(places) // count]
        (table,) = read_groups(shard, [group], COLUMNS, max_rows=ROWS)
        for row, (text, source, name) in enumerate(zip(*(column.to_pylist() for column in table.columns), strict=True)):
            start = (len(text) - WINDOW) * row // ROWS if len(text) > WINDOW else 0
            yield Sample(f"{source}, {name},", text[start : start + WINDOW])


def _run(config: RunConfig, pieces: Pieces, verdict: Future[str | None] | None = None) -> dict[Piece, Facts]:
    """Encode every piece on the runner; the facts of each, in order. A verdict against the encoder ends it early."""
    facts: dict[Piece, Facts] = {}
    todo = [piece for split in pieces.values() for piece in split]
    total = sum(split["bytes"] for split in read_json(config.folder_of("corpus") / "account.json")["by_split"].values())
    try:
        with progress("tokenize", total=total, unit="bytes", second_unit="tokens") as bar:
            for piece, counts in zip(todo, open_runner(config.runner).map(encode_piece, todo), strict=True):
                facts[piece] = counts
                bar.advance(counts["bytes"], counts["tokens"])
                if verdict and verdict.done() and verdict.result() is not None:
                    break
    except OSError as error:  # a full disk, a file that went away
        raise TextmillError(f"tokenize: {error}; mend that and run it again: what is finished is kept") from None
    return facts


def _sum(facts: list[Facts]) -> Facts:
    return {name: sum(one[name] for one in facts) for name in COUNTED}


def _quarantine_lines(facts: dict[Piece, Facts]) -> Iterator[bytes]:
    for piece, counts in facts.items():
        if counts["quarantined"]:
            yield piece.path("quarantine.jsonl").read_bytes()


def _check_quarantine(config: RunConfig, splits: dict[str, Facts], part: Path) -> None:
    bad, good = (sum(counts[name] for counts in splits.values()) for name in ("quarantined", "documents"))
    if bad > config.corpus.max_unreadable * (bad + good):
        with open(part / "quarantine.jsonl", encoding="utf-8") as lines:
            first = next(lines).strip()
        raise TextmillError(
            f"tokenize: {bad:,} of {bad + good:,} documents cannot be encoded, "
            f"above corpus.max_unreadable={config.corpus.max_unreadable:g}; the first: "
            f"{first}; all stand in {part / 'quarantine.jsonl'}; take another tokenizer, or raise corpus.max_unreadable"
        )


def _join(part: Path, pieces: Pieces, dtype: np.dtype[Any], form: Format, chat: bool) -> None:
    """Join each split's pieces, in the corpus's order, into one store and one lineage."""
    for split, ones in pieces.items():
        with (
            StoreWriter(part / split, dtype, form, masked=chat) as store,
            LineageWriter(lineage_path(part / split)) as lineage,
        ):
            for piece in ones:
                store.add_store(open_store(piece.prefix))
                lineage.add_file(lineage_path(piece.prefix))


def _spoken(splits: dict[str, Facts]) -> str:
    told = [f"{split} {counts['tokens']:,} tokens" for split, counts in splits.items() if counts["tokens"]]
    bad = sum(counts["quarantined"] for counts in splits.values())
    return ", ".join(told + ([f"{bad:,} documents quarantined"] if bad else []))
