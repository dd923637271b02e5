"""What pydantic finds wrong with a config, as one line in the user's terms: key, what was found, what to do."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from textmill.config.keys import all_fields, kinds_of, section_types, suggest_key
from textmill.config.section import Section

SECTION_NAMES = {section.__name__ for _, field in all_fields() for section in section_types(field.annotation)}
"""pydantic puts the class name of a union's member into the location of a mistake; the user did not write it."""
BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def key_and_parents(key: str) -> list[str]:
    """'a.b.c' -> ['a.b.c', 'a.b', 'a']."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def first_mistake(error: ValidationError, tree: dict[str, Any]) -> tuple[str, str]:
    """The message and the key of the first mistake."""
    mistakes = error.errors(include_url=False)
    first = next((one for one in mistakes if one["type"] == "extra_forbidden"), mistakes[0])
    known = _known_fields(first["loc"])
    parts = _written_parts(first["loc"], known)
    key = next((name for name in key_and_parents(".".join(parts)) if name in known), ".".join(parts))
    if first["type"] == "extra_forbidden":
        key = ".".join(parts)
        return (_of_another_kind(key, tree) if key in known else f"{key}: no such key; {suggest_key(key)}"), key
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):  # its only input is the whole section
        kinds = [str(get_args(field.annotation)[0]) for name, field in all_fields() if name == f"{key}.kind"]
        return f"{key}.kind: found {tree[key].get('kind')!r}; choose one of {', '.join(kinds)}", f"{key}.kind"
    if key not in known:
        return f"{key}: {first['msg']}", key
    expected = _describe_expected(known[key].annotation, [one for one in mistakes if one["loc"] == first["loc"]])
    return f"{key}: found {first['input']!r}; {expected}", key


def _known_fields(location: tuple[int | str, ...]) -> dict[str, FieldInfo]:
    """Every key with its field; of a section that has kinds, the fields of the kind that the location names."""
    known = dict(all_fields())
    name = str(location[0]) if location else ""
    for section in kinds_of(name):
        if location[1:2] == (section.model_fields["kind"].default,):
            known |= dict(all_fields(section, f"{name}."))
    return known


def _written_parts(location: tuple[int | str, ...], known: dict[str, Any]) -> list[str]:
    """The parts of a location that the user wrote: not the class name of a union's member, not the kind that chose
    it."""
    parts: list[str] = []
    chosen = False
    for part in location:
        if not chosen and part not in SECTION_NAMES:
            parts.append(str(part))
        field = None if chosen else known.get(".".join(parts))
        chosen = field is not None and field.discriminator is not None
    return parts


def _of_another_kind(key: str, tree: dict[str, Any]) -> str:
    """The message for a key that only another kind of its section has."""
    name = key.partition(".")[0]
    sections = kinds_of(name)
    kind = tree[name].get("kind", sections[0].model_fields["kind"].default)
    fitting = next(section for section in sections if key in dict(all_fields(section, f"{name}.")))
    other = fitting.model_fields["kind"].default
    return f"{key}: {name}.kind={kind} has no such key; remove it, or set {name}.kind={other}"


def _describe_expected(annotation: Any, mistakes: list[Any]) -> str:
    for mistake in mistakes:
        if mistake["type"] in BOUNDS:
            bound, words = BOUNDS[mistake["type"]]
            return f"give a value {words} {mistake['ctx'][bound]}"
        if mistake["type"] == "string_pattern_mismatch":
            devices = mistake["ctx"]["pattern"].strip("^$()").replace(r"cuda(:\d+)?", "cuda|cuda:N")
            return f"choose one of {', '.join(devices.split('|'))}"
        if mistake["type"] in ("too_short", "too_long"):
            return f"give {mistake['ctx'].get('min_length', mistake['ctx'].get('max_length'))} values"
    return f"give {describe_type(annotation)}"


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
