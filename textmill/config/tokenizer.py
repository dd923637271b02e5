"""Sections for tokenizers and token ids, and chat templates as data: the special tokens around each role's message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from textmill.config.section import Section, path, source
from textmill.errors import TextmillError


class FeaturesConfig(Section):
    """How documents are cut into fixed-length rows."""

    max_length: int = Field(256, ge=2)
    """Tokens in a row."""
    min_length: int = Field(128, ge=0)
    """A chunk is kept if it has more than `min_length - reserved_tokens` tokens."""
    stride: int = Field(128, ge=1)
    """Tokens from the start of a chunk to the start of the next; below `max_length` they overlap."""
    reserved_tokens: int = Field(2, ge=0)
    """Positions reserved for special tokens: a chunk has at most `max_length - reserved_tokens + 1` tokens."""

    @model_validator(mode="after")
    def _check_lengths(self) -> FeaturesConfig:
        if self.reserved_tokens > self.max_length:
            raise TextmillError(
                f"tokens.features.reserved_tokens: {self.reserved_tokens} of {self.max_length} positions; "
                "leave some for tokens"
            )
        if self.min_length > self.max_length:
            raise TextmillError(
                f"tokens.features.min_length: {self.min_length} is above tokens.features.max_length={self.max_length}, "
                "so no chunk is long enough; lower it"
            )
        return self


class UsedTokens(Section):
    """An existing token store, and its weight in a blend."""

    path: str
    """A prefix of .bin and .idx files, a folder that `textmill tokenize` wrote, a folder of `datasets.save_to_disk`,
    Parquet or TFRecord files (a file, folder or glob, or a list of TFRecord files with blanks between) with a column
    `input_ids`, or .npy or .pickle files; or a URL of one of these."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Its fraction of the samples, relative to the weights of the other stores."""


