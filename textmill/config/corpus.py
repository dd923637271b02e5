"""The section for the corpus, and the named sets of cleaning settings (`corpus.preset`)."""

from __future__ import annotations

import codecs
import difflib
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from textmill.config.own_files import is_own_file
from textmill.config.section import Section, changeable, fill_from_preset, omit_preset_values, path, source
from textmill.errors import TextmillError

RuleName = Literal[
    "repair",
    "markers",
    "html",
    "newlines",
    "controls",
    "unicode",
    "compatibility",
    "invisibles",
    "punctuation",
    "width",
    "dsgpt2",
    "emails",
    "ips",
    "ibans",
    "cards",
    "identity",
    "phones",
    "url_lines",
    "boilerplate",
    "spaces",
]
PresetName = Literal["web", "books", "chat", "encyclopaedia", "none"]

BASIC: list[RuleName] = ["unicode", "newlines", "controls", "spaces"]

# Sites of images, films, sound, games, shops and forums, and files that are not pages: what web link lists hold
# besides prose.
_DOMAINS = (
    "500px amazon apple artstation bandcamp dailymotion deviantart discord discordapp dropbox ebay facebook fbcdn "
    "flickr gfycat giphy github google gyazo imageshack imgflip imgur instagram liveleak livememe memegenerator "
    "photobucket pinimg pinterest pixiv prntscr puu quickmeme redd reddit redditmedia reddituploads soundcloud "
    "spotify streamable strawpoll tinypic tumblr twimg twitch twitter vid vimeo vine vocaroo walmart wikimedia "
    "xkcd youtu youtube ytimg"
).split()
_EXTENSIONS = (
    ".3gp .7z .aac .ai .apk .avi .bin .bmp .bz2 .css .csv .dmg .doc .docx .eps .exe .flac .flv .gif .gz .gzip .ico "
    ".iso .jar .jpeg .jpg .js .json .log .m4a .m4v .mid .mkv .mov .mp3 .mp4 .mpeg .mpg .odt .ogg .pdf .png .ppt .pptx "
    ".psd .py .rar .rss .rtf .sql .svg .swf .tar .tgz .tif .tiff .torrent .ttf .txt .wav .webm .webp .wmv .xls .xlsx "
    ".xml .xz .zip"
).split()

PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    # Megatron's recipe for OpenWebText: repaired, English, at least 128 words, no blocked sites; and nothing that is
    # not prose.
    "web": {
        "rules": ["repair", "html", *BASIC, "invisibles", "url_lines", "boilerplate"],
        "min_words": 128,
        "languages": ["en"],
        "max_symbols": 0.3,
        "max_digits": 0.3,
        "max_repeated_lines": 0.3,
        "max_repeated_words": 0.3,
        "block_urls": [*_DOMAINS, *_EXTENSIONS],
        "dedup": "near",
    },
    "books": {
        "rules": ["repair", *BASIC, "invisibles"],
        "min_words": 20,
        "max_symbols": 0.3,
        "max_digits": 0.3,
        "max_repeated_words": 0.5,
        "dedup": "near",
    },
    "chat": {"rules": ["repair", *BASIC, "invisibles", "emails", "phones"], "min_chars": 2, "max_symbols": 0.8},
    "encyclopaedia": {
        "rules": ["repair", "html", *BASIC, "invisibles"],
        "min_words": 20,
        "max_symbols": 0.4,
        "max_digits": 0.4,
        "max_repeated_lines": 0.3,
        "max_repeated_words": 0.5,
        "dedup": "near",
    },
}
PRESET_KEYS = {key for preset in PRESETS.values() for key in preset}

ChatShape = Literal["auto", "messages", "sharegpt", "alpaca", "pairs"]
LabelTask = Literal["sequence-classification", "token-classification", "question-answering"]

CHAT_EXCLUDES = ("sentences", "cut_records")
"""Settings of plain text that `corpus.chat` refuses."""
LABELS_EXCLUDE = ("chat", "filter", "keep_fields", "decontaminate", "preset", "quality_good", *CHAT_EXCLUDES)
"""Settings of plain text that `corpus.labels` refuses."""
DELIMITER_NAMES = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "space": " "}


