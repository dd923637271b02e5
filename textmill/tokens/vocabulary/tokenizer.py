"""TextTokenizer: fitted on a corpus or opened from files; its folder can also be opened with transformers."""

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
from textmill.config.tokenizer import CONTENT, ENDS, end_of, tokens_in, turns_of
from textmill.config.tokenizer import END as END_PLACEHOLDER
from textmill.errors import TextmillError
from textmill.storage.files import hash_json, read_json, write_text
from textmill.storage.hub import find_model_folder
from textmill.storage.stages import MANIFEST, open_manifest
from textmill.tokens.vocabulary.algorithms import WordCounter, merge_counts, new_tokenizer, train_vocabulary
from textmill.tokens.vocabulary.foreign_files import END, QWEN, find_special_tokens, open_files
from textmill.tokens.vocabulary.jieba_words import KEY, JiebaWords, open_words

FILES = ("tokenizer.json", "tokenizer_config.json")
GENERATION_FILE = "generation_config.json"
HUB_FILES = [
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "encoder.json",
    "*.model",
    "chat_template.jinja",
    "config.json",
    GENERATION_FILE,
]
"""File patterns of a tokenizer on the Hugging Face hub."""
KEPT_SETTINGS = (
    "model_max_length",
    "padding_side",
    "truncation_side",
    "model_input_names",
    "add_bos_token",
    "add_eos_token",
    "additional_special_tokens",
    "extra_special_tokens",
    "clean_up_tokenization_spaces",
    "split_special_tokens",
)
"""Settings of another tokenizer_config.json that are kept; the others are in tokenizer.json, or name files and code."""
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Special tokens in config.json and generation_config.json."""
MODEL_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]
"""What transformers' tokenizers return for a net with embeddings of segments."""
TURNS_KEY = "textmill_turns"
"""Our own key in tokenizer_config.json: the chat template as data, next to the same template in Jinja."""


