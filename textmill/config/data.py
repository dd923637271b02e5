"""Sections for the corpus, and for where data work runs."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from textmill.config.presets import (
    COUNTRIES,
    LANGUAGES,
    NONE,
    PRESETS,
    PresetName,
    RuleName,
    fill_from_preset,
    omit_preset_values,
)
from textmill.config.section import Section, changeable, path, source
from textmill.errors import TextmillError

ChatShape = Literal["auto", "messages", "sharegpt", "alpaca", "pairs"]


class CorpusConfig(Section):
    """Text in, clean documents out."""

    folder: str | None = path()
    """Where the prepared corpus stands; `corpus` under `folder` if not said."""
    sources: list[str] = source([])
    """Files, globs, folders or URLs of text, JSON, CSV, Parquet or Wikipedia, hf:NAME, mongo:db_config.json, or a corpus by its name."""
    corpora_file: str | None = path()
    """A file of named corpora (name: {sources: [...], text_key: ...}); `corpora.yaml` beside the config if there is one."""
    text_key: str = "text"
    """The field or column of the text; `a.b` and `document[].paragraph[].form` reach nested JSON, `title+body` joins fields."""
    join_with: str | None = None
    """Put between joined fields (a newline if not said); said, it also joins all that a path finds in an element of its first list."""
    keep_fields: list[str] = []
    """Further fields of a record to keep, in the column `meta`."""
    chat: ChatShape | None = None
    """Records are conversations: messages (role, content), sharegpt (from, value), alpaca (instruction, input, output), pairs (a question
    and an answer, such as the columns Q and A); auto: whichever it is. `corpus.text_key` names the list, or QUESTION+ANSWER, if need be."""
    documents: Literal["section", "file", "line", "block"] = "section"
    """What a document of a plain text file is: about `corpus.section_chars` characters, the whole file, a line, or a blank-line block."""
    section_chars: int = Field(4000, ge=100)
    """About how many characters a section has; it is cut at a blank line, else at a line's end."""
    preset: PresetName = changeable("none")  # what comes out is decided by the settings that it fills
    """A named set of cleaning rules and limits for web, books, chat or encyclopaedia; what is said beside it stands above it."""
    rules: list[RuleName] = NONE["rules"]
    """Cleaning rules: NFC form; every line end to LF; control characters out; trailing spaces and long blank runs out; more in the docs."""
    newline_markers: list[str] = NONE["newline_markers"]
    """What the rule `markers` takes for a line end."""
    min_chars: int = Field(1, ge=1)
    """Documents shorter than this after cleaning are dropped."""
    max_chars: int = Field(0, ge=0)
    """Documents longer than this are dropped; 0: none is too long."""
    min_words: int = Field(0, ge=0)
    """Documents of fewer words are dropped; in Chinese and Japanese each character is a word."""
    max_words: int = Field(0, ge=0)
    """Documents of more words are dropped; 0: none has too many."""
    max_symbols: float = Field(1.0, ge=0, le=1)
    """The largest share of punctuation and symbols among the characters that are not white space."""
    max_digits: float = Field(1.0, ge=0, le=1)
    """The largest share of digits among the characters that are not white space."""
    max_repeated_lines: float = Field(1.0, ge=0, le=1)
    """The largest share of characters in lines that stand earlier in the document."""
    max_repeated_words: float = Field(1.0, ge=0, le=1)
    """The largest share of characters in runs of ten words that stand earlier in the document."""
    languages: list[str] = NONE["languages"]
    """Keep documents in these languages only, such as `[ko, en]`; none named: any language."""
    language_score: float = Field(0.0, ge=0, le=1)
    """How sure the language must be, from 0 to 1."""
    block_domains: list[str] = NONE["block_domains"]
    """Drop web pages of these sites: `example.com` with what is below it, or `example` under any ending."""
    block_extensions: list[str] = NONE["block_extensions"]
    """Drop web pages whose address ends so, such as `.pdf`."""
    sentences: Literal["none", "split", "lines"] = "none"
    """split: a sentence a line; lines: the text has a sentence a line already, and blank lines go."""
    dedup: Literal["exact", "near", "none"] = "exact"
    """Drop documents whose normalised text was seen before; near: also those that are much like another."""
    dedup_threshold: float = Field(0.8, ge=0.1, le=1)
    """near: two documents are copies when so large a share of their shingles (Jaccard similarity) is in both."""
    dedup_shingles: Literal["characters", "words"] = "characters"
    """near: what is counted: runs of `corpus.dedup_shingle_size` characters, for any script, or of words between spaces."""
    dedup_shingle_size: int = Field(5, ge=1, le=64)
    """near: characters, or words, in a shingle."""
    dedup_memory: int = changeable(512, ge=1)
    """MB that a process may take to sort hashes or hold shingles; changes nothing in the result."""
    split: list[float] = [90, 5, 5]
    """Shares of train, valid and test, such as `90,5,5` or `949,50,1`; a hash of the document decides its side."""
    source_splits: dict[str, Literal["train", "valid", "test"]] = {}
    """Sources that stand on one side as a whole: a file, folder or pattern as in `corpus.sources`, and train, valid or test."""
    max_unreadable: float = changeable(0.1, ge=0, le=1)
    """The share of unreadable records above which `prepare` stops and shows the first of them."""
    mongo_write_back: bool = changeable(False)
    """Put cleaned text into `filt_text` of the MongoDB documents that it came from, and nothing into that of dropped ones."""
    mongo_load: str | None = changeable(None)
    """Load the kept documents of all sources into this MongoDB collection, one of those that `corpus.mongo_config` names."""
    mongo_config: str | None = path()
    """The db_config.json of `corpus.mongo_load`."""
    mongo_field: str = changeable("filt_text")
    """The field that `corpus.mongo_load` puts the text into."""

    @model_validator(mode="after")
    def _turns_stay_whole(self) -> CorpusConfig:
        if self.chat and (self.sentences != "none" or self.mongo_write_back or self.mongo_load):
            key = (
                "sentences"
                if self.sentences != "none"
                else "mongo_write_back"
                if self.mongo_write_back
                else "mongo_load"
            )
            raise TextmillError(
                f"corpus.{key}: is for plain text, and corpus.chat={self.chat} reads conversations; take one out"
            )
        return self

    @model_validator(mode="after")
    def _mongo(self) -> CorpusConfig:
        if bool(self.mongo_load) != bool(self.mongo_config):
            said, other = ("mongo_load", "mongo_config") if self.mongo_load else ("mongo_config", "mongo_load")
            raise TextmillError(
                f"corpus.{said}: needs corpus.{other} beside it; name the collection and the db_config.json, or neither"
            )
        if (
            self.mongo_field in ("_id", "idx", "split", "source", "place", "meta", "")
            or not self.mongo_field.isidentifier()
        ):
            raise TextmillError(
                f"corpus.mongo_field: found {self.mongo_field!r}; give a name of letters that is not taken, such as form"
            )
        if self.mongo_write_back and self.text_key == "filt_text":
            raise TextmillError(
                "corpus.mongo_write_back: would write over corpus.text_key=filt_text; read another field, such as form"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        return fill_from_preset(data, PRESETS)

    @model_serializer(mode="wrap")
    def _leave_to_preset(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # What the preset says is not written beside it, where it would stand above the next preset.
        return omit_preset_values(write(self), PRESETS[self.preset])

    @field_validator("newline_markers", "block_domains", "block_extensions")
    @classmethod
    def _words(cls, value: list[str], info: ValidationInfo) -> list[str]:
        if not all(map(str.strip, value)):
            raise TextmillError(
                f"corpus.{info.field_name}: found {value}; an entry has at least one sign that is not white space"
            )
        return value if info.field_name == "newline_markers" else [word.strip().lower() for word in value]

    @field_validator("languages")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        for code in value:
            if code not in LANGUAGES:
                near = (
                    [COUNTRIES[code]]
                    if code in COUNTRIES
                    else difflib.get_close_matches(code, sorted(LANGUAGES), n=1, cutoff=0.5)
                )
                advice = f"did you mean '{near[0]}'?" if near else "give codes such as en, ko, tr, zh"
                raise TextmillError(f"corpus.languages: no language '{code}'; {advice}")
        return value

    @field_validator("split", mode="before")
    @classmethod
    def _shares(cls, value: Any) -> Any:
        if isinstance(value, str):
            parts = value.replace("/", ",").split(",")
            try:
                value = [float(part) for part in parts]
            except ValueError:
                raise TextmillError(
                    f"corpus.split: {value!r} is not a list of shares; say corpus.split=90,5,5"
                ) from None
        return value

    @field_validator("source_splits", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        if isinstance(value, str):
            parts = [part.rpartition(":") for part in value.strip("{} ").split(",") if part.strip()]
            if not all(colon for _, colon, _ in parts):
                raise TextmillError(
                    f"corpus.source_splits: {value!r} is no list of sources and sides; say corpus.source_splits=held-out.jsonl:test,dev.jsonl:valid"
                )
            value = {source.strip(): side.strip() for source, _, side in parts}
        return value

    @field_validator("split", mode="after")
    @classmethod
    def _three(cls, value: list[float]) -> list[float]:
        if (
            not 1 <= len(value) <= 3
            or min(value) < 0
            or not 0 < value[0] < float("inf")
            or not sum(value) < float("inf")
        ):
            raise TextmillError(
                f"corpus.split: found {value}; give one to three shares, train's above 0, such as 90,5,5"
            )
        return value + [0.0] * (3 - len(value))


class LocalRunner(Section):
    """Where data work runs: this machine's processes."""

    kind: Literal["local"] = changeable("local")
    """local: a pool of processes on this machine."""
    workers: int | Literal["auto"] = changeable("auto")
    """Processes at a time; auto: one a core."""

    @field_validator("workers")
    @classmethod
    def _some(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise TextmillError(f"runner.workers: found {value}; give 1 or more, or auto")
        return value


class BeamRunner(Section):
    """Where data work runs: Apache Beam, on this machine or on any engine that Beam drives."""

    kind: Literal["beam"] = changeable("beam")
    """beam: a pipeline of Apache Beam (the extra `beam`)."""
    options: list[str] = changeable([])
    """Beam's own options, such as `--runner=FlinkRunner`; none: its direct runner, on this machine."""
    shared_folder: str | None = path()
    """A folder that every worker reaches, for the results on their way back; a temporary one of this machine if not said."""


RunnerConfig = LocalRunner | BeamRunner
