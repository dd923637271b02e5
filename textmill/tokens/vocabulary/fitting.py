"""The command fit-tokenizer: fits a vocabulary on the corpus, or copies an existing tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from textmill.config import RunConfig
from textmill.config.chat import CONTENT, turns_of
from textmill.errors import TextmillError, warn
from textmill.storage.files import format_path, manifest_entry, read_json, write_json
from textmill.storage.stages import MANIFEST, Force, Stage, list_changes, open_manifest
from textmill.tokens.chat_rendering import render
from textmill.tokens.vocabulary.encoders import ReferenceEncoder
from textmill.tokens.vocabulary.report import format_table, measure
from textmill.tokens.vocabulary.tokenizer import FILES, TextTokenizer, fit_words, open_named
from textmill.tokens.vocabulary.training_text import count_words, find_text_parts, pick_texts, text_fingerprint

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
