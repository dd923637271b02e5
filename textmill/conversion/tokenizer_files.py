"""`export.kind=tokenizer`: a tokenizer in the files of other tools, read back and compared.

WordPiece has vocab.txt, byte-level BPE vocab.json and merges.txt, sentencepiece a .model and a .vocab.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import StepChoice
from textmill.config import ExportConfig, RunConfig
from textmill.conversion.compare import check_tokenizer
from textmill.conversion.model import Files
from textmill.errors import TextmillError
from textmill.models import find_run_model
from textmill.storage.files import format_path, write_bytes
from textmill.storage.stages import MANIFEST, Force, Stage
from textmill.tokens.vocabulary.sentencepiece_model import is_sentencepiece, sentencepiece_files
from textmill.tokens.vocabulary.token_bytes import is_byte_level
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

WORDPIECE_TOKENS = ("[UNK]", "[CLS]", "[SEP]")
Tree = dict[str, Any]


def export_tokenizer(config: RunConfig, folder: Path, force: Force, step: StepChoice | None = None) -> Path:
    """Write the tokenizer of a config: that of its model, or the fitted one if there is no model yet."""
    if config.export.precision != ExportConfig().precision:
        raise TextmillError(f"export.precision: a tokenizer has none, found {config.export.precision}; remove it")
    fitted = config.folder_of("tokenizer")
    try:
        where = find_run_model(config, step).tokenizer
    except TextmillError:
        if not (fitted / MANIFEST).is_file():
            raise
        where = fitted
    tokenizer = open_tokenizer(where)
    stage = Stage("export", folder, {"export.kind": config.export.kind, "tokenizer": tokenizer.fingerprint}, None)
    if stage.is_done(force):
        print(f"export: done already: {format_path(folder)}")
        return folder
    with stage.unfinished_folder() as part:
        try:
            files = _write(tokenizer, part)
            # Between two words sentencepiece joins unknown characters that our splitting separates.
            joins = "tokenizer.model" in files
            figures = check_tokenizer(tokenizer, open_tokenizer(part), str(folder), joins_unknown=joins)
        except TextmillError:
            stage.discard()
            raise
        stage.write_manifest(part, files, {"check": figures})
    print(f"export: {format_path(folder)}: {tokenizer.vocab:,} tokens of {format_path(where)} in {', '.join(files)}")
    print(f"export: checked: {figures}")
    return folder


def _write(tokenizer: TextTokenizer, folder: Path) -> Files:
    """Write the files that fit the kind of tokenizer; what they cannot hold is an error that names it."""
    tree: Tree = json.loads(tokenizer.inner.to_str())
    if tree["model"]["type"] == "WordPiece":
        contents = _wordpiece_files(tokenizer, tree)
    elif tree["model"]["type"] == "BPE" and is_byte_level(tree):
        contents = _gpt2_files(tokenizer, tree)
    elif is_sentencepiece(tree):
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
        model, vocab = sentencepiece_files(tokenizer.inner, ids)
        contents = {"tokenizer.model": model, "tokenizer.vocab": vocab.encode()}
    else:
        raise TextmillError(f"export.kind: no other tool's files hold a vocabulary of type {tree['model']['type']}")
    return {name: write_bytes(folder / name, [content]) for name, content in contents.items()}


def _wordpiece_files(tokenizer: TextTokenizer, tree: Tree) -> dict[str, bytes]:
    normalizer = tree["normalizer"] or {}
    ids = tokenizer.inner.get_vocab(with_added_tokens=True)
    if normalizer.get("type") != "BertNormalizer" or not normalizer["clean_text"]:
        raise TextmillError("export.kind: a vocab.txt is for BERT's normalizer; this tokenizer has another one")
    if (tree["pre_tokenizer"] or {}).get("type") != "BertPreTokenizer":
        raise TextmillError("export.kind: a vocab.txt has no place for tokenizer.split_digits or other ways to split")
    if missing := [token for token in WORDPIECE_TOKENS if token not in ids]:
        raise TextmillError(f"export.kind: BERT's vocab.txt needs the token {missing[0]}; this vocabulary has none")
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": normalizer["lowercase"],
        "strip_accents": normalizer["strip_accents"],
        "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
    }
    return {"vocab.txt": "".join(f"{token}\n" for token in _in_order(ids)).encode(), **_settings(tokenizer, settings)}


def _gpt2_files(tokenizer: TextTokenizer, tree: Tree) -> dict[str, bytes]:
    splitter = tree["pre_tokenizer"] or {}
    model = tree["model"]
    if tree["normalizer"] or splitter.get("type") != "ByteLevel" or not splitter.get("use_regex", True):
        raise TextmillError(
            "export.kind: vocab.json and merges.txt have no place for a normalizer or another way to split than "
            "GPT-2's (tokenizer.lowercase, split_digits, split_cjk)"
        )
    ids = tokenizer.inner.get_vocab(with_added_tokens=True)
    vocab = {token: ids[token] for token in _in_order(ids)}
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": splitter["add_prefix_space"]}
    return {
        "vocab.json": json.dumps(vocab, ensure_ascii=False).encode(),
        "merges.txt": f"#version: 0.2\n{merges}".encode(),
        **_settings(tokenizer, settings),
    }


def _in_order(ids: dict[str, int]) -> list[str]:
    tokens = sorted(ids, key=lambda token: ids[token])
    if ids[tokens[-1]] != len(tokens) - 1:
        raise TextmillError("export.kind: these files number tokens from 0 without gaps; this vocabulary has gaps")
    return tokens


def _settings(tokenizer: TextTokenizer, own: Tree) -> dict[str, bytes]:
    """The tokenizer_config.json for transformers: special tokens and the chat template."""
    files = tokenizer.files()
    tree = {**json.loads(files["tokenizer_config.json"]), **own}
    special = [token.content for token in tokenizer.inner.get_added_tokens_decoder().values() if token.special]
    if more := [token for token in special if token not in tokenizer.roles.values()]:
        tree["additional_special_tokens"] = more
    return {"tokenizer_config.json": (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()}
