"""The command fit-tokenizer: a vocabulary for the corpus, fitted or taken as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from textmill.config import RunConfig
from textmill.config.chat import CONTENT, turns_of
from textmill.config.renamed import rename_settings
from textmill.errors import TextmillError, warn
from textmill.storage.files import format_path, manifest_entry, read_json, write_json
from textmill.storage.stages import MANIFEST, Force, Stage, list_changes, open_manifest
from textmill.tokens.chat_rendering import render
from textmill.tokens.vocabulary.encoders import ReferenceEncoder
from textmill.tokens.vocabulary.report import measure, table_of
from textmill.tokens.vocabulary.tokenizer import FILES, TextTokenizer, fit_words, open_named
from textmill.tokens.vocabulary.training_text import count_words, mark_of, parts_of, pick_texts

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
"""Settings that only fitting reads."""


def fit_tokenizer(config: RunConfig, force: Force = "no") -> Path:
    """Fit a tokenizer, or copy the one that `tokenizer.use` names; return its folder."""
    folder, section = config.folder_of("tokenizer"), config.tokenizer
    used = _used(config)
    other = open_named(section.compare_with) if section.compare_with else None
    stage = Stage("fit-tokenizer", folder, _made_from(config, used), config.to_yaml())
    if stage.is_done(force):
        print(f"fit-tokenizer: done already: {format_path(folder)} ({open_manifest(folder)['vocab']:,} pieces)")
        return folder
    _say_unread(config)
    with stage.unfinished_folder() as part:
        tokenizer = used or fit_words(count_words(parts_of(config), config), section)
        tokenizer.save(part)
        report = _report(config, tokenizer, other)
        write_json(part / REPORT, report)
        files = {name: manifest_entry(part / name) for name in (*FILES, REPORT)}
        stage.write_manifest(
            part, files, {"vocab": tokenizer.vocab, "tokenizer": tokenizer.fingerprint, "end": tokenizer.end}
        )
    _tell(config, folder, tokenizer)
    _compare_twin(tokenizer)
    return folder


def check_fitted(config: RunConfig) -> None:
    """Refuse a tokenizer folder that other settings made; which text it was fitted on is its own affair."""
    folder, used = config.folder_of("tokenizer"), _used(config)
    made_from = rename_settings(open_manifest(folder)["made_from"])
    before = {name: value for name, value in made_from.items() if name.startswith("tokenizer.")}
    now = config.results("tokenizer") if used is None else _made_from(config, used)
    if changes := list_changes(before, now):
        raise TextmillError(
            f"{folder} was made from something else: {'; '.join(changes[:4])}; set it back, "
            f"or make the tokenizer anew with: textmill fit-tokenizer --force"
        )


def _used(config: RunConfig) -> TextTokenizer | None:
    """The tokenizer that is named, with the template that is asked for."""
    section = config.tokenizer
    if not section.use:
        return None
    used, turns = (
        open_named(section.use, section.end_token, section.lowercase),
        turns_of(section.chat, section.chat_turns),
    )
    return used.with_chat(turns) if turns else used


def _say_unread(config: RunConfig) -> None:
    """Warn of settings for fitting where none is fitted."""
    section = config.tokenizer
    unread = [name for name in FITTING if getattr(section, name) != type(section).model_fields[name].default]
    if section.use and unread:
        names = ", ".join(f"tokenizer.{name}" for name in unread)
        warn(f"{names}: no effect, since tokenizer.use={section.use} is taken as it is; take it out, or tokenizer.use")


def _compare_twin(tokenizer: TextTokenizer) -> None:
    """Warn where the template gives other ids in transformers, whose tokenizer sees the whole conversation as one text."""
    if tokenizer.chat is None or tokenizer.chat_form is None:
        return
    words = "the mill 물레방아"
    whole = "".join(text.replace(CONTENT, words) for _, text in tokenizer.chat.turns)
    theirs = Tokenizer.from_str(tokenizer.inner.to_str()).encode(whole, add_special_tokens=False).ids
    ours = render(
        [[(role, words) for role, _ in tokenizer.chat.turns]], tokenizer.chat_form, ReferenceEncoder(tokenizer)
    ).ids
    if ours.tolist() != theirs:
        warn(
            "this tokenizer writes words after a special token otherwise than at a text's beginning, so transformers' apply_chat_template "
            "will give other ids than those trained on; fit a tokenizer, or take one that is byte-level"
        )


def _made_from(config: RunConfig, used: TextTokenizer | None) -> dict[str, Any]:
    if used is not None:
        end = {"tokenizer.end_token": config.tokenizer.end_token} if config.tokenizer.end_token else {}
        chat = {"tokenizer.chat": dict(used.chat.turns)} if used.chat else {}
        return {"tokenizer.use": used.fingerprint, **end, **chat}
    if config.tokenizer.fit_on == "corpus" and not (config.folder_of("corpus") / MANIFEST).is_file():
        raise TextmillError(
            f"{config.folder_of('corpus')}: no prepared corpus to fit a tokenizer on; run textmill prepare first, "
            f"or read the sources as they are: tokenizer.fit_on=sources"
        )
    return {**config.results("tokenizer"), **mark_of(config)}


def _report(config: RunConfig, tokenizer: TextTokenizer, other: TextTokenizer | None) -> dict[str, Any]:
    """Measured on the valid split, which the vocabulary has not seen, where there is one."""
    if config.tokenizer.fit_on == "corpus" and not (config.folder_of("corpus") / MANIFEST).is_file():
        return {}
    if config.tokenizer.use and config.tokenizer.fit_on == "sources":
        return {}
    parts = parts_of(config, "valid") or parts_of(config)
    named = {"this one": tokenizer}
    if other is not None:
        named[Path(str(config.tokenizer.compare_with)).name] = other
    texts = pick_texts(parts, config) if parts else []
    return measure(texts, named) if texts else {}


def _tell(config: RunConfig, folder: Path, tokenizer: TextTokenizer) -> None:
    line = f"fit-tokenizer: {tokenizer.vocab:,} pieces in {format_path(folder)}"
    if config.tokenizer.use is None and tokenizer.vocab < config.tokenizer.vocab:
        line += f" (the text has no more pieces worth having; {config.tokenizer.vocab:,} were asked)"
    print(line)
    if report := read_json(folder / REPORT):
        print("\n".join(table_of(report)))
