"""From a YAML file and `section.key=value` arguments to a RunConfig, or to one line that says what is wrong.

`read_yaml` and `parse_settings` make trees (nested dicts), `resolve_paths` makes their paths absolute, `merge_trees`
joins them, and `build_config` checks the result.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from textmill.config import RunConfig
from textmill.config.deepspeed_json import AUTO, read_json_settings, read_user_config
from textmill.config.keys import all_fields, describe_type, kinds_of, section_types, suggest_key
from textmill.config.model import RESHAPABLE
from textmill.config.section import Section, field_markers
from textmill.config.training import UNITS
from textmill.config.usage import LM_EVAL, is_task_file, own_task_file, task_names
from textmill.config.yaml_text import YamlLoader
from textmill.errors import TextmillError

Tree = dict[str, Any]
ALTERNATIVES = {"train": UNITS, "sample": ("prompt", "prompts_file")}
"""Keys of a section of which only one is set."""


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
            # A project of `new` has max_epochs beside its minutes; a length in another unit replaces both.
            replaced = {*keys, *(["max_epochs"] if "minutes" in old.keys() - new.keys() else [])}
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


def parse_settings(settings: Sequence[str] | Mapping[str, Any]) -> Tree:
    """`section.key=value` arguments, or {"section.key": value} of Python, as a tree."""
    known = dict(all_fields())
    tree: Tree = {}
    given = settings.items() if isinstance(settings, Mapping) else map(_split_setting, settings)
    for key, text in given:
        if key not in known and not _is_free_key(key, known):
            raise TextmillError(f"{key}: no such key; {suggest_key(key)}")
        value: Any = text
        if not isinstance(settings, Mapping):
            value = _parse_setting(key, text, known)
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = merge_trees(tree, value)
    return tree


def _split_setting(argument: str) -> tuple[str, str]:
    key, sign, text = argument.partition("=")
    if not sign:
        raise TextmillError(f"'{argument}': not a setting; write section.key=value, such as train.steps=500")
    return key, text


def _parse_setting(key: str, text: str, known: dict[str, FieldInfo]) -> Any:
    if key not in known:
        return _parse_value(text, Any)
    if field_markers(known[key]).get("free_texts") and not text.startswith("["):
        return [text]
    try:
        return _parse_value(text, known[key].annotation)
    except TextmillError as error:
        raise TextmillError(f"{key}: {error}") from None


def _is_free_key(key: str, known: dict[str, FieldInfo]) -> bool:
    """Whether a key is inside one that takes any keys, such as model.shape.extra."""
    options = get_args(known[parent].annotation) if (parent := key.rpartition(".")[0]) in known else ()
    return any(get_origin(option) is dict for option in options)


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
        tree = _take_deepspeed_settings(tree)
        config = RunConfig.model_validate(tree)
    except TextmillError as error:
        message = str(error)
        key = str(error).partition(":")[0]
    else:
        return config
    in_file = itertools.takewhile(lambda name: not _is_set(overrides or {}, name), key_and_parents(key))
    line = next((lines[name] for name in in_file if name in lines), None)
    raise TextmillError(f"{file}:{line}: {message}" if file and line else message)


def _take_deepspeed_settings(tree: Tree) -> Tree:
    """The tree with settings that it lacks from the JSON of `engine.deepspeed_config`, if that is still there."""
    engine = tree.get("engine")
    path = engine.get("deepspeed_config") if isinstance(engine, dict) else None
    if not isinstance(path, str) or not os.path.isfile(path):
        return tree
    for key, value in read_json_settings(read_user_config(path)).values():
        section, _, name = key.partition(".")
        old = tree.get(section) or {}
        other_unit = key == "train.decay_steps" and "decay_samples" in old
        if not other_unit and isinstance(old, dict) and (not _is_set(old, name) or old.get(name) == AUTO):
            tree = merge_trees(tree, parse_settings({key: value}))
    return tree


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


CORPORA = Path(__file__).parents[1] / "corpora"
MARKERS = {"path", "source", "models", "task_files", "evaluation_files"}
"""The markers of fields that hold paths."""


def resolve_paths(tree: Tree, base: Path) -> Tree:
    """The tree with full paths, read relative to `base`; names of corpora and of the hub stay as they are."""
    resolved = deepcopy(tree)
    for key, field in all_fields():
        markers = field_markers(field)
        *sections, name = key.split(".")
        settings: Any = resolved
        for section in sections:
            settings = settings.get(section) if isinstance(settings, dict) else None
        if MARKERS & markers.keys() and isinstance(settings, dict) and name in settings:
            settings[name] = _resolve_value(base, settings[name], markers)
    return resolved


def _resolve_value(base: Path, value: Any, markers: dict[str, Any]) -> Any:
    """The value of a field with one of MARKERS; a value of a wrong type is left to the check of types."""
    if isinstance(value, list):
        if markers.get("task_files"):
            return [_resolve_task(base, item) for item in value]
        if markers.get("evaluation_files"):
            return [_resolve_evaluation(base, item) for item in value]
        if markers.get("models"):
            return [_resolve_existing(base, item) if isinstance(item, str) else item for item in value]
        return [_resolve_item(base, item) for item in value]
    if not isinstance(value, str) or markers.get("task_files") or markers.get("evaluation_files"):
        return value
    if not value.endswith(markers.get("suffix", "")):
        return value
    return under(base, value) if markers.get("path") else _resolve_existing(base, value)


def _resolve_existing(base: Path, value: str) -> str:
    """The full path of a value if it exists, else the value, which may be a name."""
    full = under(base, value)
    return full if os.path.exists(full) else value


def under(base: Path, value: str) -> str:
    """The full path of a value; ~ and $NAME are expanded, unless a file has exactly this name; a URL stays."""
    if "://" in value:
        return value
    if "$" in value and not os.path.exists(base / value):
        value = os.path.expandvars(value)
        if unset := re.search(r"\$(\w+|\{[^}]*\})", value):
            raise TextmillError(f"{value}: the environment variable {unset[0]} is not set; set it, or write the path")
    return os.path.normpath(base / os.path.expanduser(value))


def _resolve_task(base: Path, task: Any) -> Any:
    """An entry of `evaluate.tasks` with full paths: NAME:FILE, a YAML or Python file, or lm-eval:FOLDER/NAME."""
    if not isinstance(task, str):
        return task
    if (own := own_task_file(task)) is not None:
        file = task.removeprefix(own).removeprefix(":")
        return under(base, own) + (f":{under(base, file)}" if file else "")
    if is_task_file(task):
        return under(base, task)
    name, colon, file = task.partition(":")
    return f"{name}:{under(base, file)}" if colon and (name != LM_EVAL or "/" in file) else task


def _resolve_evaluation(base: Path, item: Any) -> Any:
    """An entry of `corpus.decontaminate` with a full path: as in `evaluate.tasks`, or a file."""
    is_task = isinstance(item, str) and (is_task_file(item) or item.partition(":")[0] in (*task_names(), LM_EVAL))
    return under(base, item) if isinstance(item, str) and not is_task else _resolve_task(base, item)


def _resolve_item(base: Path, item: Any) -> Any:
    """A source or existing tokens: a path, or a dict with one or several."""
    if isinstance(item, dict) and isinstance(paths := item.get("path"), str | list):
        return {**item, "path": _resolve_item(base, paths)}
    if isinstance(item, list):
        return [_resolve_item(base, one) for one in item]
    return _resolve_source(base, item) if isinstance(item, str) else item


def _resolve_source(base: Path, value: str) -> str:
    """A source's full path; a corpus by name, a URL and a hub name stay as they are."""
    if value.startswith("mongo:"):
        return "mongo:" + under(base, value.removeprefix("mongo:"))
    named = "://" in value or value.startswith("hf:") or (CORPORA / f"{value}.txt").is_file()
    return value if named else " ".join(under(base, path) for path in split_paths(value))


def split_paths(value: str) -> list[str]:
    """The paths of Megatron's list of TFRecord files, which blanks separate; any other value is one path."""
    words = value.split()
    return words if len(words) > 1 and all(re.search(r"\.tfrecords?$", word) for word in words) else [value]


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
