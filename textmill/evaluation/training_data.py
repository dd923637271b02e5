"""Whether the corpus that a model was trained on was checked for the evaluation data: a line of the protocol card."""

from __future__ import annotations

from typing import Any

from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.evaluation.task import Scorer
from textmill.storage.files import read_json
from textmill.storage.stages import MANIFEST

UNKNOWN = "unknown: there is no corpus next to the model"
REBUILT = "unknown: corpus or tokens were made again after training"


def describe_training_data(scorer: Scorer, config: RunConfig, card: dict[str, Any]) -> dict[str, str]:
    """What the card says about the training data; nothing for a task that reads no file."""
    if "sha256" not in card:
        return {}
    run = config.folder_of("train")
    is_own = scorer.checkpoint.folder.parent.resolve() == run.resolve() and not config.tokens.use
    progress = scorer.checkpoint.progress
    return {"training_data": describe_corpus(config, card["sha256"], progress) if is_own else UNKNOWN}


def describe_corpus(config: RunConfig, sha256: str, progress: dict[str, Any]) -> str:
    """Whether the corpus was checked for a file, if it is the one of a checkpoint's `progress`."""
    folder = config.folder_of("corpus")
    tokens = config.folder_of("tokens") / MANIFEST
    try:
        made = read_json(tokens) if tokens.is_file() else {}
        trained_on = progress["made_from"]["tokens"] == made["fingerprint"] and made["made_from"]["corpus"]
        manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
        checked = {one["sha256"]: one["file"] for one in manifest["made_from"].get("corpus.decontaminate", [])}
        account = read_json(folder / "account.json").get("contamination", {}) if sha256 in checked else {}
    except (TextmillError, KeyError, TypeError, AttributeError):
        return UNKNOWN
    if trained_on != manifest.get("fingerprint"):
        return REBUILT
    if sha256 not in checked:
        return "not checked for this file: corpus.decontaminate does not name it"
    found = account.get(checked[sha256], {})
    action = "marked" if manifest["made_from"].get("corpus.decontaminate_action") == "mark" else "dropped"
    count = found.get("documents", 0)
    return f"checked for this file: {count:,} {'document' if count == 1 else 'documents'} {action}"
