"""Resume a run from its checkpoint, or decide that a new run starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from textmill import __version__
from textmill.checkpoints.adapters import open_adapter, read_base_and_adapter
from textmill.checkpoints.folders import (
    STEP_NAME,
    Checkpoint,
    StepChoice,
    find_checkpoint,
    list_checkpoints,
    open_model,
)
from textmill.config import LoraConfig, RunConfig, TrainConfig
from textmill.config.load import merge_trees, read_recorded_config
from textmill.config.renamed import rename_settings
from textmill.config.training import UNITS
from textmill.errors import TextmillError
from textmill.models import Shape
from textmill.models.lora import normalized_targets, trained_with_adapters
from textmill.storage.stages import Force, list_changes
from textmill.storage.tensor_files import fingerprint_weights
from textmill.tokens.splits import Splits
from textmill.track import check_trackers
from textmill.training.changing import Ranges, add_range, change_dropout, check_changes, describe_changes
from textmill.training.new_run import start_new_run
from textmill.training.start import FAMILY_SHA256, Start, choose_shape, describe_inputs


def choose_start(config: RunConfig, data: Splits, force: Force, which: StepChoice, change: bool = False) -> Start:
    """Resume from the run's checkpoint or start a new run; reads only, `clean_run_folder` removes what is outdated.

    `change` resumes with other settings from the checkpoint on.
    """
    run = config.folder_of("train")
    check_trackers(config.track)
    found = find_checkpoint(run, which, to_resume=True) if force != "yes" else None
    if found is not None:
        before = found.progress["made_from"]
        # The given weights may be gone by now; the checkpoint has their shape and fingerprint.
        shape = choose_shape(config, data, found if config.model.init_from else None)
        fingerprint = _fingerprint_given(config.model.init_from, before["model.init_from"])
        after = describe_inputs(config, data, shape, fingerprint)
        changes = list_changes(_with_plain_targets(before, shape), after)
        if not changes:
            return _resume(config, data, found)
        if change:
            check_changes(changes)
            return _change(_resume(config, data, found), after, add_range(found, before, after, data))
        if force == "no" and any(line.startswith(FAMILY_SHA256) for line in changes):
            raise TextmillError(
                f"{config.model.family}: the file has changed since {run} was trained with it; put the old file back, "
                "choose another train.folder, or start the run from scratch with --force"
            )
        if force == "no":
            raise TextmillError(
                f"{run} was trained with other settings or inputs: {'; '.join(changes[:4])}; set them back, "
                f"use the new ones from step {found.step:,} on with textmill train --change, "
                "choose another train.folder, or start the run from scratch with --force"
            )
    return start_new_run(config, data)


def _change(start: Start, made_from: dict[str, Any], ranges: Ranges) -> Start:
    """A start whose last step range begins now."""
    lines = describe_changes(ranges)[start.step]
    known = {line.partition(" ")[0] for line in start.new_changes}
    added = [line for line in lines if line.partition(" ")[0] not in known]
    changes = start.changes + [{"step": start.step, "change": line} for line in added]
    new_changes = start.new_changes + added
    return replace(
        start,
        shape=change_dropout(start.shape, made_from),
        made_from=made_from,
        ranges=ranges,
        changes=changes,
        new_changes=new_changes,
        changed_now=True,
    )


def _with_plain_targets(before: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Recorded inputs whose LoRA targets, as older runs listed them, are written as today's."""
    lora = before.get("model.lora")
    if not lora:
        return before
    return {**before, "model.lora": {**lora, "targets": normalized_targets(shape, LoraConfig(targets=lora["targets"]))}}


def _resume(config: RunConfig, data: Splits, found: Checkpoint) -> Start:
    progress = found.progress
    before = {**read_recorded_config(found.folder / "run.yaml"), "textmill": progress["textmill"]}
    after = {**config.model_dump(mode="json"), "textmill": __version__}
    changes = list_changes(*_flatten_both(before, after))
    updates = int(progress["updates"])
    start = Start(
        found.step,
        choose_shape(config, data, found),
        found.weights(),
        found.moments() if updates else [],
        updates,
        str(found.folder),
        rename_settings(progress["made_from"]),
        progress["changes"] + [{"step": found.step, "change": line} for line in changes],
        changes,
        loss_scale=progress.get("scaling", {}),
        spikes=progress.get("spikes", {}),
        run_length=progress.get("run_length", {}),
        best=progress.get("best", {}),
        ranges=progress.get("ranges", []),
    )
    if config.model.lora is None:
        return start
    adapter = open_adapter(found.folder)
    trained = {weight.name for weight in trained_with_adapters(start.shape, config.model.lora)}
    return replace(
        start,
        weights=read_base_and_adapter(adapter),
        base=adapter.base_name,
        changed_weights=[one for one in adapter.full_weights.items() if one[0] not in trained],
    )


def _flatten_both(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings before and after, flat; the run's length only in the unit that sets it, not as unused steps."""
    flat = [_flatten(before), _flatten(after)]
    lengths = [{name: one.pop(f"train.{name}", None) for name in UNITS} for one in flat]
    units = [next((name for name in UNITS[1:] if one[name] is not None), "steps") for one in lengths]
    for one, length, unit in zip(flat, lengths, units, strict=True):
        if units[0] == units[1]:
            one[f"train.{unit}"] = length[unit]
        else:
            one["the length of the run"] = f"train.{unit}={length[unit]}"
    return flat


def _flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """The settings whose change in mid-run is recorded, flat: 'train.steps' -> value."""
    sections = {
        "train": merge_trees(TrainConfig().model_dump(mode="json"), tree.get("train") or {}),
        "engine": tree.get("engine") or {},
    }
    return {
        "textmill": tree["textmill"],
        **{f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()},
    }


def _fingerprint_given(init_from: str | None, before: str | None) -> str | None:
    """The fingerprint of the given weights; if they are gone, the one recorded in the checkpoint.

    A run that was given may have another best checkpoint by now: any of its checkpoints may be the given one.
    """
    if init_from is None:
        return None
    try:
        folder = open_model(init_from).folder
        found = fingerprint_weights(folder)
    except TextmillError:
        if before is None:
            raise
        return before
    others = list_checkpoints(folder.parent).values() if found != before and STEP_NAME.match(folder.name) else ()
    return before if any(fingerprint_weights(other) == before for other in others) else found
