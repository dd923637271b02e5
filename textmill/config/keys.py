"""All keys of the config: their list, their help, and what to write instead of a key that does not exist."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from textmill.config import RunConfig, Section
from textmill.config.other_names import describe_target, target_of

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
    same_leaf = [name for name in keys if name.rpartition(".")[2] == leaf]
    inside = [name for name in keys if name.startswith(key.partition(".")[0] + ".")]
    typing_error = difflib.get_close_matches(key, inside, n=1, cutoff=0.92)  # likelier than a wrong section
    if not typing_error and (target := target_of(leaf)) and not set(same_leaf) & set(inside):
        return describe_target(target)
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


def short_help(keys: Sequence[str]) -> str:
    """These settings in a line or two each: the default, then the values to choose from or the first sentence."""
    lines = []
    for key in keys:
        fields = [field for name, field in all_fields() if name == key]
        choices = [str(value) for field in fields for value in get_args(field.annotation)]
        if get_origin(fields[0].annotation) is Literal:
            meaning = f"one of {', '.join(dict.fromkeys(choices))}"
        else:
            meaning = re.split(r"(?<!\.)[.;] ", " ".join((fields[0].description or "").split()))[0].removesuffix(".")
        start = f"  {key}={_format_default(fields[0].get_default(call_default_factory=True))}"
        lines += textwrap.wrap(f"{start:<37} {meaning}", 118, subsequent_indent=" " * 38, drop_whitespace=True)
    return "\n".join(lines)


def section_help(name: str) -> str:
    """The keys of one section, sub-sections last; keys that several kinds of it share are listed under the first
    kind."""
    root = RunConfig.model_fields[name]
    if not section_types(root.annotation):
        return "\n".join(_key_lines(name, root)) + "\n"
    lines: list[str] = []
    listed: set[tuple[str, str | None]] = set()
    for number, section in enumerate(section_types(root.annotation)):
        kind = f" with {name}.kind={section.model_fields['kind'].default}" if number else ""
        lines += [*([""] if number else []), f"{name}{kind}: {section.__doc__}"]
        lines += _section_lines(section, f"{name}.", listed)
    return "\n".join(lines) + "\n"


def keys_help(keys: Sequence[str]) -> str:
    """These keys of several sections, each described once."""
    fields = dict(reversed(list(all_fields())))  # of several kinds of a section, the first describes it
    return "\n".join(line for key in keys for line in _key_lines(key, fields[key])) + "\n"


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
