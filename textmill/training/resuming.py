"""Resume a run from its checkpoint, or decide that a new run starts.

Two kinds of settings are compared with those of the checkpoint. Those that decide the result (`describe_inputs`) must
be equal, unless `--change` or `--force` is given. The others, such as intervals, the length of the run or the mesh, may
change; what changed is recorded in progress.json (`_list_recorded_changes`).
"""

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
from textmill.config.load import merge_trees, read_yaml
from textmill.config.training import UNITS
from textmill.errors import TextmillError
from textmill.models import Shape
from textmill.models.lora import normalized_targets, trained_with_adapters
from textmill.storage.stages import Force, list_changes
from textmill.storage.tensor_files import fingerprint_weights
from textmill.tokens.splits import Splits
from textmill.track import check_trackers
from textmill.training.changing import Ranges, add_range, can_change, change_dropout, check_changes, describe_changes
from textmill.training.new_run import start_new_run
from textmill.training.start import FAMILY_SHA256, Start, choose_shape, describe_inputs


def choose_start(config: RunConfig, data: Splits, force: Force, which: StepChoice, change: bool = False) -> Start:
    """Resume from the run's checkpoint or start a new run; only reads: `clean_run_folder` removes what is outdated.

    `change` resumes with other settings from the checkpoint on.
    """
    run = config.folder_of("train")
    check_trackers(config.track)
    checkpoint = find_checkpoint(run, which, to_resume=True) if force != "yes" else None
    if checkpoint is None:
        return start_new_run(config, data)
    before = checkpoint.progress["made_from"]
    # The weights of model.init_from may be gone by now; the checkpoint has their shape and fingerprint.
    shape = choose_shape(config, data, checkpoint if config.model.init_from else None)
    fingerprint = _fingerprint_init_from(config.model.init_from, before["model.init_from"])
    after = describe_inputs(config, data, shape, fingerprint)
    changes = list_changes(_with_normalized_targets(before, shape), after)
    if not changes:
        return _resume(config, data, checkpoint)
    if change:
        check_changes(changes)
        start = _resume(config, data, checkpoint)
        return _with_changed_settings(start, after, add_range(checkpoint, before, after, data))
    if force == "no":
        raise _changes_error(config, checkpoint, changes)
    return start_new_run(config, data)


def _changes_error(config: RunConfig, checkpoint: Checkpoint, changes: list[str]) -> TextmillError:
    run = config.folder_of("train")
    if any(line.startswith(FAMILY_SHA256) for line in changes):
        return TextmillError(
            f"{config.model.family}: the file has changed since {run} was trained with it; put the old file back, "
            "choose another train.folder, or start the run from scratch with --force"
        )
    use_them = f"use the new ones from step {checkpoint.step:,} on with textmill train WHERE --change, "
    return TextmillError(
        f"{run} was trained with other settings or inputs: {'; '.join(changes[:4])}; set them back, "
        f"{use_them if all(map(can_change, changes)) else ''}"
        "choose another train.folder, or start the run from scratch with --force"
    )


def _with_changed_settings(start: Start, made_from: dict[str, Any], ranges: Ranges) -> Start:
    """`--change`: the start with new settings; the last of its step ranges begins now."""
    already_listed = {_setting_of(line) for line in start.new_changes}
    lines = [line for line in describe_changes(ranges)[start.step] if _setting_of(line) not in already_listed]
    return replace(
        start,
        shape=change_dropout(start.shape, made_from),
        made_from=made_from,
        ranges=ranges,
        changes=start.changes + [{"step": start.step, "change": line} for line in lines],
        new_changes=start.new_changes + lines,
        changed_now=True,
    )


def _setting_of(line: str) -> str:
    """The setting that a line names: "train.batch was 8, is 16" -> "train.batch"."""
    return line.partition(" ")[0]


