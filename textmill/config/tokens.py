"""Sections for token ids: how documents become them, existing ones, and rows of one length."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from textmill.config.section import Section, path, source
from textmill.errors import TextmillError


class FeaturesConfig(Section):
    """How documents are cut into rows of one length."""

    max_length: int = Field(256, ge=2)
    """Tokens in a row."""
    min_length: int = Field(128, ge=0)
    """A chunk is kept when it has more than `min_length - reserved_tokens` tokens."""
    stride: int = Field(128, ge=1)
    """How far the next chunk of a document begins after the one before; below `max_length` they overlap."""
    reserved_tokens: int = Field(2, ge=0)
    """Places kept free for special tokens: a chunk has at most `max_length - reserved_tokens + 1` tokens."""
    ignore_label: int = Field(-100, lt=0)
    """The label that asks nothing."""
    pad_zero: bool = False
    """Pad with id 0 as jax-lm-training does, so that the token 0 of a text is neither asked nor seen."""

    @model_validator(mode="after")
    def _some_row_passes(self) -> FeaturesConfig:
        if self.reserved_tokens > self.max_length:
            raise TextmillError(
                f"tokens.features.reserved_tokens: {self.reserved_tokens} of {self.max_length} places; leave some for tokens"
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
    """A prefix of .bin and .idx files, a folder that `textmill tokenize` made, a folder of `datasets.save_to_disk`, or Parquet files
    (a file, folder or glob) with a column `input_ids`."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Its share of the samples, against the other stores' weights."""


class TokensConfig(Section):
    """Documents in, token ids out."""

    folder: str | None = path()
    """Where the token stores stand; `tokens` under `folder` if not said."""
    level: Literal["document", "sentence"] = "document"
    """What a sequence of the store is: a document, or a line of it in a corpus made with `corpus.sentences`."""
    index_format: Literal["mmap", "lazy"] = "mmap"
    """The index beside the ids: mmap: Megatron's memory-mapped one; lazy: the older one, for its readers `lazy` and `cached`."""
    append_end: bool = True
    """Put the end-of-text token after each document."""
    prepend_begin: bool = False
    """Put the begin token before each document; a tokenizer without one, such as GPT-2's, has its end-of-text token stand for it."""
    use: list[UsedTokens] = source([])
    """Existing tokens to train on instead of making some: prefixes, folders or files, or {path: PREFIX, weight: 3} to blend several.
    What names no splits is split by `corpus.split`, its documents as they stand."""
    kind: Literal["store", "features"] = "store"
    """store: token ids of documents; features: besides, rows of one length in Parquet, as jax-lm-training makes them."""
    features: FeaturesConfig = FeaturesConfig()
    """How `tokens.kind=features` cuts rows."""

    @field_validator("use", mode="before")
    @classmethod
    def _as_used(cls, value: Any) -> Any:
        return (
            [{"path": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value
        )

    @model_validator(mode="after")
    def _begun_once(self) -> TokensConfig:
        if self.prepend_begin and self.kind == "features":
            raise TextmillError(
                "tokens.prepend_begin: the rows of tokens.kind=features begin with a special token already; take it out"
            )
        return self