class TokensConfig(Section):
    """Token stores: how documents become token ids, or existing tokens."""

    folder: str | None = path()
    """Folder of the token stores; default: `tokens` under `folder`."""
    level: Literal["document", "sentence"] = "document"
    """What one sequence of the store is: a document, or one line of it (needs a corpus with `corpus.sentences`)."""
    index_format: Literal["mmap", "lazy"] = "mmap"
    """Format of the index file: mmap: Megatron's memory-mapped index; lazy: its older index, for its `lazy` and
    `cached` readers."""
    append_end: bool = True
    """Put the end-of-text token after each document."""
    prepend_begin: bool = False
    """Put the begin token before each document; a tokenizer without one, such as GPT-2's, uses its end-of-text
    token."""
    overlap: int = Field(128, ge=0)
    """question-answering: tokens that two windows of a long context share, at most half of them (run_qa's
    doc_stride)."""
    use: list[UsedTokens] = source([])
    """Existing tokens to train on: prefixes, folders or files, or {path: PREFIX, weight: 3} to blend several.
    Tokens without splits are split by `corpus.split`, documents in their order."""
    use_valid: list[str] = source([])
    """Existing tokens of the valid split, whatever their names; `tokens.use` then has none of it, and what has no
    splits there belongs to train."""
    use_test: list[str] = source([])
    """Existing tokens of the test split, likewise."""
    kind: Literal["store", "features", "tfrecord"] = "store"
    """store: token ids of documents; features: in addition, fixed-length rows in Parquet, as jax-lm-training writes
    them; tfrecord: in addition, the samples of `train.layout=masked` in TFRecord files, as BERT writes them."""
    features: FeaturesConfig = FeaturesConfig()
    """How `tokens.kind=features` cuts rows."""
    tfrecord_epochs: int = Field(1, ge=1)
    """How often `tokens.kind=tfrecord` writes the train split, each time with other pairs and other masked tokens
    (BERT's dupe_factor)."""

    @field_validator("use", mode="before")
    @classmethod
    def _parse_paths(cls, value: Any) -> Any:
        return (
            [{"path": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value
        )

    @model_validator(mode="after")
    def _check_use(self) -> TokensConfig:
        for name in ("use_valid", "use_test"):
            if getattr(self, name) and not self.use:
                raise TextmillError(
                    f"tokens.{name}: needs tokens.use, the tokens to train on; the split of a corpus is set with "
                    "corpus.source_splits, and any text is measured with evaluate.text"
                )
        return self

    @model_validator(mode="after")
    def _check_begin_token(self) -> TokensConfig:
        if self.prepend_begin and self.kind == "features":
            raise TextmillError(
                "tokens.prepend_begin: the rows of tokens.kind=features already begin with a special token; remove it"
            )
        return self


class TokenizerConfig(Section):
    """The tokenizer: fitted on the corpus, or an existing one."""

    folder: str | None = path()
    """Folder of the tokenizer; default: `tokenizer` under `folder`."""
    use: str | None = source()
    """Use this tokenizer and fit none: a folder, file or hub name with tokenizer.json, GPT-2's two files,
    a vocab.txt of BERT or Yuan, or a sentencepiece .model."""
    jieba: bool = False
    """With a vocab.txt of Yuan: cut words with jieba, as Yuan does, for the ids of its checkpoints (extra chinese)."""
    kind: Literal["bpe", "wordpiece", "unigram"] = "bpe"
    """bpe: byte-level BPE as in GPT-2, for any text; wordpiece: as in BERT; unigram: as in sentencepiece."""
    fit_on: Literal["corpus", "sources"] = "corpus"
    """corpus: the train split that `prepare` wrote; sources: `corpus.sources`, read and cleaned, without deduplication
    and without a split."""
    fit_sample: float = Field(1.0, gt=0, le=1)
    """Fit on this fraction of the documents, chosen by a hash of the text. A document above 128,000 characters counts
    as several of 64,000."""
    vocab: int = Field(32000, ge=260, le=2_000_000)
    """Vocabulary size, including special tokens and bytes."""
    character_coverage: float = Field(0.9995, gt=0.5, le=1)
    """wordpiece, unigram: the alphabet covers this fraction of all characters; rarer ones become bytes or unknown."""
    special_tokens: list[str] = []
    """More special tokens, after those of the kind; a list that contains the end-of-text token is the full list,
    in the order of the ids. `train.layout=masked` adds <mask> where it is missing."""
    end_token: str | None = None
    """The end-of-text token; default: <|endoftext|> for bpe, [SEP] for wordpiece, </s> for unigram, or the one of
    `tokenizer.use`."""
    chat: Literal["default", "dsgpt2"] | None = None
    """The chat template, default or dsgpt2; if not set, there is none. Its special tokens are added, and transformers
    finds it in the files. default: <|user|>, <|assistant|> or <|system|> before each message, the end-of-text token
    after it; dsgpt2: <usr> and <sys>, with <s> and </s>."""
    chat_turns: dict[str, str] = {}
    """Your own chat template, or what differs from the named one: for system, user and assistant the special tokens
    around {content}, such as `user: <usr>{content}{end}`, where {end} is the end-of-text token."""
    byte_fallback: bool | None = None
    """unigram: encode as bytes what the vocabulary lacks, so that no text is unknown; default: true."""
    lowercase: bool | None = None
    """Lower-case all text; default: false, but a bare vocab.txt without capital letters is read as uncased."""
    split_digits: bool = False
    """Make every digit its own token."""

    @field_validator("special_tokens", "end_token")
    @classmethod
    def _check_special_tokens(cls, value: list[str] | str | None, info: ValidationInfo) -> list[str] | str | None:
        tokens = [
            token for text in ([value] if isinstance(value, str) else value or []) for token in expand_range(text)
        ]
        for token in tokens if info.field_name != "end_token" or not info.data.get("use") else []:
            if not (any(map(str.isalnum, token)) and not token.isalnum()) or any(map(str.isspace, token)):
                raise TextmillError(
                    f"tokenizer.{info.field_name}: found {token!r}, which could be plain text; "
                    f"give letters or digits with symbols around them, without spaces, such as <usr>"
                )
        if twice := [token for number, token in enumerate(tokens) if token in tokens[:number]]:
            raise TextmillError(f"tokenizer.special_tokens: {twice[0]!r} is listed twice; keep one")
        return tokens if isinstance(value, list) else value

    @field_validator("chat_turns")
    @classmethod
    def _check_chat_turns(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        if turns := turns_of(info.data.get("chat"), value):
            check_turns(turns)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> TokenizerConfig:
        if self.jieba and not self.use:
            raise TextmillError("tokenizer.jieba: is for tokenizer.use=vocab.txt of Yuan; set it, or remove this key")
        turns = turns_of(self.chat, self.chat_turns)
        if self.end_token and turns and (stop := tokens_in(turns["assistant"])[-1]) not in (END, self.end_token):
            raise TextmillError(
                f"tokenizer.end_token: {self.end_token} is not {stop}, which ends an answer in the chat template, "
                "so no answer would end; remove it"
            )
        if self.use is not None:
            return self
        if self.byte_fallback is not None and self.kind != "unigram":
            why = "always encodes bytes" if self.kind == "bpe" else "has no bytes"
            raise TextmillError(
                f"tokenizer.byte_fallback: is for unigram, and {self.kind} {why}; remove it, or set "
                "tokenizer.kind=unigram"
            )
        tokens = special_tokens_of(self)
        if self.kind != "bpe" and UNKNOWN_TOKENS.isdisjoint(tokens):
            raise TextmillError(
                f"tokenizer.special_tokens: {self.kind} needs a token for unknown text; add <unk> or [UNK]"
            )
        least = len(tokens) + 256 * (self.kind == "bpe" or (self.kind == "unigram" and self.byte_fallback is not False))
        if self.vocab < least:
            raise TextmillError(
                f"tokenizer.vocab: {self.vocab} is less than the {least} special tokens and bytes; raise it"
            )
        return self


UNKNOWN_TOKENS = {"<unk>", "[UNK]"}
OWN_TOKENS = {
    "bpe": ["<|endoftext|>"],
    "wordpiece": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "unigram": ["<unk>", "<s>", "</s>", "<pad>"],
}
MASKED_TOKENS = {"bpe": ["<s>", "<mask>"], "unigram": ["<mask>"]}
"""The tokens that a masked model needs in addition; wordpiece has its own."""
ENDS = {"bpe": "<|endoftext|>", "wordpiece": "[SEP]", "unigram": "</s>"}


def special_tokens_of(config: TokenizerConfig) -> list[str]:
    """All special tokens in the order of their ids."""
    end = end_of(config)
    turns = turns_of(config.chat, config.chat_turns)
    chat = [end if token == END else token for text in turns.values() for token in tokens_in(text)]
    if end in config.special_tokens:
        return list(dict.fromkeys([*config.special_tokens, *chat]))
    own = DSGPT2_TOKENS if config.chat == "dsgpt2" else [end] if config.kind == "bpe" else OWN_TOKENS[config.kind]
    return list(dict.fromkeys([*own, *config.special_tokens, end, *chat]))


def end_of(config: TokenizerConfig) -> str:
    """The end-of-text token of a fitted tokenizer: the one that is set, else the chat template's, else the kind's."""
    turns = turns_of(config.chat, config.chat_turns)
    stop = tokens_in(turns["assistant"])[-1] if turns else END
    return config.end_token or (ENDS[config.kind] if stop == END else stop)


def expand_range(text: str) -> list[str]:
    """`<unused{0..99}>` as a hundred tokens; any other text as it is."""
    found = re.fullmatch(r"(.*)\{(\d{1,5})\.\.(\d{1,5})\}(.*)", text)
    if found and int(found[2]) > int(found[3]):
        raise TextmillError(
            f"tokenizer.special_tokens: {text!r} counts from {found[2]} to {found[3]}, which is empty; swap the numbers"
        )
    return [f"{found[1]}{number}{found[4]}" for number in range(int(found[2]), int(found[3]) + 1)] if found else [text]


CONTENT = "{content}"
END = "{end}"
"""In a turn: the message, and the tokenizer's end-of-text token."""
ROLES = ("system", "user", "assistant")
TEMPLATES = {
    "default": {
        "system": "<|system|>{content}{end}",
        "user": "<|user|>{content}{end}",
        "assistant": "<|assistant|>{content}{end}",
    },
    "dsgpt2": {"user": "<usr><s>{content}</s>", "assistant": "<sys><s>{content}</s>"},
}
"""dsGPT2 calls the assistant <sys>, and has no system turn."""
DSGPT2_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sys>", "<usr>"]
"""dsGPT2's special tokens in the order of their ids."""
_TOKEN = re.compile(r"\{end\}|<[^<>\s]+>|\[[^\[\]\s]+\]")


def turns_of(chat: str | None, own: Mapping[str, str]) -> dict[str, str]:
    """The turns of a named template, overridden by the user's own; empty if neither is set."""
    return {**TEMPLATES.get(chat or "", {}), **own}


def tokens_in(text: str) -> list[str]:
    """The special tokens that a turn names, {end} included."""
    return _TOKEN.findall(text.replace(CONTENT, " "))


def check_turns(turns: Mapping[str, str]) -> None:
    """Refuse a template with which a model cannot learn to answer and to stop."""
    for role, text in turns.items():
        _check_turn(role, text)
    if missing := [role for role in ("user", "assistant") if role not in turns]:
        raise TextmillError(
            f"tokenizer.chat_turns: no turn for the {missing[0]}; add one, such as {missing[0]}: "
            f"<|{missing[0]}|>{CONTENT}{END}"
        )
    if turns["assistant"].endswith(CONTENT):
        raise TextmillError(
            f"tokenizer.chat_turns: assistant ends with {CONTENT}, so the model would never learn to stop; "
            f"put {END} after it"
        )
    if turns["assistant"].partition(CONTENT)[0] == turns["user"].partition(CONTENT)[0]:
        raise TextmillError(
            "tokenizer.chat_turns: user and assistant begin alike, so nothing shows who speaks; give each its own token"
        )


def _check_turn(role: str, text: str) -> None:
    """Refuse a turn that is not special tokens, the message, and perhaps special tokens again."""
    if role not in ROLES:
        raise TextmillError(f"tokenizer.chat_turns: no role '{role}'; the roles are {', '.join(ROLES)}")
    before, found, after = text.partition(CONTENT)
    if not found or CONTENT in after:
        raise TextmillError(
            f"tokenizer.chat_turns: {role} is {text!r}; it needs {CONTENT} exactly once, for the message"
        )
    if rest := _TOKEN.sub("", before + after):
        raise TextmillError(
            f"tokenizer.chat_turns: {role} has {rest!r}, which would merge with the message next to it; "
            "use only special tokens, such as <|user|>"
        )
    if not before:
        problem = "nothing shows who speaks"
        if role == "assistant":
            problem = "there is no generation prompt, so the model cannot know when to answer"
        raise TextmillError(
            f"tokenizer.chat_turns: {role} begins with {CONTENT}: {problem}; put a token before it, such as <|{role}|>"
        )
