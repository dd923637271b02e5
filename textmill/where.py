"""Opens WHERE (a YAML file, a folder that textmill wrote, a model folder or the name of a recipe) as a config.

`open_where` finds out what WHERE is; a function for each kind then reads its settings as a tree (nested dicts).
`_config_of` merges the settings of the command line into the tree and builds the RunConfig.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textmill.checkpoints.adapters import is_adapter
from textmill.config import STAGE_FOLDERS, RunConfig, StageName
from textmill.config.keys import all_fields
from textmill.config.load import (
    Tree,
    build_config,
    drop_replaced,
    merge_trees,
    parse_settings,
    read_yaml,
    resolve_paths,
)
from textmill.config.own_files import OWN_SUFFIX, is_own_file
from textmill.config.section import field_markers
from textmill.config.usage import own_task_file
from textmill.errors import TextmillError
from textmill.storage.files import read_json
from textmill.storage.remote_folders import fetch, is_url
from textmill.storage.stages import MANIFEST, PROJECT_YAML, RUN_YAML

MODEL_FILES = (".gguf", ".pt", ".onnx", ".bin")
"""Endings of model files that `textmill import` reads."""
PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Where:
    """An opened WHERE."""

    config: RunConfig
    step: int | None = None
    """The step, if WHERE is one checkpoint of a run."""
    bare_model: bool = False
    """Whether WHERE is a model folder without a run."""


def recipes_folder() -> Path:
    """The recipes that come with textmill: inside the package when installed, next to it in a source tree."""
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def recipe_names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


Settings = Sequence[str] | Mapping[str, Any]
"""Settings that override those of WHERE: ["train.steps=9"], or in Python {"train.steps": 9}."""


def open_config(where: RunConfig | str | Path, settings: Settings = ()) -> RunConfig:
    """The config that a function of Python gets: a config, or WHERE as on the command line."""
    if isinstance(where, RunConfig):
        if settings:
            raise TextmillError("settings: override those of a WHERE, found a RunConfig, which is complete already")
        return where
    return open_where(str(where), settings).config


def open_where(where: str, settings: Settings) -> Where:
    """The config of WHERE; `settings` override its values."""
    if is_url(where):
        return _from_copy(fetch(where), where, settings)
    path = Path(where)
    if path.is_file():
        return _from_file(path, settings)
    if path.is_dir():
        return _from_project(path, settings)
    if where in recipe_names():
        return _from_file(recipes_folder() / f"{where}.yaml", settings)
    files = os.listdir(path.parent if path.parent.is_dir() else ".")
    near = difflib.get_close_matches(where, [*recipe_names(), *files], n=1)
    advice = f"name a YAML file, a folder, or one of the recipes {', '.join(recipe_names())}"
    if near:
        advice = f"did you mean '{near[0]}'?"
    raise TextmillError(f"{where}: no such file or folder; {advice}")


def _from_file(path: Path, settings: Settings) -> Where:
    if path.suffix not in (".yaml", ".yml"):
        advice = _advise_import(path) if path.suffix in MODEL_FILES else "text goes into corpus.sources"
        raise TextmillError(f"{path}: found a '{path.suffix}' file; WHERE is a YAML file or a folder; {advice}")
    tree, lines = read_yaml(path)
    # A project writes next to its textmill.yaml, any other file below the current folder.
    root = path.resolve().parent if path.name == PROJECT_YAML else Path.cwd() / "runs" / path.stem
    tree = {"folder": str(root), **resolve_paths(tree, path.resolve().parent)}
    return Where(_config_of(tree, settings, path, lines))


def _config_of(
    tree: Tree, settings: Settings, file: Path | None = None, lines: dict[str, int] | None = None
) -> RunConfig:
    """The config of a tree that was read from `file`, in which `settings` override values.

    Paths in a file are relative to the file, those in settings to the current folder.
    """
    overrides = resolve_paths(parse_settings(settings), Path.cwd())
    _refuse_recorded_code(overrides, tree, file)
    if file is not None and file.name == RUN_YAML:
        tree = _without_recorded_parts(tree)
    has_numbers = isinstance(_model_value(overrides, "shape"), dict)
    if has_numbers and isinstance(_model_value(tree, "shape"), str):
        raise TextmillError(
            f"model.shape: is a path in {file}, so single numbers cannot override it; set model.shape=PATH, or edit "
            "the file"
        )
    merged = merge_trees(drop_replaced(tree, overrides), overrides)
    return build_config(merged, file=file, lines=lines, overrides=overrides)


def _refuse_recorded_code(overrides: Tree, tree: Tree, file: Path | None) -> None:
    """A family's file is code: a run.yaml that names one must not make textmill run it; the user has to."""
    override = overrides.get("model")
    if file is None or file.name != RUN_YAML or (isinstance(override, dict) and "family" in override):
        return
    family = _model_value(tree, "family")
    if isinstance(family, str) and is_own_file(family):
        raise TextmillError(
            f"{file}: was written with the model family in {family}; a file of code runs only if you name it: "
            f"add model.family={family}"
        )


