"""A run folder and what it goes on from: its start, its lock, and what a checkpoint of it holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from textmill import __version__
from textmill.checkpoints.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    MERGED_CONFIG,
    PREFIX,
    is_adapter,
    open_adapter,
    read_base_and_adapter,
)
from textmill.checkpoints.file_plan import FilePlan
from textmill.checkpoints.folders import (
    Checkpoint,
    Snapshot,
    StepChoice,
    find_checkpoint,
    link_best,
    list_checkpoints,
    open_model,
    remove_leftovers,
)
from textmill.config import LoraConfig, RunConfig, TrainConfig
from textmill.config.load import merge_trees, read_recorded_config
from textmill.config.renamed import rename_settings
from textmill.errors import TextmillError, warn
from textmill.models import open_family, shape_in
from textmill.models.lora import first_adapters, peft_config_of, weights_with
from textmill.models.parameter_groups import rules_of
from textmill.models.resizing import resized
from textmill.processes.signals import STOPPED_FILE
from textmill.storage.files import remove_folder
from textmill.storage.stages import Force, list_changes
from textmill.storage.tensor_files import Named, fingerprint_weights
from textmill.tokens.chat_checks import preflight
from textmill.tokens.splits import Splits
from textmill.tokens.vocabulary.transfer import Inherited, inherited
from textmill.track import Trackers, check_trackers, open_trackers
from textmill.track.jsonl import truncate_after
from textmill.training.run_length import RunLength

SAMPLES = "samples.jsonl"
INDEX = "index"
"""Where large indexes of the data stand, one for all processes of a run."""


@dataclass(frozen=True)
class Start:
    """Where a run begins or goes on."""

    step: int
    shape: Any
    weights: Iterable[Named]
    moments: Iterable[Named]
    updates: int
    where: str
    made_from: dict[str, Any]
    changes: list[dict[str, Any]] = field(default_factory=list)
    base: str | None = None
    """Of adapters: the model that they change."""
    whole: list[Named] = field(default_factory=list)
    """Of adapters: weights of the start that are not the base's."""
    scaling: dict[str, float] = field(default_factory=dict)
    """Of fp16: what the loss scale goes on from."""
    spikes: dict[str, Any] = field(default_factory=dict)
    """Of `train.spikes.threshold`: what the guard goes on from."""


def begin(config: RunConfig, data: Splits, force: Force, which: StepChoice) -> Start:
    """Where to start: the run's checkpoint, given weights, or nothing. Only looks; `make_room` clears what is not gone on from."""
    run = config.folder_of("train")
    check_trackers(config.track)
    found = find_checkpoint(run, which) if force != "yes" else None
    if found is not None:
        before = found.progress["made_from"]
        # Given weights may be gone by now; what they were stands in the checkpoint made of them.
        shape = _shape_of(config, data, found if config.model.init_from else None)
        faults = list_changes(
            before, _made_from(config, data, shape, _weights_now(config.model.init_from, before["model.init_from"]))
        )
        if not faults:
            return _go_on(config, data, found)
        if force == "no":
            raise TextmillError(
                f"{run} was trained from something else: {'; '.join(faults[:4])}; set it back, choose another train.folder, "
                f"or start the run anew with --force"
            )
    return _anew(config, data)


def make_room(run: Path, step: int) -> None:
    """Take away what comes after the step that a run goes on from, and word of an earlier stop; all of it, when it starts anew."""
    remove_leftovers(run)
    (run / STOPPED_FILE).unlink(missing_ok=True)
    for later, folder in list_checkpoints(run).items():
        if later > step:
            remove_folder(folder)
    link_best(run)
    truncate_after(run / SAMPLES, step)
    if not step:
        remove_folder(run / "evaluation")


def _anew(config: RunConfig, data: Splits) -> Start:
    given = open_model(config.model.init_from) if config.model.init_from else None
    first = _shape_of(config, data, given)
    if given is not None:
        heirs = inherited(given.tokenizer, data.tokenizer, first.vocab)
        shape = _fitting(_resized(first, data, given, heirs), config, data, given)
        weights: Iterable[Named] = resized(given.weights(), shape, heirs.kept, heirs.new)
    else:
        shape = _fitting(first, config, data, given)
        weights = open_family(shape.family).first_weights(shape, config.train.seed)
    preflight(config.train, data, config.train.length or shape.positions, shape.vocab)
    where = str(given.folder) if given else "the first weights"
    start = Start(
        0,
        shape,
        weights,
        [],
        0,
        where,
        _made_from(config, data, shape, fingerprint_weights(given.folder) if given else None),
    )
    return _adapting(start, config.model.lora, given, config) if config.model.lora and given else start