class NamedSource(Section):
    """Sources with a name, such as all files of one kind of text."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """Its name in the account, in `show` and beside its valid loss."""
    path: list[str] = Field(min_length=1)
    """A file, glob, folder or URL as in `corpus.sources`, or several."""
    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Its fraction of the samples that are trained on, relative to the weights of the others; without weights a source
    counts by its tokens."""
    text_key: str | None = None
    """The field with the text; default: `corpus.text_key`."""
    sample: float = Field(1.0, gt=0, le=1)
    """Read only this fraction of its bytes, from random places; of a compressed file its beginning."""
    limit: int | None = Field(None, ge=1)
    """Read at most about so many bytes, likewise."""

    @property
    def is_sampled(self) -> bool:
        """Whether only a part of it is read."""
        return self.sample < 1 or self.limit is not None

    def share_of(self, size: int) -> float:
        """The fraction to read of files that have `size` bytes."""
        return self.sample if self.limit is None else min(self.sample, self.limit / max(1, size))

    @field_validator("path", mode="before")
    @classmethod
    def _parse_path(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class CorpusConfig(Section):
    """The corpus: where text comes from, cleaning, deduplication, splits."""

    folder: str | None = path()
    """Folder of the prepared corpus; default: `corpus` under `folder`."""
    sources: list[str | NamedSource] = source([])
    """Files, globs, folders or URLs of text, JSON, CSV, Parquet or Wikipedia, hf:NAME, mongo:db_config.json, a bundled
    corpus, or {name: NEWS, path: news/*.jsonl, weight: 3} to name and blend several."""
    download: bool = False
    """Download the pages of `.urls` files, which have a web address per line; without it such a source is refused."""
    text_key: str = "text"
    """The field or column with the text; `a.b` and `document[].paragraph[].form` reach nested JSON,
    `title+body` joins fields."""
    join_with: str | None = None
    """Text put between joined fields; default: a newline. When set, it also joins all that a path finds in one element
    of its first list."""
    encoding: str = "auto"
    """The encoding of the files that are not UTF-8, such as cp949 or cp1252; auto: UTF-16 or UTF-32 where a sample
    shows it."""
    delimiter: str = "auto"
    """What separates the columns of CSV files, such as `;` or tab; auto: detected from a sample of each file."""
    quoting: Literal["auto", "double", "none"] = "auto"
    """Quotes in CSV files: double (double quotes may enclose a field), none (a quote is a character like any other);
    auto: detected from a sample."""
    header: bool | Literal["auto"] = "auto"
    """Whether the first row of CSV files names the columns; without a header they are column1, column2, ...;
    auto: detected from a sample."""
    keep_fields: list[str] = []
    """More fields of a record to keep, in the column `meta`."""
    chat: ChatShape | None = None
    """Records are conversations: messages (role, content), sharegpt (from, value), alpaca (instruction, input, output),
    pairs (a question and an answer, such as the columns Q and A); auto: find out which. `corpus.text_key` may name
    the list, or QUESTION+ANSWER."""
    labels: LabelTask | None = None
    """Records are examples with labels, to finetune BERT. sequence-classification: `corpus.text_key` names a text, or
    FIRST+SECOND; token-classification: CoNLL files, or lists `words` and `labels`; question-answering: SQuAD's JSON.
    Nothing is cleaned or deduplicated."""
    label_key: str | None = None
    """The field or column with the label, or the list of labels; default: label (or labels, tags, ner_tags)."""
    documents: Literal["section", "file", "line", "block"] = "section"
    """What one document of a plain text file is: a section of about `corpus.section_chars` characters, the full file,
    a line, or a block between blank lines."""
    section_chars: int = Field(4000, ge=100)
    """Approximate characters in a section; it is cut at a blank line, else at the end of a line."""
    cut_records: bool = False
    """Cut the texts of JSON, CSV and other records into sections too; without it a record is one document."""
    preset: PresetName = changeable("none")  # the settings that it fills decide the result, not its name
    """A named set of cleaning rules and limits for web, books, chat or encyclopaedia. Explicit settings override the
    preset."""
    rules: list[RuleName] = BASIC
    """Cleaning rules. The default ones: unicode (NFC form), newlines (every line end becomes LF), controls (no control
    characters), spaces (no trailing spaces, no long runs of blank lines); docs/corpus.md has all."""
    min_chars: int = Field(1, ge=1)
    """Documents shorter than this after cleaning are dropped."""
    min_words: int = Field(0, ge=0)
    """Documents with fewer words are dropped; in Chinese and Japanese each character counts as a word."""
    max_symbols: float = Field(1.0, ge=0, le=1)
    """Largest fraction of punctuation and symbols among the characters that are not white space."""
    max_digits: float = Field(1.0, ge=0, le=1)
    """Largest fraction of digits among the characters that are not white space."""
    max_repeated_lines: float = Field(1.0, ge=0, le=1)
    """Largest fraction of characters in lines that already occurred in the document."""
    max_repeated_words: float = Field(1.0, ge=0, le=1)
    """Largest fraction of characters in runs of ten words that already occurred in the document."""
    languages: list[str] = []
    """Keep only documents in these languages, such as `[ko, en]`; default: any language."""
    block_urls: list[str] = []
    """Drop web pages of these sites: `example.com` and its subdomains, `example` with any top-level domain; and those
    whose address ends so: `.pdf`."""
    quality_good: list[str] = source([])
    """Sources of good samples, as in `corpus.sources`: with `corpus.quality_bad`, a filter is trained on them, and its
    precision on held-out samples is printed."""
    quality_bad: list[str] = source([])
    """Sources of bad samples."""
    filter: str | None = source(None, suffix=".py")
    """A Python file with a filter of your own, such as ./my_filter.py: its `keep(text, fields)` is False for a document
    to drop; `fields` are those of `corpus.keep_fields` (docs/own-parts.md). The file is executed, so only your own YAML
    or the command line may name it."""
    sentences: Literal["none", "split", "lines"] = "none"
    """split: put each sentence on its own line; lines: the text already has one sentence per line, drop blank lines."""
    dedup: Literal["exact", "near", "none"] = "exact"
    """exact: drop documents whose normalised text was seen before; near: also drop near-duplicates, the default of the
    presets web, books and encyclopaedia."""
    dedup_threshold: float = Field(0.8, ge=0.1, le=1)
    """near: documents at least this similar (Jaccard similarity of their shingles) are near-duplicates."""
    dedup_shingles: Literal["characters", "words"] = "characters"
    """near: what a shingle is: a run of five characters, for any script, or of five words between spaces."""
    keep_dropped: bool = False
    """Also write dropped documents to `dropped-*.parquet`, with the rule and, for a duplicate, the document it
    repeats."""
    decontaminate: list[str] = Field([], json_schema_extra={"evaluation_files": True})
    """Evaluation data that training must not have seen: TASK:FILE as in `evaluate.tasks`, or files of text. Documents
    that share 13 words in a row with it are dropped, as Megatron-LM does."""
    split: list[float] = [90, 5, 5]
    """Ratio of train, valid and test, such as `90,5,5` or `949,50,1`; `corpus.split_by` says how it is decided."""
    split_by: str = "document"
    """What is kept together. document: nothing, a hash of each document decides; file: all documents of a file, a hash
    of its name decides; source: those of a name of `corpus.sources`; field:NAME: those with the same value of a field,
    which `corpus.keep_fields` must name; position: the middle of a long text that is cut into sections is valid and
    test, with a gap on both sides."""
    source_splits: dict[str, Literal["train", "valid", "test"]] = {}
    """Sources that belong to one split entirely: a file, folder or pattern as in `corpus.sources`, and train, valid or
    test."""
    own_splits: bool = True
    """Keep the splits that the data has: those of datasets, and of files and folders named train, valid (validation,
    val, dev, eval) or test, if one is named train. false: pool them, and let `corpus.split` decide."""
    max_unreadable: float = changeable(0.1, ge=0, le=1)
    """Largest fraction of unreadable records, and of unreadable bytes; above it `prepare` stops and shows the first of
    them."""

    @property
    def paths(self) -> list[str]:
        """The files, globs, folders and URLs of all sources."""
        return [path for entry in self.sources for path in ([entry] if isinstance(entry, str) else entry.path)]

    @property
    def named_sources(self) -> dict[str, NamedSource]:
        """The sources that have a name."""
        return {entry.name: entry for entry in self.sources if not isinstance(entry, str)}

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each source by its name; empty without weights."""
        return {name: entry.weight for name, entry in self.named_sources.items() if entry.weight is not None}

    @model_validator(mode="after")
    def _check_sources(self) -> CorpusConfig:
        named = [entry for entry in self.sources if not isinstance(entry, str)]
        names = [entry.name for entry in named]
        if twice := [name for name in names if names.count(name) > 1]:
            raise TextmillError(f"corpus.sources: two entries have the name '{twice[0]}'; give all paths to one entry")
        if self.weights and len(self.weights) < len(self.sources):
            other = next(one for one in self.sources if isinstance(one, str) or one.weight is None)
            found = other if isinstance(other, str) else other.name
            raise TextmillError(
                f"corpus.sources: '{found}' has no weight, and others have; give each a name and a weight, or none"
            )
        if named and self.labels:
            raise TextmillError("corpus.sources: examples with labels have no named sources; write the paths alone")
        return self

    @model_validator(mode="after")
    def _check_chat(self) -> CorpusConfig:
        for name in CHAT_EXCLUDES if self.chat else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                other = f"corpus.chat={self.chat} reads conversations"
                raise TextmillError(f"corpus.{name}: is for plain text, and {other}; remove one of them")
        return self

    @model_validator(mode="after")
    def _check_quality(self) -> CorpusConfig:
        if bool(self.quality_good) != bool(self.quality_bad):
            given, other = ("good", "bad") if self.quality_good else ("bad", "good")
            raise TextmillError(f"corpus.quality_{given}: needs corpus.quality_{other} too; name samples of both kinds")
        return self

    @model_validator(mode="after")
    def _check_labels(self) -> CorpusConfig:
        for name in LABELS_EXCLUDE if self.labels else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise TextmillError(f"corpus.{name}: is not applied to examples with corpus.labels; remove it")
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        return fill_from_preset(data, PRESETS)

    @model_serializer(mode="wrap")
    def _omit_preset(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A written value that equals the preset, or the default beside it, would override the next preset.
        defaults = {key: type(self).model_fields[key].default for key in PRESET_KEYS}
        return omit_preset_values(write(self), {**defaults, **PRESETS[self.preset]})

    @field_validator("filter")
    @classmethod
    def _check_filter(cls, value: str | None) -> str | None:
        if value is not None and not is_own_file(value):
            raise TextmillError(
                f"corpus.filter: found '{value}'; name a Python file with keep(text, fields): ./mine.py"
            )
        return value

    @field_validator("encoding")
    @classmethod
    def _check_encoding(cls, value: str) -> str:
        try:
            return value if value == "auto" else codecs.lookup(value).name
        except LookupError:
            raise TextmillError(
                f"corpus.encoding: no encoding '{value}'; give auto, utf-8, utf-16, cp949, shift_jis, gb18030, "
                "cp1252 ..."
            ) from None

    @field_validator("delimiter")
    @classmethod
    def _check_delimiter(cls, value: str) -> str:
        value = DELIMITER_NAMES.get(value, value)
        if value != "auto" and (len(value) != 1 or value in '"\r\n'):
            raise TextmillError(
                f"corpus.delimiter: found {value!r}; give one character, or tab, comma, semicolon, space or auto"
            )
        return value

    @field_validator("block_urls")
    @classmethod
    def _check_block_urls(cls, value: list[str]) -> list[str]:
        if not all(map(str.strip, value)):
            raise TextmillError(
                f"corpus.block_urls: found {value}; an entry needs at least one character that is not white space"
            )
        return [word.strip().lower() for word in value]

    @field_validator("languages")
    @classmethod
    def _check_languages(cls, value: list[str]) -> list[str]:
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

    @model_validator(mode="after")
    def _check_split_by(self) -> CorpusConfig:
        kind, _, name = self.split_by.partition(":")
        if kind == "field" and name:
            if name not in self.keep_fields:
                raise TextmillError(f"corpus.split_by: the field '{name}' is not read; add it to corpus.keep_fields")
        elif self.split_by not in ("document", "file", "source", "position"):
            raise TextmillError(
                f"corpus.split_by: found '{self.split_by}'; give document, file, source, position or field:NAME"
            )
        if self.split_by == "source" and not self.named_sources:
            raise TextmillError("corpus.split_by: source needs entries of corpus.sources with names; add them")
        if self.labels and self.split_by != "document":
            raise TextmillError("corpus.split_by: examples with labels are split by document; remove it")
        return self

    @field_validator("split", mode="before")
    @classmethod
    def _parse_split(cls, value: Any) -> Any:
        if isinstance(value, str):
            parts = value.replace("/", ",").split(",")
            try:
                value = [float(part) for part in parts]
            except ValueError:
                raise TextmillError(
                    f"corpus.split: {value!r} is not a list of numbers; write corpus.split=90,5,5"
                ) from None
        return value

    @field_validator("source_splits", mode="before")
    @classmethod
    def _parse_source_splits(cls, value: Any) -> Any:
        if isinstance(value, str):
            parts = [part.rpartition(":") for part in value.strip("{} ").split(",") if part.strip()]
            if not all(colon for _, colon, _ in parts):
                raise TextmillError(
                    f"corpus.source_splits: {value!r} is not a list of sources and splits; "
                    "write corpus.source_splits=held-out.jsonl:test,dev.jsonl:valid"
                )
            value = {name.strip(): split.strip() for name, _, split in parts}
        return value

    @field_validator("split", mode="after")
    @classmethod
    def _check_split(cls, value: list[float]) -> list[float]:
        if (
            not 1 <= len(value) <= 3
            or min(value) < 0
            or not 0 < value[0] < float("inf")
            or not sum(value) < float("inf")
        ):
            raise TextmillError(
                f"corpus.split: found {value}; give one to three numbers, train's above 0, such as 90,5,5"
            )
        return value + [0.0] * (3 - len(value))


LANGUAGES = frozenset(
    """
    af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy
    da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy
    ia id ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min
    mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm
    ro ru rue sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep
    vi vls vo wa war wuu xal xmf yi yo yue zh
    """.split()
)
"""Codes of the languages that the detector distinguishes."""
COUNTRIES = {
    "kr": "ko",
    "jp": "ja",
    "cn": "zh",
    "gb": "en",
    "us": "en",
    "dk": "da",
    "cz": "cs",
    "gr": "el",
    "in": "hi",
    "se": "sv",
}
"""Country codes that are mistaken for language codes, and the language meant."""
