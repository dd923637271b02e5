"""From a YAML file and `section.key=value` words to a RunConfig, or to one line that says what is wrong."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from textmill.config import RunConfig
from textmill.config.keys import fields, key_advice, section_types
from textmill.config.section import Section, marks
from textmill.config.training import UNITS
from textmill.errors import TextmillError

Tree = dict[str, Any]
CORPORA = Path(__file__).parents[1] / "corpora"
SECTION_NAMES = {section.__name__ for _, field in fields() for section in section_types(field.annotation)}
"""pydantic puts the name of a union's member into a mistake's place; no user wrote it."""
NAMED = "corpora.yaml"
"""Where named corpora are declared, if it stands beside a config."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers: 6e-4 is a number here too."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> tuple[Tree, dict[str, int]]:
    """A YAML file as a tree, and the line on which each key stands."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=_Loader)
        tree = yaml.load(text, Loader=_Loader)  # a SafeLoader with one more number format
    except (OSError, UnicodeDecodeError) as error:
        raise TextmillError(f"{path}: not readable ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise TextmillError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise TextmillError(
            f"{path}: found a {type(tree).__name__}; a config is 'section:' lines with 'key: value' below"
        )
    lines: dict[str, int] = {}
    _note_lines(node, "", lines, path)
    return tree, lines


def _note_lines(node: Any, prefix: str, lines: dict[str, int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name, line = f"{prefix}{key.value}", key.start_mark.line + 1
            if name in lines:
                raise TextmillError(
                    f"{path}:{line}: '{name}' stands there twice (first on line {lines[name]}); keep one"
                )
            lines[name] = line
            _note_lines(value, name + ".", lines, path)


def anchor(tree: Tree, base: Path, names: set[str] | None = None) -> Tree:
    """Paths are relative to the file, or the folder, in which they were said; names of corpora and of the hub are left alone."""
    anchored = {name: dict(value) if isinstance(value, dict) else value for name, value in tree.items()}
    in_file, names = names is None, (names or set()) | named_corpora(tree, base)
    for key, field in fields():
        mark, (section, _, leaf) = marks(field), key.partition(".")
        holder = anchored if not leaf else anchored.get(section)
        name = leaf or section
        if not (mark.get("place") or mark.get("source")) or not isinstance(holder, dict) or name not in holder:
            continue
        value = holder[name]
        if isinstance(value, str):
            full = _under(base, value)
            holder[name] = full if mark.get("place") or os.path.exists(full) else value
        elif isinstance(value, list):
            holder[name] = [_item_under(base, item, names) for item in value]
    corpus = anchored.setdefault("corpus", {})
    if in_file and isinstance(corpus, dict) and "corpora" not in corpus and (base / NAMED).is_file():
        corpus["corpora"] = str(base / NAMED)
    return anchored


def named_corpora(tree: Tree, base: Path) -> set[str]:
    """The names that a corpora.yaml declares: the one that is said, or the one that stands there."""
    corpus = tree.get("corpus")
    said = corpus.get("corpora") if isinstance(corpus, dict) else None
    path = Path(_under(base, said)) if isinstance(said, str) else base / NAMED
    return set(read_yaml(path)[0]) if path.is_file() else set()


def _under(base: Path, value: str) -> str:
    return os.path.normpath(base / os.path.expanduser(value))


def _item_under(base: Path, item: Any, names: set[str]) -> Any:
    if isinstance(item, dict) and isinstance(item.get("path"), str):
        return {**item, "path": _under(base, item["path"])}
    return _source_under(base, item, names) if isinstance(item, str) else item


def _source_under(base: Path, value: str, names: set[str]) -> str:
    """A source's path in full; a corpus by name, a URL and a hub name stay as they are."""
    if value.startswith("mongo:"):
        return "mongo:" + _under(base, value.removeprefix("mongo:"))
    named = "://" in value or value.startswith("hf:") or value in names or (CORPORA / f"{value}.txt").is_file()
    return value if named else _under(base, value)


def merged(tree: Tree, over: Tree) -> Tree:
    """One tree with another laid over it, key by key; under another kind of a section, only what that kind knows too."""
    result = dict(tree)
    for name, value in over.items():
        below = result.get(name)
        if (
            isinstance(below, dict)
            and isinstance(value, dict)
            and value.get("kind", below.get("kind")) != below.get("kind")
        ):
            kinds = [kind for kind in _kinds_of(name) if kind.model_fields["kind"].default == value["kind"]]
            below = _known_to(kinds[0], below) if kinds else below
        result[name] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def without_units(tree: Tree, said: Tree) -> Tree:
    """A tree whose run has no length, where one is laid over it: of steps and epochs what is said last holds."""
    train, over = tree.get("train"), said.get("train")
    if not isinstance(train, dict) or not isinstance(over, dict) or not set(UNITS) & over.keys():
        return tree
    return {**tree, "train": {name: value for name, value in train.items() if name not in UNITS}}


def _kinds_of(name: str) -> list[type[Section]]:
    """The sections among which a kind chooses."""
    field = RunConfig.model_fields.get(name)
    return section_types(field.annotation) if field is not None and field.discriminator else []


def _known_to(section: type[Section], tree: Tree) -> Tree:
    """What of a tree a section has a place for."""
    kept: Tree = {}
    for name in tree.keys() & section.model_fields.keys():
        inner = section_types(section.model_fields[name].annotation)
        kept[name] = _known_to(inner[0], tree[name]) if inner and isinstance(tree[name], dict) else tree[name]
    return kept


