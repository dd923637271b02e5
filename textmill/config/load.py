"""From a YAML file and `section.key=value` arguments to a RunConfig, or to one line that says what is wrong."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from textmill.config import RunConfig
from textmill.config.keys import all_fields, kinds_of, section_types, suggest_key
from textmill.config.mistakes import describe_type, first_mistake, key_and_parents
from textmill.config.section import Section, field_markers
from textmill.config.training import UNITS
from textmill.config.yaml_text import YamlLoader
from textmill.errors import TextmillError

Tree = dict[str, Any]
LIMITS_OF_MINUTES = ("max_epochs",)
"""Settings that a plan has beside `train.minutes`; a length in another unit replaces these with the minutes."""
ALTERNATIVES = {"train": UNITS, "sample": ("prompt", "prompts_file")}
"""Keys of a section of which only one is set."""
RESHAPABLE = ("dropout", "positions")
"""Numbers of a shape that given weights may change."""


def read_yaml(path: Path) -> tuple[Tree, dict[str, int]]:
    """A YAML file as a tree, and the line of each key."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=YamlLoader)
        tree = yaml.load(text, Loader=YamlLoader)  # a SafeLoader with one more number format
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
            name = f"{prefix}{key.value}"
            line = key.start_mark.line + 1
            if name in lines:
                raise TextmillError(f"{path}:{line}: '{name}' is set twice (first on line {lines[name]}); keep one")
            lines[name] = line
            _note_lines(value, name + ".", lines, path)


def merge_trees(tree: Tree, overrides: Tree) -> Tree:
    """A tree whose values are overridden key by key: {"train": {"batch": 8, "seed": 1}} by {"train": {"batch": 16}} is
    {"train": {"batch": 16, "seed": 1}}. When a section's kind changes, only the keys that the new kind knows stay."""
    result = dict(tree)
    for name, new in overrides.items():
        old = result.get(name)
        if not isinstance(old, dict) or not isinstance(new, dict):
            result[name] = new
            continue
        if new.get("kind", old.get("kind")) != old.get("kind"):
            kinds = [kind for kind in kinds_of(name) if kind.model_fields["kind"].default == new["kind"]]
            old = _known_to(kinds[0], old) if kinds else old
        result[name] = merge_trees(old, new)
    return result


def drop_replaced(tree: Tree, overrides: Tree) -> Tree:
    """The tree without settings that `overrides` replaces by another key: the last of steps, epochs ... wins, the last
    prompt, and the shape of the weights of `model.init_from`.

    {"train": {"epochs": 2, "batch": 8}} and {"train": {"steps": 100}} -> {"train": {"batch": 8}}
    """
    for section, keys in ALTERNATIVES.items():
        old = tree.get(section)
        new = overrides.get(section)
        if isinstance(old, dict) and isinstance(new, dict) and set(keys) & new.keys():
            replaced = {*keys}
            if "minutes" in old.keys() - new.keys():
                replaced |= {*LIMITS_OF_MINUTES}
            tree = {**tree, section: {name: value for name, value in old.items() if name not in replaced}}
    model = tree.get("model")
    new_model = overrides.get("model")
    if isinstance(model, dict) and isinstance(new_model, dict) and new_model.get("init_from"):
        shape: Any = model.get("shape")
        kept = {key: shape[key] for key in RESHAPABLE if key in shape} if isinstance(shape, dict) else {}
        tree = {**tree, "model": {**model, "shape": kept}}
    return tree


def _known_to(section: type[Section], tree: Tree) -> Tree:
    """The keys of a tree that a section has."""
    kept: Tree = {}
    for name in tree.keys() & section.model_fields.keys():
        inner = section_types(section.model_fields[name].annotation)
        kept[name] = _known_to(inner[0], tree[name]) if inner and isinstance(tree[name], dict) else tree[name]
    return kept


def parse_settings(arguments: list[str]) -> Tree:
    """`section.key=value` arguments as a tree."""
    known = dict(all_fields())
    tree: Tree = {}
    for argument in arguments:
        key, sign, text = argument.partition("=")
        if not sign:
            raise TextmillError(f"'{argument}': not a setting; write section.key=value, such as train.steps=500")
        if key not in known:
            raise TextmillError(f"{key}: no such key; {suggest_key(key)}")
        free = field_markers(known[key]).get("free_texts") and not text.startswith("[")
        try:
            value: Any = [text] if free else _parse_value(text, known[key].annotation)
        except TextmillError as error:
            raise TextmillError(f"{key}: {error}") from None
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = merge_trees(tree, value)
    return tree


def _parse_value(text: str, annotation: Any) -> Any:
    """A command-line value: plain text where the field takes text, a comma list where it takes a list, else YAML."""
    options = get_args(annotation) or (annotation,)
    origin = getattr(annotation, "__origin__", None)
    if origin is list and not text.startswith("["):
        return [_parse_value(item, options[0]) for item in text.split(",") if item]
    takes_text = str in options and origin is not list and not section_types(annotation)
    if takes_text and not (origin is dict and text.startswith("{")):
        return None if text in ("", "null") and type(None) in options else text
    if not text.strip() and type(None) not in options:
        raise TextmillError(f"found nothing after '='; give {describe_type(annotation)}")
    try:
        return yaml.load(text, Loader=YamlLoader)  # a SafeLoader with one more number format
    except yaml.YAMLError:
        return text


def build_config(
    tree: Tree, *, file: Path | None = None, lines: dict[str, int] | None = None, overrides: Tree | None = None
) -> RunConfig:
    """The checked config; a mistake becomes one line with its key, what to do and, if it is in the file, its place.

    `overrides` are the settings of the command line, which are in the tree too: the file is not blamed for them.
    """
    lines = lines or {}
    try:
        _refuse_infinite_numbers(tree, "")
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        message, key = first_mistake(error, tree)
    except TextmillError as error:
        message = str(error)
        key = str(error).partition(":")[0]
    else:
        return config
    in_file = itertools.takewhile(lambda name: not _is_set(overrides or {}, name), key_and_parents(key))
    line = next((lines[name] for name in in_file if name in lines), None)
    raise TextmillError(f"{file}:{line}: {message}" if file and line else message)


def _is_set(tree: Any, key: str) -> bool:
    """Whether a tree has a value for a key or for a part of it."""
    for part in key.split("."):
        if not isinstance(tree, dict):
            return True
        if part not in tree:
            return False
        tree = tree[part]
    return True


def _refuse_infinite_numbers(tree: Any, prefix: str) -> None:
    if isinstance(tree, dict):
        for name, value in tree.items():
            _refuse_infinite_numbers(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, float) and not math.isfinite(tree):
        raise TextmillError(f"{prefix}: {tree} is not usable; give a finite number")
