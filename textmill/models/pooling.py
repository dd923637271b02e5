"""How a model folder makes one vector of a text: the files of sentence-transformers, if it has them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from textmill.errors import TextmillError, warn
from textmill.storage.files import read_json

MODULES = "modules.json"
SETTINGS = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
KINDS = ("mean", "cls")
OLD_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of older pooling files, one for each kind."""


@dataclass(frozen=True)
class Pooling:
    """From the hidden states of a text to its embedding."""

    kind: str = "mean"
    """mean: the mean over all tokens; cls: the first token's."""
    normalize: bool = False
    """Whether the embedding is divided by its length."""
    longest: int | None = None
    """The longest text in tokens; a longer one is truncated."""
    prompts: dict[str, Any] = field(default_factory=dict)
    """What the model's publisher says about prompts and similarities; textmill only keeps it."""


def read_pooling(folder: Path, kind: str | None = None) -> Pooling:
    """What the files of sentence-transformers say; without them, the mean. What textmill cannot compute is an error.

    A given `kind` overrides theirs."""
    if not (folder / MODULES).is_file():
        return Pooling(kind or "mean")
    modules = read_json(folder / MODULES)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise TextmillError(f"{folder / MODULES}: is not a list of modules; save the model again")
    own = "mean"
    normalize = False
    for module in modules:
        name = str(module.get("type")).rpartition(".")[2]
        part = module.get("path")
        if name == "Pooling":
            own = kind or _read_kind(folder, part)
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise TextmillError(
                f"{folder / MODULES}: has the module {name}, which textmill does not compute; it knows Transformer, "
                "Pooling and Normalize"
            )
    return Pooling(kind or own, normalize, _read_longest(folder), _read_prompts(folder))


def _read_kind(folder: Path, part: Any) -> str:
    if not isinstance(part, str) or part == ".." or Path(part).name != part:
        raise TextmillError(f"{folder / MODULES}: the pooling's path is {part!r}; a folder inside this one is expected")
    path = folder / part / "config.json"
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise TextmillError(f"{path}: is not an object of settings; save the model again")
    given = settings.get("pooling_mode") or [kind for key, kind in OLD_KEYS.items() if settings.get(key)]
    found = given if isinstance(given, list) else [given]
    if len(found) != 1 or found[0] not in KINDS:
        raise TextmillError(
            f"{path}: pools by {', '.join(map(str, found)) or 'nothing'}; textmill knows {' and '.join(KINDS)}; set "
            "embed.pooling to one of them, if the model was trained for it"
        )
    return str(found[0])


def _read_longest(folder: Path) -> int | None:
    """Older folders have it in a file of their own, newer ones in the tokenizer's."""
    for name, key in ((SETTINGS, "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        settings = read_json(folder / name) if (folder / name).is_file() else {}
        longest = settings.get(key) if isinstance(settings, dict) else None
        if type(longest) is int and longest > 0:
            return longest
    return None


def _read_prompts(folder: Path) -> dict[str, Any]:
    found = read_json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
    if not isinstance(found, dict):
        raise TextmillError(f"{folder / PROMPTS}: is not an object of settings; save the model again")
    prompts = found.get("prompts")
    usual = prompts.get(found.get("default_prompt_name")) if isinstance(prompts, dict) else None
    if usual:
        warn(f"{folder}: sentence-transformers puts {usual!r} before every text; textmill does not, write it yourself")
    return found


def find_pooling(folder: Path) -> Pooling | None:
    """What the files of sentence-transformers say; None if there are none that textmill can compute."""
    try:
        return read_pooling(folder) if (folder / MODULES).is_file() else None
    except TextmillError as error:
        warn(f"{error}; how its embeddings are computed is not kept")
        return None


def pooling_files(pooling: Pooling, width: int) -> dict[str, str]:
    """The files with which sentence-transformers computes the same embeddings."""
    names = ["Transformer", "Pooling", *(["Normalize"] if pooling.normalize else [])]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{name}" if number else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for number, name in enumerate(names)
    ]
    kinds = {"word_embedding_dimension": width, **{key: kind == pooling.kind for key, kind in OLD_KEYS.items()}}
    trees: dict[str, Any] = {MODULES: modules, "1_Pooling/config.json": kinds}
    trees |= {SETTINGS: {"max_seq_length": pooling.longest}} if pooling.longest else {}
    trees |= {PROMPTS: pooling.prompts} if pooling.prompts else {}
    return {name: json.dumps(tree, indent=2) + "\n" for name, tree in trees.items()}
