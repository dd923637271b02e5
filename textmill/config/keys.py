"""All keys of the config, and what to write instead of a key that does not exist."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

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