def tree_of(words: list[str]) -> Tree:
    """`section.key=value` words as a tree."""
    known = dict(fields())
    tree: Tree = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign:
            raise TextmillError(f"'{word}': not understood; a setting is section.key=value, such as train.steps=500")
        if key not in known:
            raise TextmillError(f"{key}: no such key; {key_advice(key)}")
        value: Any = (
            [text]
            if marks(known[key]).get("texts") and not text.startswith("[")
            else _value_of(text, known[key].annotation)
        )
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = merged(tree, value)
    return tree


def _value_of(text: str, annotation: Any) -> Any:
    """A command-line value: plain text where the field takes text, a comma list where it takes a list, else YAML."""
    options, origin = get_args(annotation) or (annotation,), getattr(annotation, "__origin__", None)
    if origin is list and not text.startswith("["):
        return [_value_of(item, options[0]) for item in text.split(",") if item]
    if (
        str in options
        and origin is not list
        and not (origin is dict and text.startswith("{"))
        and not section_types(annotation)
    ):
        return None if text in ("", "null") and type(None) in options else text
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader with one more number format
    except yaml.YAMLError:
        return text


def config_of(tree: Tree, *, file: Path | None = None, lines: dict[str, int] | None = None) -> RunConfig:
    """The checked config; every mistake becomes one line with its place, its field and the mend."""
    lines = lines or {}
    try:
        _refuse_strange_numbers(tree, "")
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        message, key = _first_mistake(error, tree)
    except TextmillError as error:
        message, key = str(error), str(error).partition(":")[0]
    else:
        return config
    line = next((lines[name] for name in _with_parents(key) if name in lines), None)
    raise TextmillError(f"{file}:{line}: {message}" if file and line else message)


def _refuse_strange_numbers(tree: Any, prefix: str) -> None:
    if isinstance(tree, dict):
        for name, value in tree.items():
            _refuse_strange_numbers(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, float) and not math.isfinite(tree):
        raise TextmillError(f"{prefix}: {tree} is not a number to work with; give a finite one")


def _with_parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _first_mistake(error: ValidationError, tree: Tree) -> tuple[str, str]:
    """The message and the key of the first thing wrong."""
    mistakes = error.errors(include_url=False)
    first = next((one for one in mistakes if one["type"] == "extra_forbidden"), mistakes[0])
    known = _known_at(first["loc"])
    words = _written(first["loc"], known)
    key = next((name for name in _with_parents(".".join(words)) if name in known), ".".join(words))
    if first["type"] == "extra_forbidden":
        key = ".".join(words)
        return (_other_kind(key, tree) if key in known else f"{key}: no such key; {key_advice(key)}"), key
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):  # its only input is the whole section
        kinds = [str(get_args(field.annotation)[0]) for name, field in fields() if name == f"{key}.kind"]
        return f"{key}.kind: found {tree[key].get('kind')!r}; choose one of {', '.join(kinds)}", f"{key}.kind"
    if key not in known:
        return f"{key}: {first['msg']}", key
    found = first["input"]
    wanted = _wanted(known[key].annotation, [one for one in mistakes if one["loc"] == first["loc"]])
    return f"{key}: found {found!r}; {wanted}", key


def _known_at(place: tuple[int | str, ...]) -> dict[str, FieldInfo]:
    """Every key with its field; of a section that has kinds, those of the kind that the place names."""
    known, name = dict(fields()), str(place[0]) if place else ""
    for section in _kinds_of(name):
        if place[1:2] == (section.model_fields["kind"].default,):
            known |= dict(fields(section, f"{name}."))
    return known


def _written(place: tuple[int | str, ...], known: dict[str, Any]) -> list[str]:
    """The words of a place that a user wrote: neither the name of a union's member nor the kind that chose it."""
    words: list[str] = []
    chosen = False
    for word in place:
        if not chosen and word not in SECTION_NAMES:
            words.append(str(word))
        field = None if chosen else known.get(".".join(words))
        chosen = field is not None and field.discriminator is not None
    return words


def _other_kind(key: str, tree: Tree) -> str:
    """What to say of a key that only another kind of its section has."""
    name = key.partition(".")[0]
    sections = _kinds_of(name)
    kind = tree[name].get("kind", sections[0].model_fields["kind"].default)
    wanted = (
        next(section for section in sections if key in dict(fields(section, f"{name}."))).model_fields["kind"].default
    )
    return f"{key}: {name}.kind={kind} has no such key; take it out, or set {name}.kind={wanted}"


def _wanted(annotation: Any, mistakes: list[Any]) -> str:
    bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    spoken = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    for mistake in mistakes:
        if (bound := bounds.get(mistake["type"])) is not None:
            return f"give a value {spoken[bound]} {mistake['ctx'][bound]}"
        if mistake["type"] == "string_pattern_mismatch":
            devices = mistake["ctx"]["pattern"].strip("^$()").replace(r"cuda(:\d+)?", "cuda|cuda:N")
            return f"choose one of {', '.join(devices.split('|'))}"
        if mistake["type"] in ("too_short", "too_long"):
            return f"give {mistake['ctx'].get('min_length', mistake['ctx'].get('max_length'))} values"
    return f"give {spoken_type(annotation)}"


def spoken_type(annotation: Any) -> str:
    """A type in a user's words."""
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if annotation in plain:
        return plain[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"keys such as {', '.join(list(annotation.model_fields)[:4])} below it"
    origin, options = getattr(annotation, "__origin__", None), get_args(annotation)
    if origin is list:
        return f"a list, each item {spoken_type(options[0])}"
    if origin is dict:
        return "keys with values below it"
    if origin is Literal:
        return ("one of " if len(options) > 1 else "") + ", ".join(map(str, options))
    return " or ".join(dict.fromkeys(spoken_type(option) for option in options if option is not type(None)))
