"""The section for the tokenizer: fitted on the corpus, or an existing one."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from textmill.config.chat import DSGPT2_TOKENS, END, check_turns, tokens_in, turns_of
from textmill.config.section import Section, path, source
from textmill.errors import TextmillError


class TokenizerConfig(Section):
    """The tokenizer: fitted on the corpus, or an existing one."""

    folder: str | None = path()
    """Folder of the tokenizer; default: `tokenizer` under `folder`."""
    use: str | None = source()
    """Use this tokenizer and fit none: a folder, file or hub name with tokenizer.json, GPT-2's two files,
    a vocab.txt of BERT or Yuan, or a sentencepiece .model."""
    kind: Literal["bpe", "wordpiece", "unigram"] = "bpe"
    """bpe: byte-level BPE as in GPT-2, for any text; wordpiece: as in BERT; unigram: as in sentencepiece."""
    fit_on: Literal["corpus", "sources"] = "corpus"
    """corpus: the train split that `prepare` wrote; sources: `corpus.sources`, read and cleaned, without deduplication
    and without a split."""
    fit_sample: float = Field(1.0, gt=0)
    """Fit on this fraction of the documents (up to 1) or on this many (above 1), chosen by a hash of the text. A
    document above 128,000 characters counts as several of 64,000."""
    vocab: int = Field(32000, ge=260, le=2_000_000)
    """Vocabulary size, including special tokens and bytes."""
    min_frequency: int = Field(2, ge=1)
    """bpe, wordpiece: a pair that occurs less often than this is never merged."""
    character_coverage: float = Field(0.9995, gt=0.5, le=1)
    """wordpiece, unigram: the alphabet covers this fraction of all characters; rarer ones become bytes or unknown."""
    special_tokens: list[str] = []
    """More special tokens, after those of the kind; a list that contains the end-of-text token is the full list,
    in the order of the ids."""
    end_token: str | None = None
    """The end-of-text token; default: <|endoftext|> for bpe, [SEP] for wordpiece, </s> for unigram, or the one of
    `tokenizer.use`."""
    chat: Literal["default", "dsgpt2"] | None = None
    """The chat template; its special tokens are added, and transformers finds it in the files. default: <|user|>,
    <|assistant|> or <|system|> before each message, the end-of-text token after it; dsgpt2: <usr> and <sys>,
    with <s> and </s>. If not set, there is no template."""
    chat_turns: dict[str, str] = {}
    """Your own chat template, or what differs from the named one: for system, user and assistant the special tokens
    around {content}, such as `user: <usr>{content}{end}`, where {end} is the end-of-text token."""
    byte_fallback: bool | None = None
    """unigram: encode as bytes what the vocabulary lacks, so that no text is unknown; default: true."""
    lowercase: bool | None = None
    """Lower-case all text; default: false, but a bare vocab.txt without capital letters is read as uncased."""
    strip_accents: bool = False
    """wordpiece: remove accents, as BERT's uncased models do (this splits Korean syllables and changes Turkish
    letters)."""
    split_digits: bool = False
    """Make every digit its own token."""
    split_cjk: bool | None = None
    """Make every Chinese character its own token; default: in wordpiece only, as in BERT."""
    compare_with: str | None = Field(None, json_schema_extra={"changeable": True, "source": True})
    """Another tokenizer, such as GPT-2's files, to measure on the same text in the report."""

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
        if self.strip_accents and self.kind != "wordpiece":
            raise TextmillError(
                f"tokenizer.strip_accents: is for wordpiece, found tokenizer.kind={self.kind}; remove it"
            )
        if self.fit_sample > 1 and self.fit_sample != int(self.fit_sample):
            raise TextmillError(
                f"tokenizer.fit_sample: found {self.fit_sample}; give a fraction up to 1, or a whole number "
                "of documents"
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
