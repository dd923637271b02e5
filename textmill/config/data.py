"""Sections for the way from raw text to token ids."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from textmill.config.section import Section, how, place, source
from textmill.errors import TextmillError


class CorpusConfig(Section):
    """Text in, clean documents out."""

    folder: str | None = place()
    """Where the prepared corpus stands; `corpus` under `folder` if not said."""
    sources: list[str] = source([])
    """Files, globs or folders of .txt and .jsonl, or the name of a corpus that comes with textmill."""
    text_key: str = "text"
    """The field of a JSON line that holds the text."""
    documents: Literal["section", "file", "line", "block"] = "section"
    """What a document of a plain text file is: about `corpus.section` characters, the whole file, a line, or a blank-line block."""
    section: int = Field(4000, ge=100)
    """About how many characters a section has; it is cut at a blank line, else at a line's end."""
    rules: list[Literal["unicode", "newlines", "controls", "spaces"]] = ["unicode", "newlines", "controls", "spaces"]
    """Cleaning rules: NFC form; every line end to LF; control characters out; trailing spaces and long blank runs out."""
    min_chars: int = Field(1, ge=1)
    """Documents shorter than this after cleaning are dropped."""
    dedup: Literal["exact", "none"] = "exact"
    """Drop documents whose normalised text was seen before."""
    split: list[float] = [90, 5, 5]
    """Shares of train, valid and test, such as `90,5,5` or `949,50,1`; a hash of the document decides its side."""
    stop_at: float = how(0.1, ge=0, le=1)
    """The share of unreadable records above which `prepare` stops and shows the first of them."""

    @field_validator("split", mode="before")
    @classmethod
    def _shares(cls, value: Any) -> Any:
        if isinstance(value, str):
            parts = value.replace("/", ",").split(",")
            try:
                value = [float(part) for part in parts]
            except ValueError:
                raise TextmillError(f"corpus.split: {value!r} is not a list of shares; say corpus.split=90,5,5") from None
        return value

    @field_validator("split", mode="after")
    @classmethod
    def _three(cls, value: list[float]) -> list[float]:
        if not 1 <= len(value) <= 3 or min(value) < 0 or not 0 < value[0] < float("inf") or not sum(value) < float("inf"):
            raise TextmillError(f"corpus.split: found {value}; give one to three shares, train's above 0, such as 90,5,5")
        return value + [0.0] * (3 - len(value))


class TokenizerConfig(Section):
    """Vocabulary: fitted on the corpus, or taken as it is."""

    folder: str | None = place()
    """Where the tokenizer stands; `tokenizer` under `folder` if not said."""
    use: str | None = source()
    """An existing tokenizer to take instead of fitting one: a folder or file of tokenizer.json, or a folder with GPT-2's own two files."""
    kind: Literal["bpe"] = "bpe"
    """bpe: byte-level BPE as GPT-2 has it; any text can be encoded."""
    vocab: int = Field(32000, ge=260, le=2_000_000)
    """Size of the vocabulary, special tokens and the 256 bytes included."""
    min_frequency: int = Field(2, ge=1)
    """A pair seen less often than this is never merged."""
    special_tokens: list[str] = []
    """More special tokens, after the end-of-text token."""


class TokensConfig(Section):
    """Documents in, token ids out."""

    folder: str | None = place()
    """Where the token stores stand; `tokens` under `folder` if not said."""
    append_end: bool = True
    """Put the end-of-text token after each document."""


class LocalRunner(Section):
    """Where data work runs: this machine's processes."""

    kind: Literal["local"] = "local"
    """local: a pool of processes on this machine."""
    workers: int | Literal["auto"] = how("auto")
    """Processes at a time; auto: one a core."""

    @field_validator("workers")
    @classmethod
    def _some(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise TextmillError(f"runner.workers: found {value}; give 1 or more, or auto")
        return value
