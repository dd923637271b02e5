"""Sections for token ids: how documents are encoded, existing tokens, and fixed-length rows."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

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
    ignore_label: int = Field(-100, lt=0)
    """The label of positions without loss."""
    pad_zero: bool = False
    """Pad with id 0 as jax-lm-training does; token 0 of a text then has no loss and is masked out."""

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


class TfrecordConfig(Section):
    """What `tokens.kind=tfrecord` writes."""

    epochs: int = Field(1, ge=1)
    """How often the train split is written, each time with other pairs and other masked tokens (BERT's dupe_factor)."""


class UsedTokens(Section):
    """An existing token store, and its weight in a blend."""

    path: str
    """A prefix of .bin and .idx files, a folder that `textmill tokenize` wrote, a folder of `datasets.save_to_disk`,
    or Parquet or TFRecord files (a file, folder or glob) with a column `input_ids`; or a URL of one of these."""
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
    kind: Literal["store", "features", "tfrecord"] = "store"
    """store: token ids of documents; features: in addition, fixed-length rows in Parquet, as jax-lm-training writes
    them; tfrecord: in addition, the samples of `train.layout=masked` in TFRecord files, as BERT writes them."""
    features: FeaturesConfig = FeaturesConfig()
    """How `tokens.kind=features` cuts rows."""
    tfrecord: TfrecordConfig = TfrecordConfig()
    """What `tokens.kind=tfrecord` writes."""

    @field_validator("use", mode="before")
    @classmethod
    def _parse_paths(cls, value: Any) -> Any:
        return (
            [{"path": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value
        )

    @model_validator(mode="after")
    def _check_begin_token(self) -> TokensConfig:
        if self.prepend_begin and self.kind == "features":
            raise TextmillError(
                "tokens.prepend_begin: the rows of tokens.kind=features already begin with a special token; remove it"
            )
        return self
