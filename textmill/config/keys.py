"""All keys of the config: their list, their help, and what to write instead of a key that does not exist."""

from __future__ import annotations

import difflib
import json
import textwrap
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from textmill.config import RunConfig, Section
from textmill.config.other_names import ADVICE, OTHER_NAMES

MIN_LIKENESS = 0.8
"""How much a key must be like another (difflib's ratio) to be taken for a typing error of it."""


def section_types(annotation: Any) -> list[type[Section]]:
    """The sections that an annotation admits."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType):
        return [section for part in get_args(annotation) for section in section_types(part)]
    return []


def kinds_of(name: str) -> list[type[Section]]:
    """The sections among which `NAME.kind` chooses; none for a section without kinds."""
    field = RunConfig.model_fields.get(name)
    return section_types(field.annotation) if field is not None and field.discriminator else []


def all_fields(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the config with its field: 'train.batch', FieldInfo."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        for inner in section_types(field.annotation):
            yield from all_fields(inner, f"{prefix}{name}.")


def suggest_key(key: str) -> str:
    """What to write instead of a key that does not exist."""
    keys = [name for name, field in all_fields() if not section_types(field.annotation) or name == "model.shape"]
    leaf = key.rpartition(".")[2].replace("-", "_")
    if leaf in OTHER_NAMES:
        return f"textmill calls it '{OTHER_NAMES[leaf]}'"
    if leaf in ADVICE:
        return ADVICE[leaf]
    same_leaf = [name for name in keys if name.rpartition(".")[2] == leaf]
    inside = [name for name in keys if name.startswith(key.partition(".")[0] + ".")]
    typing_error = difflib.get_close_matches(key, inside, n=1, cutoff=0.92)  # likelier than a wrong section
    near = typing_error or same_leaf or difflib.get_close_matches(key, keys, n=1, cutoff=MIN_LIKENESS)
    if not near:
        by_leaf = {name.rpartition(".")[2]: name for name in reversed(keys)}
        near = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=MIN_LIKENESS)]
    if near:
        return f"did you mean '{near[0]}'?"
    section = key.partition(".")[0]
    choices = list(dict.fromkeys(name.partition(".")[2] for name in inside)) or sorted(RunConfig.model_fields)
    return f"the keys of '{section}' are {', '.join(choices)}" if inside else f"the sections are {', '.join(choices)}"


def describe_type(annotation: Any) -> str:
    """A type in plain words: 'a whole number', 'one of a, b'."""
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if annotation in plain:
        return plain[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"keys such as {', '.join(list(annotation.model_fields)[:4])} below it"
    origin = getattr(annotation, "__origin__", None)
    options = get_args(annotation)
    if origin is list:
        return f"a list, each item {describe_type(options[0])}"
    if origin is dict:
        return "keys with values below it"
    if origin is Literal:
        return ("one of " if len(options) > 1 else "") + ", ".join(map(str, options))
    return " or ".join(dict.fromkeys(describe_type(option) for option in options if option is not type(None)))


_SAMPLING = (
    "sample.prompt",
    "sample.max_tokens",
    "sample.temperature",
    "sample.top_k",
    "sample.top_p",
    "sample.repetition_penalty",
    "sample.stop",
    "sample.seed",
)
MOST_USED: dict[str, tuple[str, ...]] = {
    "run": (
        "folder",
        "corpus.sources",
        "corpus.text_key",
        "tokenizer.vocab",
        "model.size",
        "train.preset",
        "train.length",
        "train.batch",
        "train.steps",
        "train.learning_rate",
    ),
    "prepare": (
        "corpus.sources",
        "corpus.text_key",
        "corpus.documents",
        "corpus.preset",
        "corpus.rules",
        "corpus.min_chars",
        "corpus.languages",
        "corpus.dedup",
        "corpus.split",
        "runner.workers",
    ),
    "fit-tokenizer": (
        "tokenizer.kind",
        "tokenizer.vocab",
        "tokenizer.use",
        "tokenizer.fit_on",
        "tokenizer.fit_sample",
        "tokenizer.special_tokens",
        "tokenizer.chat",
        "tokenizer.lowercase",
        "tokenizer.compare_with",
        "runner.workers",
    ),
    "tokenize": (
        "tokens.use",
        "tokens.append_end",
        "tokens.level",
        "tokens.kind",
        "tokens.features.max_length",
        "tokens.features.stride",
        "tokens.index_format",
        "tokenizer.vocab",
        "tokenizer.use",
        "runner.workers",
    ),
    "train": (
        "model.size",
        "model.init_from",
        "train.preset",
        "train.layout",
        "train.length",
        "train.batch",
        "train.steps",
        "train.learning_rate",
        "train.optimizer",
        "engine.micro_batch",
    ),
    "verify": (
        "engine.kind",
        "engine.mesh.replicate",
        "engine.mesh.shard",
        "engine.mesh.tensor",
        "engine.zero",
        "engine.precision",
        "engine.recompute",
        "engine.offload_optimizer",
        "engine.deepspeed_config",
        "engine.timeout",
    ),
    "evaluate": (
        "evaluate.tasks",
        "evaluate.text",
        "evaluate.split",
        "evaluate.window",
        "evaluate.stride",
        "evaluate.sample",
        "evaluate.batch",
        "evaluate.baselines",
        "engine.device",
        "engine.precision",
    ),
    "generate": (*_SAMPLING, "sample.count", "sample.prompts_file"),
    "chat": (*_SAMPLING[1:], "sample.min_p", "engine.device", "engine.precision"),
    "serve": (
        "serve.host",
        "serve.port",
        "serve.key_file",
        "serve.model_name",
        "serve.slots",
        "serve.queue",
        "serve.max_tokens",
        "serve.request_timeout",
        "sample.temperature",
        "engine.device",
    ),
}
"""The ten settings of each command that are used most, in the order of the work; a command with fewer has no row."""


def settings_help(command: str, sections: Sequence[str]) -> str:
    """All settings that a command reads: the most-used ones first, then the rest section by section."""
    first = MOST_USED.get(command, ())
    lines = [line for key in first for line in _most_used_lines(key)]
    rest = [section_help(name, without=first) for name in sections]
    return "\n".join([*(["Most used:", *lines, ""] if lines else []), *filter(None, rest)])


def _most_used_lines(key: str) -> list[str]:
    fields = _fields_of(key)
    if len(fields) == 1:
        return _key_lines(key, fields[0])
    kinds = ", ".join(str(field.default) for field in fields)
    return [f"  {key}={fields[0].default}   (one of {kinds})", *_wrap(" ".join(str(one.description) for one in fields))]


def _fields_of(key: str) -> list[FieldInfo]:
    """The field of a key: of a section with kinds, that of the first kind that has it, but of its `kind` those of
    all."""
    fields = [field for name, field in all_fields() if name == key]
    return fields if key.endswith(".kind") else fields[:1]


def section_help(name: str, without: Sequence[str] = ()) -> str:
    """The keys of one section, sub-sections last; keys that several kinds of it share are listed under the first
    kind."""
    root = RunConfig.model_fields[name]
    if not section_types(root.annotation):
        return "" if name in without else "\n".join(_key_lines(name, root)) + "\n"
    lines: list[str] = []
    listed = {(key, field.description) for key in without for field in _fields_of(key)}
    for number, section in enumerate(section_types(root.annotation)):
        kind = f" with {name}.kind={section.model_fields['kind'].default}" if number else ""
        lines += [*([""] if number else []), f"{name}{kind}: {section.__doc__}"]
        lines += _section_lines(section, f"{name}.", listed)
    return "\n".join(lines) + "\n"


def _section_lines(section: type[Section], prefix: str, listed: set[tuple[str, str | None]]) -> list[str]:
    lines = []
    below = []
    for name, field in section.model_fields.items():
        key = prefix + name
        inner = section_types(field.annotation)
        if inner:
            keys = [line for one in inner for line in _section_lines(one, f"{key}.", listed)]
            below += ["", *_wrap(f"{key}: {field.description}", ""), *keys] if keys else []
        elif (key, field.description) not in listed:
            lines += _key_lines(key, field)
            listed.add((key, field.description))
    return lines + below


def _key_lines(key: str, field: FieldInfo) -> list[str]:
    default = _format_default(field.get_default(call_default_factory=True))
    return [f"  {key}={default}   ({describe_type(field.annotation)})", *_wrap(field.description or "")]


def _wrap(text: str, indent: str = " " * 6) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 100, initial_indent=indent, subsequent_indent=indent)


def _format_default(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace('"', "")


def all_help() -> str:
    """Every section, for the docs."""
    return "\n".join(section_help(name) for name in RunConfig.model_fields)