@dataclass(frozen=True)
class TextTokenizer:
    """Encodes and decodes text; text that looks like a special token is encoded as plain text."""

    inner: Tokenizer
    eos_id: int
    """The id of the end-of-text token."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by transformers' names for them: bos_token, pad_token and so on."""
    chat: TurnTemplates | None = None
    """The chat template, if textmill wrote it."""
    jinja: str | None = None
    """A chat template of another origin, kept unchanged."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of KEPT_SETTINGS that came with it."""
    model_ids: Mapping[str, Any] = field(default_factory=dict)
    """Those of ID_KEYS that the config.json next to it has; eos_token_id may be a list."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """The generation_config.json that came with it."""
    words: JiebaWords | None = None
    """What encodes instead of `inner`, with `tokenizer.jieba`."""

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Every token that ends a text: the end-of-text token, and those that came as a list of them."""
        ids: list[Any] = [self.eos_id]
        for source in (self.generation, self.model_ids):
            named = source.get("eos_token_id")
            ids += named if isinstance(named, list) else [named]
        return tuple(dict.fromkeys(id_ for id_ in ids if type(id_) is int and 0 <= id_ < self.vocab))

    @property
    def has_template(self) -> bool:
        """Whether it came with a chat template."""
        return self.chat is not None or self.jinja is not None

    @property
    def adds_bos(self) -> bool:
        """Whether a text gets the begin token in front with special tokens, as transformers does."""
        return self.bos_id is not None and self._special_around()[:1] == [self.bos_id]

    @property
    def adds_eos(self) -> bool:
        """Whether a text gets the end-of-text token behind it with special tokens."""
        return self._special_around()[1:][-1:] == [self.eos_id]

    def _special_around(self) -> list[int]:
        """The ids of a text of one token, with special tokens."""
        ids: list[int] = self.inner.encode("a").ids
        return ids

    @cached_property
    def is_qwen(self) -> bool:
        """Whether transformers' Qwen2Tokenizer, which ignores how tokenizer.json splits a text, gives the same ids."""
        tree = json.loads(self.inner.to_str())
        steps = (tree["pre_tokenizer"] or {}).get("pretokenizers", [])
        return (
            tree["model"]["type"] == "BPE"
            and not tree["model"].get("ignore_merges")
            and tree["normalizer"] == {"type": "NFC"}
            and [step["type"] for step in steps] == ["Split", "ByteLevel"]
            and steps[0]["pattern"].get("Regex") == QWEN
            and steps[0]["behavior"] == "Isolated"
            and not steps[1]["add_prefix_space"]
            and not steps[1]["use_regex"]
        )

    @cached_property
    def vocab(self) -> int:
        """The size of the vocabulary: the largest id plus one."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal for equal tokenizers."""
        tree = json.loads(self.inner.to_str(), parse_float=_rounded)
        return hash_json({**tree, KEY: True} if self.words else tree)

    @property
    def bos_id(self) -> int | None:
        """The token at the start of a text, if there is one."""
        return self._first_id("bos_token", "cls_token")

    @property
    def first_id(self) -> int:
        """The token that predicts the first one of a text: the begin token, or the end-of-text token if there is
        none."""
        begin = self._id_of("bos_token")
        return self.eos_id if begin is None else begin

    @property
    def pad_id(self) -> int | None:
        """The padding token, if there is one."""
        return self._id_of("pad_token")

    @property
    def padding_id(self) -> int:
        """The token that fills up samples: the padding token, or the end-of-text token if there is none."""
        return self.eos_id if self.pad_id is None else self.pad_id

    @property
    def unk_id(self) -> int | None:
        """The token for characters outside the vocabulary, if there is one."""
        unknown = self._id_of("unk_token")
        return None if unknown == self.eos_id else unknown

    @property
    def mask_id(self) -> int | None:
        """The mask token, if there is one."""
        return self._id_of("mask_token")

    @property
    def cls_id(self) -> int | None:
        """[CLS], the token before a sample of a masked model, or the begin token if there is none."""
        return self._first_id("cls_token", "bos_token")

    @property
    def sep_id(self) -> int:
        """[SEP], the token after each segment of a masked model, or the end-of-text token if there is none."""
        separator = self._id_of("sep_token")
        return self.eos_id if separator is None else separator

    @property
    def turn_tokens(self) -> TurnTokens | None:
        """The chat template as token ids."""
        return None if self.chat is None else self.chat.to_turn_tokens(self.inner.get_vocab(with_added_tokens=True))

    def with_chat(self, turns: Mapping[str, str]) -> TextTokenizer:
        """A copy with a chat template: adds missing special tokens; the stop token becomes the end-of-text token."""
        end = str(self.inner.id_to_token(self.eos_id))
        template = TurnTemplates(tuple((role, text.replace(END_PLACEHOLDER, end)) for role, text in turns.items()))
        inner = Tokenizer.from_str(self.inner.to_str())
        known = {token.content for token in inner.get_added_tokens_decoder().values()}
        inner.add_special_tokens(
            [AddedToken(token, normalized=False) for token in template.tokens if token not in known]
        )
        inner.encode_special_tokens = True
        stop = inner.get_vocab(with_added_tokens=True)[template.stop]
        roles = {**self.roles, "eos_token": template.stop}
        # The ends of the model are replaced: they would stop an answer that this template does not end with them.
        ids, generation = ({**ids, "eos_token_id": stop} if ids else {} for ids in (self.model_ids, self.generation))
        return replace(
            self, inner=inner, eos_id=stop, roles=roles, chat=template, jinja=None, model_ids=ids, generation=generation
        )

    def with_masked_tokens(self) -> TextTokenizer:
        """A copy with the tokens of a masked model: adds <mask>, and <s> before a sample, where they are missing."""
        missing = {"mask_token": "<mask>"} if self.mask_id is None else {}
        if self.cls_id is None:
            missing["cls_token"] = "<s>"
        if not missing:
            return self
        inner = Tokenizer.from_str(self.inner.to_str())
        inner.add_special_tokens([AddedToken(token, normalized=False) for token in missing.values()])
        inner.encode_special_tokens = True
        return replace(self, inner=inner, roles={**self.roles, **missing})

    def _id_of(self, role: str) -> int | None:
        token = self.roles.get(role)
        id_: int | None = None if token is None else self.inner.token_to_id(token)
        return id_

    def _first_id(self, *roles: str) -> int | None:
        """The id of the first of these roles that has a token."""
        ids = map(self._id_of, roles)
        return next((id_ for id_ in ids if id_ is not None), None)

    def encode(self, text: str) -> list[int]:
        """The ids of one text, without special tokens."""
        if self.words is not None:
            return self.words.encode(text)
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_many(self, texts: list[str]) -> Iterator[NDArray[np.int64]]:
        """The ids of many texts."""
        if self.words is not None:
            return (np.array(ids, np.int64) for ids in map(self.words.encode, texts))
        encodings: list[Encoding] = self.inner.encode_batch_fast(texts, add_special_tokens=False)
        return (np.array(encoding.ids, np.int64) for encoding in encodings)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, including special tokens."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=False)
        return text

    def decode_many(self, ids: list[list[int]]) -> Iterator[str]:
        """The texts of many lists of ids."""
        texts: list[str] = self.inner.decode_batch(ids, skip_special_tokens=False)
        return iter(texts)

    def save(self, folder: Path, longest: int | None = None) -> None:
        """Write the files that transformers' AutoTokenizer opens."""
        for name, text in self.files(longest).items():
            write_text(folder / name, text)

    def files(self, longest: int | None = None, *, segments: bool = False) -> dict[str, str]:
        """The contents of tokenizer.json, of tokenizer_config.json, which transformers needs too, and of
        generation_config.json, if such settings came with it.

        `longest`: the positions of the net; `segments`: whether it has embeddings of segments.
        """
        roles = dict(self.roles)
        end = str(self.inner.id_to_token(self.eos_id))
        if _end_of(roles) != end:
            roles["eos_token"] = end
        tree = self.inner.to_str(pretty=True)
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **roles,
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": _adds_space(json.loads(tree)["pre_tokenizer"]),
            **self.settings,
            **({KEY: True} if self.words else {}),
        }
        if longest:
            settings["model_max_length"] = min(longest, settings.get("model_max_length") or longest)
        if segments:
            settings.setdefault("model_input_names", MODEL_INPUTS)
        if self.chat is not None:
            settings |= {"chat_template": self.chat.jinja(), TURNS_KEY: dict(self.chat.turns)}
        elif self.jinja is not None:
            settings["chat_template"] = self.jinja
        files = {
            "tokenizer.json": tree,
            "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
        }
        if generation := self._generation_settings():
            files[GENERATION_FILE] = json.dumps(generation, indent=2, ensure_ascii=False) + "\n"
        return files

    def _generation_settings(self) -> dict[str, Any]:
        """The generation_config.json: the one that came with it, or as transformers makes one of a config.json."""
        if self.generation:
            return dict(self.generation)
        own = {"bos_token_id": self.eos_id, "eos_token_id": self.eos_id, "pad_token_id": None}
        is_own = all(self.model_ids.get(key, own[key]) == own[key] for key in ("bos_token_id", "eos_token_id"))
        return {} if is_own else {"_from_model_config": True, **self.model_ids}


