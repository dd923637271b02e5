"""Tokenizers: fitted on a corpus or opened from existing files, kept in a folder that transformers opens too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Tokenizer

from textmill.config import TokenizerConfig
from textmill.config.chat import turns_of
from textmill.config.vocabulary import ENDS, end_of
from textmill.errors import TextmillError
from textmill.storage.files import hash_json, read_json, write_text
from textmill.storage.hub import find_model_folder
from textmill.tokens.chat_rendering import Form, Template, new_template
from textmill.tokens.vocabulary.algorithms import WordCounter, merge_counts, new_inner, train
from textmill.tokens.vocabulary.foreign_files import END, open_files, roles_of

__all__ = ["END", "FILES", "TextTokenizer", "fit", "fit_words", "open_named", "open_tokenizer"]

FILES = ("tokenizer.json", "tokenizer_config.json")
WANTED = ["tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "encoder.json", "*.model"]
"""A tokenizer's files on the hub."""
TURNS = "textmill_turns"
"""Our own entry in tokenizer_config.json: the template as data, beside its twin in Jinja."""


@dataclass(frozen=True)
class TextTokenizer:
    """Text to ids and back; text that looks like a special token is plain text."""

    inner: Tokenizer
    end: int
    """The end-of-text token."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by the names that transformers has for them: bos_token, pad_token and so on."""
    chat: Template | None = None
    """The template of conversations, where it has one."""
    jinja: str | None = None
    """A template that others wrote, kept as it is."""

    @cached_property
    def vocab(self) -> int:
        """Ids in the vocabulary: one more than the largest."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal tokenizers, wherever they stand."""
        return hash_json(json.loads(self.inner.to_str(), parse_float=_rounded))

    @property
    def begin(self) -> int | None:
        """The token that begins a text, where there is one."""
        found = self._id_of("bos_token")
        return self._id_of("cls_token") if found is None else found

    @property
    def pad(self) -> int | None:
        """The token that fills up, where there is one."""
        return self._id_of("pad_token")

    @property
    def unknown(self) -> int | None:
        """The token for what the vocabulary lacks, where such a thing can be."""
        found = self._id_of("unk_token")
        return None if found == self.end else found

    @property
    def mask(self) -> int | None:
        """The token that hides another, where there is one."""
        return self._id_of("mask_token")

    @property
    def chat_form(self) -> Form | None:
        """The template of conversations in ids."""
        return None if self.chat is None else self.chat.form_of(self.inner.get_vocab(with_added_tokens=True))

    def with_chat(self, turns: Mapping[str, str]) -> TextTokenizer:
        """The same tokenizer with a template of conversations: tokens it lacks are added, and what the assistant stops with is its end."""
        template = new_template(turns, str(self.inner.id_to_token(self.end)))
        inner = Tokenizer.from_str(self.inner.to_str())
        known = {token.content for token in inner.get_added_tokens_decoder().values()}
        inner.add_special_tokens(
            [AddedToken(token, normalized=False) for token in template.tokens if token not in known]
        )
        inner.encode_special_tokens = True
        roles = {**self.roles, "eos_token": template.stop}
        return TextTokenizer(inner, inner.get_vocab(with_added_tokens=True)[template.stop], roles, template)

    def _id_of(self, role: str) -> int | None:
        token = self.roles.get(role)
        id_: int | None = None if token is None else self.inner.token_to_id(token)
        return id_

    def encode(self, text: str) -> list[int]:
        """The ids of one text, nothing added."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_many(self, texts: list[str]) -> Iterator[NDArray[np.int64]]:
        """The ids of many texts."""
        encodings: list[Encoding] = self.inner.encode_batch_fast(texts, add_special_tokens=False)
        return (np.array(encoding.ids, np.int64) for encoding in encodings)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens shown."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=False)
        return text

    def decode_many(self, many: list[list[int]]) -> Iterator[str]:
        """The texts of many lists of ids."""
        texts: list[str] = self.inner.decode_batch(many, skip_special_tokens=False)
        return iter(texts)

    def save(self, folder: Path, longest: int | None = None) -> None:
        """Write the files that transformers' AutoTokenizer opens."""
        for name, text in self.files(longest).items():
            write_text(folder / name, text)

    def files(self, longest: int | None = None) -> dict[str, str]:
        """tokenizer.json and what transformers wants beside it."""
        roles, end = dict(self.roles), str(self.inner.id_to_token(self.end))
        if _end_of(roles) != end:
            roles["eos_token"] = end
        tree = self.inner.to_str(pretty=True)
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast", **roles,
            "clean_up_tokenization_spaces": False, "add_prefix_space": _adds_space(json.loads(tree)["pre_tokenizer"]),
        }  # fmt: skip
        if longest:
            settings["model_max_length"] = longest
        if self.chat is not None:
            settings |= {"chat_template": self.chat.jinja(), TURNS: dict(self.chat.turns)}
        elif self.jinja is not None:
            settings["chat_template"] = self.jinja
        return {
            "tokenizer.json": tree,
            "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
        }