def _adapting(start: Start, lora: LoraConfig, given: Checkpoint, config: RunConfig) -> Start:
    """The start with new adapters; given weights that had to change before it are kept with them."""
    if is_adapter(given.folder):
        advice = f"textmill export {given.folder} export.folder=MERGED, then model.init_from=MERGED"
        raise TextmillError(f"model.init_from: {given.folder} is an adapter itself; merge it first: {advice}")
    weights = list(start.weights)
    before = dict(open_family(start.shape.family).known_weights(given.weights()))
    whole = [(name, values) for name, values in weights if not np.array_equal(values, before[name])]
    weights += first_adapters(start.shape, lora, config.train.seed)
    # A hub name finds its model anywhere; a folder is named in full.
    named = str(config.model.init_from)
    return replace(
        start, weights=weights, base=str(given.folder.resolve()) if Path(named).is_dir() else named, whole=whole
    )


def _go_on(config: RunConfig, data: Splits, found: Checkpoint) -> Start:
    shape = _shape_of(config, data, found)
    before = read_recorded_config(found.folder / "run.yaml")
    after = {**config.model_dump(mode="json"), "textmill": __version__}
    changes = list_changes(_flat({**before, "textmill": found.progress["textmill"]}), _flat(after))
    for line in changes:
        warn(f"changed since step {found.step}: {line}")
    noted = [{"step": found.step, "change": line} for line in changes]
    updates = int(found.progress["updates"])
    moments = found.moments() if updates else []
    changes_so_far = found.progress["changes"] + noted
    start = Start(
        found.step, shape, found.weights(), moments, updates, str(found.folder), rename_settings(found.progress["made_from"]), changes_so_far,
        scaling=found.progress.get("scaling", {}), spikes=found.progress.get("spikes", {}),
    )  # fmt: skip
    if config.model.lora is None:
        return start
    adapter = open_adapter(found.folder)
    return replace(start, weights=read_base_and_adapter(adapter), base=adapter.named, whole=list(adapter.whole.items()))


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """What is worth noting when it changes in mid-run."""
    sections = {
        "train": merge_trees(TrainConfig().model_dump(mode="json"), tree.get("train") or {}),
        "engine": tree.get("engine") or {},
    }
    return {
        "textmill": tree["textmill"],
        **{f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()},
    }


def _shape_of(config: RunConfig, data: Splits, given: Checkpoint | None) -> Any:
    """The shape of the net, from given weights where there are some; dropout and positions are the config's to change."""
    if given is not None:
        shape, own = shape_in(given.folder), config.model.shape
        dropout, positions = (None, None) if isinstance(own, str) else (own.dropout, own.positions)
        return replace(
            shape if dropout is None else shape.with_dropout(dropout), positions=positions or shape.positions
        )
    family, tokenizer = open_family(config.model.family), data.tokenizer
    return family.shape_of(config.model, vocab=tokenizer.vocab, end=tokenizer.end, length=config.train.length)


def _resized(shape: Any, data: Splits, given: Checkpoint, heirs: Inherited) -> Any:
    """The shape of given weights with the vectors that are wanted; another vocabulary, and a chat template, say where the model ends."""
    if heirs.told and heirs.kept is None:
        print(f"train: {heirs.told}", flush=True)
    elif heirs.told:  # wanted, or a tokenizer that was forgotten to be named
        warn(heirs.told)
    before = shape_in(given.folder).positions
    if shape.positions != before:
        how = "interpolated" if shape.positions > before else "the first ones"
        print(f"train: {shape.positions:,} positions instead of {before:,}: {how}", flush=True)
    own = heirs.kept is None and data.tokenizer.chat is None
    return replace(shape, vocab=heirs.rows, end=shape.end if own else data.tokenizer.end)


def _fitting(shape: Any, config: RunConfig, data: Splits, given: Checkpoint | None) -> Any:
    """The shape, when tokenizer and length fit it."""
    if data.tokenizer.vocab > shape.vocab:
        raise TextmillError(
            f"{given.folder if given else 'the model'}: {shape.vocab:,} vectors for a tokenizer of {data.tokenizer.vocab:,} pieces; "
            f"tokenize with the model's own tokenizer: tokenizer.use={given.folder if given else 'FOLDER'}"
        )
    if (config.train.length or 0) > shape.positions:
        raise TextmillError(
            f"train.length: {config.train.length} is longer than the model's {shape.positions} positions; "
            f"lower it, or set model.shape.positions={config.train.length}"
        )
    return shape


def _made_from(config: RunConfig, data: Splits, shape: Any, given: str | None) -> dict[str, Any]:
    """All that decides what comes out; given weights count by what they are, not by where they stand."""
    settings = config.results("train")
    settings["train.length"] = config.train.length or shape.positions
    described = {f"model.{name}": value for name, value in vars(shape).items()}
    lora = config.model.lora.model_dump() if config.model.lora else None
    if lora and not lora["dropout"]:
        del lora["dropout"]  # runs of before there was any go on
    inputs = {
        "model.init_from": given,
        "model.lora": lora,
        "tokens": data.fingerprint,
        "tokenizer": data.tokenizer.fingerprint,
    }
    return {**settings, **described, **inputs}