@dataclass(frozen=True)
class TurnTemplates:
    """The chat template as text: for each role the special tokens before and after its content."""

    turns: tuple[tuple[str, str], ...]
    """A role and its turn, such as `<|user|>{content}<|endoftext|>`."""

    @property
    def tokens(self) -> list[str]:
        """Every special token of the template, once."""
        return list(dict.fromkeys(token for _, text in self.turns for token in tokens_in(text)))

    @property
    def stop(self) -> str:
        """The stop token: the last token of the assistant's turn."""
        return tokens_in(dict(self.turns)["assistant"])[-1]

    @property
    def prompt(self) -> str:
        """The generation prompt: what comes before the content of the assistant's turn."""
        return dict(self.turns)["assistant"].partition(CONTENT)[0]

    def to_turn_tokens(self, vocab: Mapping[str, int]) -> TurnTokens:
        """The template as token ids of a vocabulary."""

        def ids_in(half: str) -> tuple[int, ...]:
            return tuple(vocab[token] for token in tokens_in(half))

        halves = ((role, *text.split(CONTENT)) for role, text in self.turns)
        return TurnTokens(tuple((role, ids_in(before), ids_in(after)) for role, before, after in halves))

    def jinja(self) -> str:
        """The same template as transformers' `chat_template`; it raises an error for the same roles as `render`."""
        branches = []
        keyword = "if"
        for role, text in self.turns:
            before, _, after = text.partition(CONTENT)
            turn = " + ".join([_quoted(before), "message['content']", *([_quoted(after)] if after else [])])
            branches.append(f"{{% {keyword} message['role'] == '{role}' %}}{{{{ {turn} }}}}")
            keyword = "elif"
        refusal = "{% else %}{{ raise_exception('this template has no turn of the ' + message['role']) }}{% endif %}"
        prompt = f"{{% if add_generation_prompt %}}{{{{ {_quoted(self.prompt)} }}}}{{% endif %}}"
        return f"{{% for message in messages %}}{''.join(branches)}{refusal}{{% endfor %}}{prompt}"


