"""WHERE: a YAML file, a folder that textmill made, a Hugging Face model folder or a recipe's name, opened as a config."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textmill.config import STAGE_FOLDERS, RunConfig, StageName
from textmill.config.load import Tree, anchor, config_of, lay_over, read_yaml
from textmill.errors import TextmillError
from textmill.files import read_json
from textmill.stages import MANIFEST

PROJECT = "textmill.yaml"
PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Where:
    """An opened WHERE."""

    config: RunConfig
    step: int | None = None
    """Set when one checkpoint was named."""


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
    near = difflib.get_close_matches(where, [*recipe_names(), *os.listdir(path.parent if path.parent.is_dir() else ".")], n=1)
    advice = f"did you mean '{near[0]}'?" if near else f"name a YAML file, a folder, or one of the recipes {', '.join(recipe_names())}"
    raise TextmillError(f"{where}: no such file or folder; {advice}")


def _from_file(path: Path, settings: list[str]) -> Where:
    if path.suffix not in (".yaml", ".yml"):
        raise TextmillError(f"{path}: found a '{path.suffix}' file; WHERE is a YAML file or a folder (text goes into corpus.sources)")
    tree, lines = read_yaml(path)
    tree = anchor(tree, path.resolve().parent)
    # A recipe leaves its results where the user stands; a project's file stands in its own folder.
    tree.setdefault("folder", str(path.resolve().parent if path.name == PROJECT else Path("runs", path.stem)))
    return Where(_resolved(config_of(lay_over(tree, settings), file=path, lines=lines)))


def _from_folder(folder: Path, settings: list[str]) -> Where:
    if (folder / PROJECT).is_file():
        return _from_file(folder / PROJECT, settings)
    found = [folder, *(folder / name for name in reversed(STAGE_FOLDERS.values()))]
    made = next((place for place in found if (place / "run.yaml").is_file()), None)
    if made is not None:
        return _from_made(folder, made, settings)
    if (folder / "config.json").is_file():
        # A bare model: no run of ours, so nothing below the user's own folder may be taken for its checkpoints.
        tree: Tree = {"model": {"init_from": str(folder)}, "train": {"folder": str(folder)}}
        return Where(_resolved(config_of(lay_over(tree, settings))))
    raise TextmillError(f"{folder}: not made by textmill and not a model; it has no {PROJECT}, run.yaml or config.json")


def _from_made(folder: Path, made: Path, settings: list[str]) -> Where:
    """A folder of ours is where it is, wherever it was made: its own place stands above the recorded one."""
    tree, lines = read_yaml(made / "run.yaml")
    step = re.match(r"^step-(\d+)$", made.resolve().name)
    if step:
        made = made.resolve().parent
    stage = _stage_of(made)
    moved: dict[str, Any] = {}
    if made.resolve().name == STAGE_FOLDERS[stage] and not (tree.get(stage) or {}).get("folder"):
        moved["folder"] = str(made.resolve().parent)
    else:
        moved[stage] = {**(tree.get(stage) or {}), "folder": str(made.resolve())}
    config = config_of(lay_over({**tree, **moved}, settings), file=folder / "run.yaml", lines=lines)
    return Where(_resolved(config), int(step[1]) if step else None)


def _stage_of(made: Path) -> StageName:
    if not (made / MANIFEST).is_file():
        return "train"
    stages: dict[str, StageName] = {"prepare": "corpus", "fit-tokenizer": "tokenizer", "tokenize": "tokens"}
    return stages[read_json(made / MANIFEST)["verb"]]


def _resolved(config: RunConfig) -> RunConfig:
    """The config with absolute paths, so that what it is written beside can be opened from anywhere."""
    return config_of(anchor(config.model_dump(mode="json"), Path.cwd()))
