"""WHERE: a YAML file, a folder that textmill made, a Hugging Face model folder or a recipe's name, opened as a config."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from textmill.checkpoints.adapters import is_adapter
from textmill.config import STAGE_FOLDERS, RunConfig, StageName
from textmill.config.load import (
    Tree,
    build_config,
    drop_run_length,
    merge_trees,
    parse_settings,
    read_recorded_config,
    read_user_config,
)
from textmill.config.paths import corpora_names, resolve_paths
from textmill.errors import TextmillError
from textmill.storage.files import read_json
from textmill.storage.stages import MANIFEST

PROJECT = "textmill.yaml"
PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Where:
    """An opened WHERE."""

    config: RunConfig
    step: int | None = None
    """Set when one checkpoint was named."""
    bare: bool = False
    """Set when it is a model without a run."""


def recipes_folder() -> Path:
    """The recipes that come with textmill: inside the package when installed, beside it in a source tree."""
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def recipe_names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def open_where(where: str, settings: list[str]) -> Where:
    """The config that WHERE stands for, with settings laid over it."""
    path = Path(where)
    if path.is_file():
        return _from_file(path, settings)
    if path.is_dir():
        return _from_folder(path, settings)
    if where in recipe_names():
        return _from_file(recipes_folder() / f"{where}.yaml", settings)
    near = difflib.get_close_matches(
        where, [*recipe_names(), *os.listdir(path.parent if path.parent.is_dir() else ".")], n=1
    )
    advice = (
        f"did you mean '{near[0]}'?"
        if near
        else f"name a YAML file, a folder, or one of the recipes {', '.join(recipe_names())}"
    )
    raise TextmillError(f"{where}: no such file or folder; {advice}")


def _from_file(path: Path, settings: list[str]) -> Where:
    if path.suffix not in (".yaml", ".yml"):
        raise TextmillError(
            f"{path}: found a '{path.suffix}' file; WHERE is a YAML file or a folder (text goes into corpus.sources)"
        )
    tree, lines = read_user_config(path)
    # A recipe leaves its results where the user stands; a project's file stands in its own folder.
    root = path.resolve().parent if path.name == PROJECT else Path.cwd() / "runs" / path.stem
    tree = {"folder": str(root), **resolve_paths(tree, path.resolve().parent)}
    return Where(_config_of(tree, settings, path, lines))


def _config_of(
    tree: Tree, settings: list[str], file: Path | None = None, lines: dict[str, int] | None = None
) -> RunConfig:
    """What stands in a file is relative to it, what is said on the command line to where the user stands."""
    said = resolve_paths(parse_settings(settings), Path.cwd(), corpora_names(tree, Path.cwd()))
    over, below = said.get("model"), tree.get("model")
    if (
        isinstance(over, dict)
        and isinstance(below, dict)
        and isinstance(over.get("shape"), dict)
        and isinstance(below.get("shape"), str)
    ):
        raise TextmillError(
            f"model.shape: is a path in {file}; numbers cannot be laid over it; say model.shape=PATH, or change the file"
        )
    return build_config(merge_trees(drop_run_length(tree, said), said), file=file, lines=lines)


def _from_folder(folder: Path, settings: list[str]) -> Where:
    if (folder / PROJECT).is_file():
        return _from_file(folder / PROJECT, settings)
    folder = folder.resolve()
    if (folder / "progress.json").is_file():
        return _from_checkpoint(folder, settings)
    found = [folder, *(folder / name for name in reversed(STAGE_FOLDERS.values()))]
    made = next((place for place in found if (place / "run.yaml").is_file()), None)
    if made is not None:
        return Where(_config_of(_moved(made), settings, made / "run.yaml"))
    if (folder / "config.json").is_file() or is_adapter(folder):
        return Where(_config_of(_as_model(folder), settings), bare=True)
    raise TextmillError(f"{folder}: not made by textmill and not a model; it has no {PROJECT}, run.yaml or config.json")


def _from_checkpoint(folder: Path, settings: list[str]) -> Where:
    """A checkpoint inside its run is a step of it; one that was copied elsewhere is a model by itself."""
    step = re.match(r"^step-(\d+)$", folder.name)
    if step and (folder.parent / "run.yaml").is_file():
        return Where(
            _config_of(_moved(folder.parent, folder / "run.yaml"), settings, folder / "run.yaml"), int(step[1])
        )
    tree = read_recorded_config(folder / "run.yaml")
    tree.pop("model", None)
    return Where(_config_of(merge_trees(tree, _as_model(folder)), settings), bare=True)


def _as_model(folder: Path) -> Tree:
    # No run of ours: nothing below the user's own folder may be taken for its checkpoints.
    return {"model": {"init_from": str(folder)}, "train": {"folder": str(folder)}}


def _moved(made: Path, file: Path | None = None) -> Tree:
    """A folder of ours is where it is, wherever it was made: its own place stands above the recorded one."""
    tree = read_recorded_config(file or made / "run.yaml")
    stage = _stage_of(made)
    if made.name == STAGE_FOLDERS[stage] and not (tree.get(stage) or {}).get("folder"):
        return {**tree, "folder": str(made.parent)}
    return merge_trees(tree, {stage: {"folder": str(made)}})


def _stage_of(made: Path) -> StageName:
    if not (made / MANIFEST).is_file():
        return "train"
    stages: dict[str, StageName] = {"prepare": "corpus", "fit-tokenizer": "tokenizer", "tokenize": "tokens"}
    verb = read_json(made / MANIFEST).get("verb")
    if verb not in stages:
        raise TextmillError(
            f"{made / MANIFEST}: names the verb {verb!r}, which makes no folder; it is not ours, or damaged"
        )
    return stages[verb]