@dataclass(frozen=True)
class TurnTokens:
    """The chat template as token ids of one tokenizer."""

    turns: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """A role, and the ids before and after its content."""

    def tokens_around(self, role: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before and after the content of a role."""
        for name, before, after in self.turns:
            if name == role:
                return before, after
        raise ValueError(
            f"the chat template has no turn of the {role}; use another tokenizer.chat, or leave such turns out"
        )


def _quoted(text: str) -> str:
    return "'" + json.dumps(text, ensure_ascii=False)[1:-1].replace("'", "\\'").replace('\\"', '"') + "'"


def open_tokenizer(where: Path, end: str | None = None, lowercase: bool | None = None) -> TextTokenizer:
    """Open a tokenizer from a folder or file: see `open_files` for the formats."""
    inner, roles = open_files(where, lowercase)
    tokenizer = _wrap(inner, roles, end, str(where))
    folder = where if where.is_dir() else where.parent
    settings = _read_settings(folder / "tokenizer_config.json")
    generation = _read_settings(folder / GENERATION_FILE)
    ids = _read_settings(folder / "config.json") if (folder / "config.json").is_file() else generation
    tokenizer = replace(
        tokenizer,
        settings={key: settings[key] for key in KEPT_SETTINGS if settings.get(key) is not None},
        model_ids={key: ids[key] for key in ID_KEYS if key in ids},
        generation=generation if not generation.get("_from_model_config") else {},
        words=open_words(inner) if settings.get(KEY) else None,
    )
    jinja = folder / "chat_template.jinja"
    text = jinja.read_text(encoding="utf-8") if jinja.is_file() else _default_template(settings.get("chat_template"))
    if not isinstance(text, str):
        return tokenizer
    template = TurnTemplates(tuple(settings[TURNS_KEY].items())) if TURNS_KEY in settings else None
    # If someone edited the Jinja, it is the template, and our data next to it is out of date.
    return (
        replace(tokenizer, chat=template) if template and template.jinja() == text else replace(tokenizer, jinja=text)
    )


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings in a file of transformers; none if there is no such file."""
    tree = read_json(path) if path.is_file() else {}
    if not isinstance(tree, dict):
        raise TextmillError(f"{path}: found a {type(tree).__name__}; it must be an object of settings")
    return tree


def _default_template(given: Any) -> Any:
    """The chat template of a tokenizer_config.json: a text, or that named default in a list of several."""
    if not isinstance(given, list):
        return given
    named = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
    return named.get("default")


def open_used(config: TokenizerConfig, layout: str) -> TextTokenizer:
    """Open what `tokenizer.use` names: a local folder or file, a project, or a tokenizer of the Hugging Face hub.

    What the chat template and `train.layout` need is added.
    """
    name = str(config.use)
    path = Path(name)
    if (path / "tokenizer" / "tokenizer.json").is_file() and not (path / "tokenizer.json").is_file():
        path = path / "tokenizer"  # of a project, which `model.init_from` takes too
    if not path.exists():
        try:
            path = find_model_folder(name, HUB_FILES)
        except TextmillError as error:
            raise TextmillError(f"tokenizer.use: {error}") from None
    used = open_tokenizer(path, config.end_token, config.lowercase)
    if turns := turns_of(config.chat, config.chat_turns):
        used = used.with_chat(turns)
    if config.jieba and used.words is None:
        used = replace(used, words=open_words(used.inner))
    return used.with_masked_tokens() if layout == "masked" else used


def tokenizer_of(folder: Path, config: TokenizerConfig, layout: str) -> TextTokenizer:
    """The tokenizer of existing tokens: the one that `tokenizer.use` names, or the one in the tokenizer folder."""
    has_folder = (folder / MANIFEST).is_file()
    if not config.use:
        if not has_folder:
            raise TextmillError(
                "tokenizer.use: is not set, and tokens.use names existing tokens; set it to the tokenizer that made "
                "them"
            )
        return open_tokenizer(folder)
    named = open_used(config, layout)
    if has_folder and open_manifest(folder)["tokenizer"] != named.fingerprint:
        raise TextmillError(f"{folder}: this tokenizer differs from tokenizer.use={config.use}; change one of them")
    return named


def fit(texts: Iterator[list[str]], config: TokenizerConfig) -> TextTokenizer:
    """Fit a tokenizer of the configured kind on texts."""
    counter = WordCounter(new_tokenizer(config))
    for batch in texts:
        for text in batch:
            counter.add(text)
    return fit_words([counter.counts()], config)


def fit_words(parts: Iterable[Mapping[str, int]], config: TokenizerConfig) -> TextTokenizer:
    """Fit a tokenizer on the word counts of several parts."""
    inner = train_vocabulary(merge_counts(parts), config)
    end = end_of(config)
    known = {"eos_token": end} if config.kind != "wordpiece" or end != ENDS[config.kind] else {}
    tokenizer = _wrap(
        inner, find_special_tokens(inner, find_special_tokens(inner, {}) | known), end, "the fitted tokenizer"
    )
    turns = turns_of(config.chat, config.chat_turns)
    return tokenizer.with_chat(turns) if turns else tokenizer


def _wrap(inner: Tokenizer, roles: dict[str, str], end: str | None, where: str) -> TextTokenizer:
    end = end or _end_of(roles)
    if end is None or (id_ := inner.token_to_id(end)) is None:
        raise TextmillError(
            f"{where}: has no end-of-text token ({end or END}); "
            f"set tokenizer.end_token, or eos_token in tokenizer_config.json"
        )
    known = {token.content for token in inner.get_added_tokens_decoder().values()}
    inner.add_special_tokens([token for token in dict.fromkeys([end, *roles.values()]) if token not in known])
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()
    return TextTokenizer(inner, id_, roles)


def _rounded(number: str) -> float:
    """A score without its last digits, which the library loses when it reads a file."""
    return round(float(number), 6)


def _end_of(roles: Mapping[str, str]) -> str | None:
    return roles.get("eos_token") or roles.get("sep_token")


def _adds_space(pre_tokenizer: Any) -> bool:
    """Whether a pre-tokenizer adds a space before a text; written down, because transformers has another default."""
    if not isinstance(pre_tokenizer, dict):
        return False
    return bool(pre_tokenizer.get("add_prefix_space")) or any(map(_adds_space, pre_tokenizer.get("pretokenizers", [])))