def _with_normalized_targets(before: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Recorded inputs whose LoRA targets, as older runs listed them, are written as today's."""
    lora = before.get("model.lora")
    if not lora:
        return before
    targets = normalized_targets(shape, LoraConfig(targets=lora["targets"]))
    return {**before, "model.lora": {**lora, "targets": targets}}


def _resume(config: RunConfig, data: Splits, checkpoint: Checkpoint) -> Start:
    """The start from a checkpoint, with its optimizer state and all that it stores of the run so far."""
    progress = checkpoint.progress
    changes = _list_recorded_changes(config, checkpoint)
    updates = int(progress["updates"])
    start = Start(
        step=checkpoint.step,
        shape=choose_shape(config, data, checkpoint),
        weights=checkpoint.weights(),
        moments=checkpoint.moments() if updates else [],
        updates=updates,
        source=str(checkpoint.folder),
        made_from=progress["made_from"],
        changes=progress["changes"] + [{"step": checkpoint.step, "change": line} for line in changes],
        new_changes=changes,
        loss_scale=progress.get("scaling", {}),
        spikes=progress.get("spikes", {}),
        run_length=progress.get("run_length", {}),
        best=progress.get("best", {}),
        ranges=progress.get("ranges", []),
    )
    if config.model.lora is None:
        return start
    adapter = open_adapter(checkpoint.folder)
    trained = {weight.name for weight in trained_with_adapters(start.shape, config.model.lora)}
    return replace(
        start,
        weights=read_base_and_adapter(adapter),
        base=adapter.base_name,
        changed_weights=[(name, values) for name, values in adapter.full_weights.items() if name not in trained],
    )


def _list_recorded_changes(config: RunConfig, checkpoint: Checkpoint) -> list[str]:
    """What changed since the checkpoint in the sections `train` and `engine` and in the version, a line each.

    The run's length is compared in the unit that sets it: steps are not listed if `train.epochs` sets it.
    """
    before = _flatten(read_yaml(checkpoint.folder / "run.yaml")[0], checkpoint.progress["textmill"])
    after = _flatten(config.model_dump(mode="json"), __version__)
    (old_unit, old_length), (new_unit, new_length) = _pop_length(before), _pop_length(after)
    if old_unit == new_unit:
        before[f"train.{old_unit}"], after[f"train.{new_unit}"] = old_length, new_length
    else:
        before["the length of the run"] = f"train.{old_unit}={old_length}"
        after["the length of the run"] = f"train.{new_unit}={new_length}"
    return list_changes(before, after)


def _flatten(config: dict[str, Any], version: str) -> dict[str, Any]:
    """The settings whose change in mid-run is recorded, flat: {"train": {"batch": 8}} -> {"train.batch": 8}."""
    train = merge_trees(TrainConfig().model_dump(mode="json"), config.get("train") or {})
    flat: dict[str, Any] = {"textmill": version}
    flat |= {f"train.{key}": value for key, value in train.items()}
    flat |= {f"engine.{key}": value for key, value in (config.get("engine") or {}).items()}
    return flat


def _pop_length(flat: dict[str, Any]) -> tuple[str, Any]:
    """Remove the run's length in all units; return the unit that sets it, such as steps or epochs, and its value."""
    lengths = {unit: flat.pop(f"train.{unit}", None) for unit in UNITS}
    unit = next((unit for unit in UNITS[1:] if lengths[unit] is not None), "steps")
    return unit, lengths[unit]


def _fingerprint_init_from(init_from: str | None, recorded: str | None) -> str | None:
    """The fingerprint of the weights of `model.init_from`; if they are gone, the one recorded in the checkpoint.

    If `model.init_from` is a run, it may have another best checkpoint by now: any of its checkpoints may be the one
    that was used.
    """
    if init_from is None:
        return None
    try:
        folder = open_model(init_from).folder
        fingerprint = fingerprint_weights(folder)
    except TextmillError:
        if recorded is None:
            raise
        return recorded
    if fingerprint != recorded and STEP_NAME.match(folder.name):
        for checkpoint in list_checkpoints(folder.parent).values():
            if fingerprint_weights(checkpoint) == recorded:
                return recorded
    return fingerprint
