"""The section for tokenizers: fitted, or taken as they are."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from textmill.config.chat import DSGPT2_TOKENS, END, check_turns, tokens_in, turns_of
from textmill.config.section import Section, path, source
from textmill.errors import TextmillError


class TokenizerConfig(Section):
    """Vocabulary: fitted on the corpus, or taken as it is."""

    folder: str | None = path()
    """Where the tokenizer stands; `tokenizer` under `folder` if not said."""
    use: str | None = source()
    """Take this tokenizer and fit none: a folder, file or hub name with tokenizer.json, GPT-2's two files, a BERT vocab.txt or a .model."""
    kind: Literal["bpe", "wordpiece", "unigram"] = "bpe"
    """bpe: byte-level BPE as GPT-2 has it, for any text; wordpiece: BERT's; unigram: sentencepiece's."""
    fit_on: Literal["corpus", "sources"] = "corpus"
    """corpus: the train split that `prepare` made; sources: `corpus.sources`, read and cleaned, with no duplicates dropped and no split."""
    fit_sample: float = Field(1.0, gt=0)
    """Fit on this share of the documents (up to 1), or on so many of them (above 1); a hash of the text chooses."""
    vocab: int = Field(32000, ge=260, le=2_000_000)
    """Size of the vocabulary, special tokens and bytes included."""
    min_frequency: int = Field(2, ge=1)
    """bpe, wordpiece: a pair seen less often than this is never merged."""
    character_coverage: float = Field(0.9995, gt=0.5, le=1)
    """wordpiece, unigram: the alphabet covers this share of all characters; rarer ones become bytes, or unknown."""
    special_tokens: list[str] = []
    """More special tokens, after the kind's own; a list with the end-of-text token in it is all of them, in the order of their ids."""
    end_token: str | None = None
    """The end-of-text token; <|endoftext|> for bpe, [SEP] for wordpiece, </s> for unigram, and what `tokenizer.use` says, if not said."""
    chat: Literal["default", "dsgpt2"] | None = None
    """The template of conversations; its special tokens are added, and transformers finds it in the files. default: <|user|>, <|assistant|>
    or <|system|> before what each says, the end-of-text token after it; dsgpt2: <usr> and <sys>, with <s> and </s>."""
    chat_turns: dict[str, str] = {}
    """A template of your own, or what differs from the named one: for system, user and assistant the special tokens around {content},
    such as `user: <usr>{content}{end}`, where {end} is the end-of-text token."""
    byte_fallback: bool | None = None
    """unigram: spell in bytes what the vocabulary lacks, and so know every text; yes if not said."""
    lowercase: bool | None = None
    """Lower-case all text; no if not said, but a bare vocab.txt is taken to be uncased when no piece has a capital letter."""
    strip_accents: bool = False
    """wordpiece: take accents off, as BERT's uncased models do (Korean syllables come apart, Turkish letters lose their marks)."""
    split_digits: bool = False
    """Every digit stands alone, so that numbers are read digit by digit."""
    split_cjk: bool | None = None
    """Every Chinese character stands alone; if not said, in wordpiece only, as BERT has it."""
    compare_with: str | None = Field(None, json_schema_extra={"changeable": True, "source": True})
    """Another tokenizer, such as GPT-2's files, that the report measures on the same text."""

    @field_validator("special_tokens", "end_token")
    @classmethod
    def _special(cls, value: list[str] | str | None, info: ValidationInfo) -> list[str] | str | None:
        tokens = [token for text in ([value] if isinstance(value, str) else value or []) for token in expanded(text)]
        for token in tokens if info.field_name != "end_token" or not info.data.get("use") else []:
            if not (any(map(str.isalnum, token)) and not token.isalnum()) or any(map(str.isspace, token)):
                raise TextmillError(
                    f"tokenizer.{info.field_name}: found {token!r}, which plain text could spell too; "
                    f"give letters or digits with signs around them, without spaces, such as <usr>"
                )
        if twice := [token for number, token in enumerate(tokens) if token in tokens[:number]]:
            raise TextmillError(f"tokenizer.special_tokens: {twice[0]!r} stands there twice; keep one")
        return tokens if isinstance(value, list) else value

    @field_validator("chat_turns")
    @classmethod
    def _template(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        if turns := turns_of(info.data.get("chat"), value):
            check_turns(turns)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> TokenizerConfig:
        turns = turns_of(self.chat, self.chat_turns)
        if self.end_token and turns and (stop := tokens_in(turns["assistant"])[-1]) not in (END, self.end_token):
            raise TextmillError(
                f"tokenizer.end_token: {self.end_token} is not the {stop} with which the chat template stops, so no answer would end; take it out"
            )
        if self.use is not None:
            return self
        if self.byte_fallback is not None and self.kind != "unigram":
            why = "always knows all bytes" if self.kind == "bpe" else "has no bytes"
            raise TextmillError(
                f"tokenizer.byte_fallback: is for unigram, and {self.kind} {why}; take it out, or set tokenizer.kind=unigram"
            )
        if self.strip_accents and self.kind != "wordpiece":
            raise TextmillError(
                f"tokenizer.strip_accents: is for wordpiece, found tokenizer.kind={self.kind}; take it out"
            )
        if self.fit_sample > 1 and self.fit_sample != int(self.fit_sample):
            raise TextmillError(
                f"tokenizer.fit_sample: found {self.fit_sample}; give a share up to 1, or a whole number of documents"
            )
        tokens = special_tokens_of(self)
        if self.kind != "bpe" and UNKNOWN.isdisjoint(tokens):
            raise TextmillError(
                f"tokenizer.special_tokens: {self.kind} needs a token for what it does not know; add <unk> or [UNK]"
            )
        least = len(tokens) + 256 * (self.kind == "bpe" or (self.kind == "unigram" and self.byte_fallback is not False))
        if self.vocab < least:
            raise TextmillError(
                f"tokenizer.vocab: {self.vocab} is less than the {least} special tokens and bytes; raise it"
            )
        return self


UNKNOWN = {"<unk>", "[UNK]"}
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
    """The end-of-text token of a tokenizer that is fitted: as said, else the one that the template stops with, else the kind's own."""
    turns = turns_of(config.chat, config.chat_turns)
    stop = tokens_in(turns["assistant"])[-1] if turns else END
    return config.end_token or (ENDS[config.kind] if stop == END else stop)


def expanded(text: str) -> list[str]:
    """`<unused{0..99}>` as a hundred tokens; any other text as it is."""
    found = re.fullmatch(r"(.*)\{(\d{1,5})\.\.(\d{1,5})\}(.*)", text)
    if found and int(found[2]) > int(found[3]):
        raise TextmillError(
            f"tokenizer.special_tokens: {text!r} counts from {found[2]} to {found[3]}, which is nothing; turn it round"
        )
    return [f"{found[1]}{number}{found[4]}" for number in range(int(found[2]), int(found[3]) + 1)] if found else [text]