def _without_recorded_parts(tree: Tree) -> Tree:
    """The tree of a run.yaml without files of code, which it must not make textmill run: the user has to name them
    again to prepare, train or evaluate with them, and everything else works without them."""
    tree = dict(tree)
    for key, field in all_fields():
        section, _, name = key.partition(".")
        markers = field_markers(field)
        settings = tree.get(section)
        if section == "model" or not isinstance(settings, dict) or name not in settings:
            continue
        value = settings[name]
        if markers.get("suffix") == OWN_SUFFIX and isinstance(value, str) and is_own_file(value):
            tree[section] = {other: settings[other] for other in settings if other != name}
        elif markers.get("task_files") and isinstance(value, list):
            kept = [task for task in value if own_task_file(str(task)) is None]
            others = {other: settings[other] for other in settings if other != name}
            tree[section] = {**others, name: kept} if kept else others
    return tree


def _model_value(tree: Tree, key: str) -> Any:
    """The value of `model.KEY` in a tree; None if it is not set."""
    model = tree.get("model")
    return model.get(key) if isinstance(model, dict) else None


def _from_copy(copy: Path, url: str, settings: Settings) -> Where:
    """The config of a model that was copied from a URL; a YAML file there is not the user's own, and may name code."""
    if copy.is_file():
        raise TextmillError(f"{url}: is a file; name the URL of a run, a checkpoint or a model folder")
    return _from_folder(copy, settings)


def _from_project(folder: Path, settings: Settings) -> Where:
    project = folder / PROJECT_YAML
    return _from_file(project, settings) if project.is_file() else _from_folder(folder, settings)


def _from_folder(folder: Path, settings: Settings) -> Where:
    folder = folder.resolve()
    if (folder / "progress.json").is_file():
        return _from_checkpoint(folder, settings)
    candidates = [folder, *(folder / name for name in reversed(STAGE_FOLDERS.values()))]
    stage = next((place for place in candidates if (place / RUN_YAML).is_file()), None)
    if stage is not None:
        return Where(_config_of(_recorded_tree(stage), settings, stage / RUN_YAML))
    if (folder / "config.json").is_file() or is_adapter(folder):
        return Where(_config_of(_as_model(folder), settings), bare_model=True)
    if (folder / MANIFEST).is_file() or any(folder.glob("*.gguf")):
        raise TextmillError(f"{folder}: has files for another tool; {_advise_import(folder)}")
    raise TextmillError(
        f"{folder}: not written by textmill and not a model: it has no {PROJECT_YAML}, run.yaml or config.json; "
        f"to train on texts there: textmill new DIR --text {shlex.quote(str(folder))}"
    )


def _advise_import(path: Path) -> str:
    return f"to use the model here: textmill import {shlex.quote(str(path))} OUT, then name OUT"


def _from_checkpoint(folder: Path, settings: Settings) -> Where:
    """A checkpoint inside its run is one step of the run; one that was copied elsewhere is a bare model."""
    step = re.match(r"^step-(\d+)$", folder.name)
    if step and (folder.parent / RUN_YAML).is_file():
        return Where(
            _config_of(_recorded_tree(folder.parent, folder / RUN_YAML), settings, folder / RUN_YAML), int(step[1])
        )
    tree = _without_recorded_parts(read_yaml(folder / RUN_YAML)[0])
    tree.pop("model", None)
    return Where(_config_of(merge_trees(tree, _as_model(folder)), settings), bare_model=True)


def _as_model(folder: Path) -> Tree:
    # There is no run: nothing inside the user's own folder may be taken for its checkpoints.
    return {"model": {"init_from": str(folder)}, "train": {"folder": str(folder)}}


def _recorded_tree(folder: Path, file: Path | None = None) -> Tree:
    """The config recorded in a stage's folder; where the folder is now overrides where it was written."""
    tree = read_yaml(file or folder / RUN_YAML)[0]
    stage = _stage_of(folder)
    if stage != "train":
        tree.pop("model", None)  # no command uses it there
    if folder.name == STAGE_FOLDERS[stage] and not (tree.get(stage) or {}).get("folder"):
        return {**tree, "folder": str(folder.parent)}
    return merge_trees(tree, {stage: {"folder": str(folder)}})


def _stage_of(folder: Path) -> StageName:
    if not (folder / MANIFEST).is_file():
        return "train"
    stages: dict[str, StageName] = {"prepare": "corpus", "fit-tokenizer": "tokenizer", "tokenize": "tokens"}
    command = read_json(folder / MANIFEST).get("verb")
    if command not in stages:
        raise TextmillError(
            f"{folder / MANIFEST}: names the command {command!r}, which writes no stage; it is damaged, or not from "
            "textmill"
        )
    return stages[command]