def fit(texts: Iterator[list[str]], config: TokenizerConfig) -> TextTokenizer:
    """Fit a tokenizer of the kind that the config names on texts."""
    counter = WordCounter(new_inner(config))
    for batch in texts:
        for text in batch:
            counter.add(text)
    return fit_words([counter.counts()], config)


def fit_words(parts: Iterable[Mapping[str, int]], config: TokenizerConfig) -> TextTokenizer:
    """Fit a tokenizer on words that were counted in parts."""
    inner = train(merge_counts(parts), config)
    end = end_of(config)
    known = {"eos_token": end} if config.kind != "wordpiece" or end != ENDS[config.kind] else {}
    tokenizer = _wrapped(inner, roles_of(inner, roles_of(inner, {}) | known), end, "the fitted tokenizer")
    turns = turns_of(config.chat, config.chat_turns)
    return tokenizer.with_chat(turns) if turns else tokenizer


def open_tokenizer(where: Path, end: str | None = None, lowercase: bool | None = None) -> TextTokenizer:
    """A folder or file with tokenizer.json, GPT-2's vocabulary and merges, a BERT vocab.txt or a sentencepiece model."""
    inner, roles = open_files(where, lowercase)
    tokenizer = _wrapped(inner, roles, end, str(where))
    folder = where if where.is_dir() else where.parent
    said = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    jinja = folder / "chat_template.jinja"
    text = jinja.read_text(encoding="utf-8") if jinja.is_file() else said.get("chat_template")
    if not isinstance(text, str):
        return tokenizer
    template = Template(tuple(said[TURNS].items())) if TURNS in said else None
    # Whoever changed the Jinja changed the template: the data beside it no longer speaks for it.
    return (
        replace(tokenizer, chat=template) if template and template.jinja() == text else replace(tokenizer, jinja=text)
    )


def open_named(name: str, end: str | None = None, lowercase: bool | None = None) -> TextTokenizer:
    """What `tokenizer.use` names: a folder or file on this machine, or a tokenizer of the Hugging Face hub."""
    path = Path(name)
    return open_tokenizer(path if path.exists() else find_model_folder(name, WANTED), end, lowercase)


def _wrapped(inner: Tokenizer, roles: dict[str, str], end: str | None, where: str) -> TextTokenizer:
    end = end or _end_of(roles)
    if end is None or (id_ := inner.token_to_id(end)) is None:
        raise TextmillError(
            f"{where}: has no end-of-text token ({end or END}); name one with tokenizer.end_token, or as eos_token in tokenizer_config.json"
        )
    known = {token.content for token in inner.get_added_tokens_decoder().values()}
    inner.add_special_tokens([token for token in dict.fromkeys([end, *roles.values()]) if token not in known])
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()
    return TextTokenizer(inner, id_, roles)


def _rounded(number: str) -> float:
    """A score without its last digits, which the library does not keep when it reads them."""
    return round(float(number), 6)


def _end_of(roles: Mapping[str, str]) -> str | None:
    return roles.get("eos_token") or roles.get("sep_token")


def _adds_space(cut: Any) -> bool:
    """Whether the tokenizer puts a space before a text: transformers would set it otherwise."""
    if not isinstance(cut, dict):
        return False
    return bool(cut.get("add_prefix_space")) or any(map(_adds_space, cut.get("pretokenizers", [])))