def _weights_now(init_from: str | None, before: str | None) -> str | None:
    """A fingerprint of given weights; that of before, where they are gone since."""
    if init_from is None:
        return None
    try:
        return fingerprint_weights(open_model(init_from).folder)
    except TextmillError:
        if before is None:
            raise
        return before


def check_start(config: RunConfig) -> None:
    """Refuse, before any work, what training would only refuse after hours of it: a model, a tracker or a weight that is not there."""
    check_trackers(config.track)
    if config.model.init_from:
        shape = shape_in(open_model(config.model.init_from).folder)
    else:
        shape = open_family(config.model.family).shape_of(config.model, vocab=1, end=0)
    rules_of(shape, config.train, config.model.lora)


def told(facts: dict[str, Any]) -> str:
    """What an engine says of itself before the first step; of a net that is trained in part, which part."""
    of, trained = facts["parameters"], facts["trained"]
    share = "" if trained == of else f", {trained:,} of them trained ({trained / of:.2%}),"
    many = f"{facts['processes']} processes on " if facts.get("processes", 1) > 1 else ""
    compiling = f", {facts['compiling']}" if facts.get("compiling") else ""
    return f"{of:,} parameters{share} on {many}{facts['device']} in {facts['precision']}, micro-batch {facts['micro_batch']}{compiling}"


def files_of(config: RunConfig, data: Splits, start: Start) -> dict[str, bytes]:
    """What every checkpoint holds besides weights: the configs that transformers and PEFT read, our own, and the tokenizer."""
    shape, lora = start.shape, config.model.lora
    hf = open_family(shape.family).hf_config_of(shape)
    adapter = (
        {MERGED_CONFIG: hf, ADAPTER_CONFIG: peft_config_of(shape, lora, start.base)} if lora and start.base else None
    )
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in (adapter or {"config.json": hf}).items()}
    texts |= {"run.yaml": config.to_yaml(), **data.tokenizer.files(shape.positions)}
    return {name: text.encode() for name, text in texts.items()}


def trackers_of(config: RunConfig, course: RunLength, start: Start, facts: dict[str, Any]) -> Trackers:
    """Every place that the run's numbers go to; the first lines say what trains where, and for how long."""
    rules = rules_of(start.shape, config.train, config.model.lora)
    trained = [weight for weight in weights_with(start.shape, config.model.lora) if rules[weight.name].trained]
    flops = start.shape.flops_per_token(course.length, trained)
    trackers = open_trackers(
        config.track, config.folder_of("train"), steps=course.steps, start=start.step,
        tokens=lambda step: course.samples(step) * course.length, flops_per_token=flops, peak_flops=facts["peak_flops"],
        settings=config.model_dump(mode="json"),
    )  # fmt: skip
    verb = f"goes on from step {start.step:,}" if start.step else "starts"
    trackers.note(f"train: {told(facts)}; {verb}")
    trackers.note(f"train: {course.spoken()}")
    return trackers


def snapshot_of(
    engine: Any,
    step: int,
    start: Start,
    course: RunLength,
    loss: float,
    valid_loss: float | None,
    files: dict[str, bytes],
) -> Snapshot:
    """A copy in host memory of what a checkpoint holds and this process writes; losses as hex, so that no digit is lost."""
    samples = course.samples(step)
    progress = {
        "step": step, "updates": engine.updates(), "samples": samples, "tokens": samples * course.length, "loss": loss.hex(),
        "valid_loss": None if valid_loss is None else valid_loss.hex(), "made_from": start.made_from, "changes": start.changes,
        "textmill": __version__, "scaling": engine.scaling(), "spikes": engine.guard.saved() if engine.guard else {},
    }  # fmt: skip
    bytes_of = {
        weight.name: 4 * math.prod(weight.shape) for weight in open_family(start.shape.family).weights_of(start.shape)
    }
    deal = partial(
        FilePlan, size_of=lambda name: bytes_of.get(name.rpartition("/")[2], 0), limit=int(course.train.checkpoints.max_file_gb * 1e9),
        rank=engine.ranks.rank, world=engine.ranks.world,
    )  # fmt: skip
    prefix, weights = (PREFIX, deal(ADAPTER_MODEL.removesuffix(".safetensors"))) if start.base else ("", deal("model"))

    def mine(name: str) -> bool:
        return weights.mine(prefix + name)

    held = [*engine.weights(mine), *(one for one in start.whole if mine(one[0]))]
    moments = deal("optimizer", turn=len(weights.files))
    state = list(engine.moments(moments.mine))
    return Snapshot(
        step, [(prefix + name, values) for name, values in held], state, progress, files, (weights, moments)
    )
