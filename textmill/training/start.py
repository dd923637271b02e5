"""What a run starts from: a checkpoint of its own (`choose_start`, `_resume`), or step 0 of a new run (`start_new_run`)
with random weights, the model of `model.init_from`, or new LoRA adapters on it.

Two kinds of settings are compared with those of a checkpoint. Those that decide the result (`describe_inputs`) must be
equal, unless `--change` or `--force` is given. The others, such as intervals, the length of the run or the mesh, may
change; what changed is recorded in progress.json (`_list_recorded_changes`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from textmill import __version__
from textmill.checkpoints.adapters import is_adapter, open_adapter, read_base_and_adapter
from textmill.checkpoints.folders import (
    STEP_NAME,
    Checkpoint,
    StepChoice,
    describe_choice,
    find_checkpoint,
    list_checkpoints,
    open_model,
)
from textmill.config import (
    CorpusConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    RunConfig,
    ShapeConfig,
    TokensConfig,
    TorchEngine,
    TrainConfig,
)
from textmill.config.load import merge_trees, read_yaml
from textmill.config.own_files import OwnFile, is_own_file, open_own_file
from textmill.config.section import results_of
from textmill.config.tokenizer import turns_of
from textmill.config.training import UNITS
from textmill.engines import check_engine
from textmill.engines.distillation import (
    check_teacher,
    check_teachers,
    fingerprint_teachers,
    matched_layers,
    teacher_folder,
)
from textmill.errors import TextmillError, warn
from textmill.evaluation.measured_task import check_objective
from textmill.evaluation.tasks import open_tasks
from textmill.models import (
    Shape,
    check_segments,
    initial_weights,
    known_weights,
    label_head_of,
    open_family,
    read_shape,
    recorded_numbers,
    with_label_head,
)
from textmill.models.family_files import find_family_file
from textmill.models.lora import initial_adapters, trained_with_adapters
from textmill.models.parameter_groups import rules_of
from textmill.models.resizing import replace_heads, resize_weights, select_layer_weights, select_layers
from textmill.processes.launch import read_launch
from textmill.storage.files import hash_file
from textmill.storage.stages import Force, list_changes
from textmill.storage.tensor_files import Named, fingerprint_weights
from textmill.tokens.batches.batch import objectives_of
from textmill.tokens.batches.blend import StoreWeight
from textmill.tokens.batches.chat import check_training_data
from textmill.tokens.batches.masking import check_counts_file
from textmill.tokens.splits import Splits
from textmill.tokens.vocabulary.tokenizer import open_used
from textmill.tokens.vocabulary.transfer import VocabularyTransfer, transfer_vocabulary
from textmill.track import check_trackers
from textmill.training.changing import Ranges, add_range, can_change, change_dropout, check_changes, describe_changes

IMPORTED = "imported"
"""The folder, inside that of the run, of the imported model."""
BYTES_PER_ID = 16
"""Inputs and labels of a batch, in 8 bytes each."""
FAMILY_SHA256 = "model.family_sha256"
"""The checksum of the user's own family file, among the inputs of a run."""
OWN_PARTS = {"loss": "loss", "optimizer": "update", "schedule": "learning_rate"}
"""Settings of `train` that may name a file of the user's own, and the function that it defines."""


@dataclass(frozen=True)
class Start:
    """The state from which a run starts or resumes."""

    step: int
    shape: Shape
    weights: Iterable[Named]
    optimizer_state: Iterable[Named]
    """The optimizer state; empty for a new run."""
    updates: int
    """Optimizer updates done so far, without skipped ones."""
    source: str
    """Where the weights come from, for error messages."""
    made_from: dict[str, Any]
    """Settings and inputs that decide the result; a resumed run must have the same ones."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Settings that were changed in mid-run, by step."""
    new_changes: list[str] = field(default_factory=list)
    """Those that were changed since the checkpoint, to be reported when the run resumes."""
    ranges: list[dict[str, Any]] = field(default_factory=list)
    """The settings of each step range, if some were changed with `--change`."""
    changed_now: bool = False
    """Whether the last of these ranges starts now."""
    sources: list[StoreWeight] = field(default_factory=list)
    """The token stores of the blend and their weights."""
    base: str | None = None
    """LoRA: the base model, by folder or hub name."""
    changed_weights: list[Named] = field(default_factory=list)
    """LoRA: full weights that differ from the base's, such as a resized embedding."""
    loss_scale: dict[str, float] = field(default_factory=dict)
    """fp16: the state of the loss scale."""
    best: dict[str, Any] = field(default_factory=dict)
    """`train.best`: the best value of the metric so far, and how often it was measured since."""
    run_length: dict[str, Any] = field(default_factory=dict)
    """`train.minutes`: the number of steps that was computed."""


def choose_start(config: RunConfig, data: Splits, force: Force, which: StepChoice, change: bool = False) -> Start:
    """Resume from the run's checkpoint or start a new run; only reads: `clean_run_folder` removes what is outdated.

    `change` resumes with other settings from the checkpoint on.
    """
    run = config.folder_of("train")
    model = config.model
    train = config.train
    check_trackers(config.track)
    checkpoint = find_checkpoint(run, which, to_resume=True) if force != "yes" else None
    if checkpoint is None:
        return start_new_run(model, train, config.corpus, data)
    before = checkpoint.progress["made_from"]
    # The weights of model.init_from may be gone by now; the checkpoint has their shape and fingerprint.
    shape = choose_shape(model, train.length, data, checkpoint if model.init_from else None)
    fingerprint = _fingerprint_init_from(model.init_from, before["model.init_from"])
    after = describe_inputs(model, train, data, shape, fingerprint)
    changes = list_changes(before, after)
    if changes and not change:
        if force == "no":
            raise _changes_error(run, model.family, checkpoint, changes)
        return start_new_run(model, train, config.corpus, data)
    check_changes(changes)
    shape = choose_shape(model, train.length, data, checkpoint)
    start = _resume(checkpoint, shape, model.lora, _list_recorded_changes(train, config.engine, checkpoint))
    return _with_changed_settings(start, after, add_range(checkpoint, before, after, data)) if changes else start


def _changes_error(run: Path, family: str, checkpoint: Checkpoint, changes: list[str]) -> TextmillError:
    if is_own_file(family) and any(line.startswith(FAMILY_SHA256) for line in changes):
        return TextmillError(
            f"{family}: the file has changed since {run} was trained with it; put the old file back, "
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


def _resume(checkpoint: Checkpoint, shape: Shape, lora: LoraConfig | None, changes: list[str]) -> Start:
    """The start from a checkpoint, with its optimizer state and all that it stores of the run so far."""
    progress = checkpoint.progress
    updates = int(progress["updates"])
    start = Start(
        step=checkpoint.step,
        shape=shape,
        weights=checkpoint.weights(),
        optimizer_state=checkpoint.optimizer_state() if updates else [],
        updates=updates,
        source=str(checkpoint.folder),
        made_from=progress["made_from"],
        changes=progress["changes"] + [{"step": checkpoint.step, "change": line} for line in changes],
        new_changes=changes,
        loss_scale=progress["scaling"],
        run_length=progress["run_length"],
        best=progress["best"],
        ranges=progress["ranges"],
    )
    if lora is None:
        return start
    adapter = open_adapter(checkpoint.folder)
    trained = {weight.name for weight in trained_with_adapters(shape, lora)}
    return replace(
        start,
        weights=read_base_and_adapter(adapter),
        base=adapter.base_name,
        changed_weights=[(name, values) for name, values in adapter.full_weights.items() if name not in trained],
    )


def _list_recorded_changes(train: TrainConfig, engine: EngineConfig, checkpoint: Checkpoint) -> list[str]:
    """What changed since the checkpoint in the sections `train` and `engine` and in the version, a line each.

    The run's length is compared in the unit that sets it: steps are not listed if `train.epochs` sets it.
    """
    before = _flatten(read_yaml(checkpoint.folder / "run.yaml")[0], checkpoint.progress["textmill"])
    now = {"train": train.model_dump(mode="json"), "engine": engine.model_dump(mode="json")}
    after = _flatten(now, __version__)
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


def start_new_run(model: ModelConfig, train: TrainConfig, corpus: CorpusConfig, data: Splits) -> Start:
    """The start of a new run."""
    init_model = open_model(model.init_from) if model.init_from else None
    shape = choose_shape(model, train.length, data, init_model)
    _check_objective(train, shape)
    _check_pairs(train, corpus, shape)
    if init_model is not None:
        named = Path(str(model.init_from)).resolve() == init_model.folder.resolve()
        warn(f"model.init_from: using {describe_choice(init_model, named=named)}")
        shape, weights = _adapt_init_model(init_model, shape, model.init_layers, train, data)
    else:
        _check_fit(shape, train, data, None)
        weights = initial_weights(shape, train.seed)
    check_training_data(train, data, train.length or shape.positions, shape.vocab)
    fingerprint = fingerprint_weights(init_model.folder) if init_model else None
    start = Start(
        step=0,
        shape=shape,
        weights=weights,
        optimizer_state=[],
        updates=0,
        source=str(init_model.folder) if init_model else "the initial weights",
        made_from=describe_inputs(model, train, data, shape, fingerprint),
    )
    if model.lora and init_model:
        return _add_adapters(start, model.lora, init_model, str(model.init_from), train.seed)
    return start


def _adapt_init_model(
    init_model: Checkpoint, shape: Shape, layers: list[int], train: TrainConfig, data: Splits
) -> tuple[Shape, Iterable[Named]]:
    """The model of `model.init_from` with the blocks (all if `layers` is empty), vocabulary, positions and head that
    this run needs."""
    transfer = transfer_vocabulary(init_model.tokenizer, data.tokenizer, shape.vocab)
    weights: Iterable[Named] = init_model.weights()
    if layers:
        weights = select_layer_weights(weights, shape, layers)
        shape = select_layers(shape, layers)
        print(f"train: {len(layers)} blocks of {read_shape(init_model.folder).layers}: {layers}", flush=True)
    shape = _resize_shape(shape, data, init_model, transfer)
    _check_fit(shape, train, data, init_model)
    weights = resize_weights(weights, shape, transfer.kept, transfer.new)
    if label_head_of(shape):
        weights = replace_heads(weights, shape, train.seed)
    return shape, weights


def _resize_shape(shape: Shape, data: Splits, init_model: Checkpoint, transfer: VocabularyTransfer) -> Shape:
    """The shape of `model.init_from` with the vocabulary and positions of this run.

    A new vocabulary or a chat template also decides the end token.
    """
    if transfer.summary and transfer.kept is None:
        print(f"train: {transfer.summary}", flush=True)
    elif transfer.summary:  # a new vocabulary: intended, or tokenizer.use was forgotten
        warn(transfer.summary)
    before = read_shape(init_model.folder).positions
    if shape.positions != before:
        is_learned = any(weight.by_position for weight in shape.weights())
        longer = "interpolated" if is_learned else "the net has no weights for them; it must learn the new ones"
        method = longer if shape.positions > before else "the first ones"
        print(f"train: {shape.positions:,} positions instead of {before:,}: {method}", flush=True)
    keeps_end = transfer.kept is None and data.tokenizer.chat is None
    return replace(shape, vocab=transfer.rows, eos_id=shape.eos_id if keeps_end else data.tokenizer.eos_id)


def _add_adapters(start: Start, lora: LoraConfig, init_model: Checkpoint, base: str, seed: int) -> Start:
    """Add new LoRA adapters to `base`, the name of `init_model`; weights of it that were resized are saved too."""
    folder = init_model.folder
    if is_adapter(folder):
        advice = f"textmill export {shlex.quote(str(folder))} export.folder=MERGED, then model.init_from=MERGED"
        raise TextmillError(f"model.init_from: {folder} is an adapter itself; merge it first: {advice}")
    weights = list(start.weights)
    before = dict(known_weights(start.shape, init_model.weights()))
    trained = {weight.name for weight in trained_with_adapters(start.shape, lora)}  # saved in any case
    changed = [
        (name, values) for name, values in weights if name not in trained and not np.array_equal(values, before[name])
    ]
    weights += initial_adapters(start.shape, lora, seed)
    # A hub name works on every machine; a folder is recorded by its full path.
    if Path(base).is_dir():
        base = str(folder.resolve())
    return replace(start, weights=weights, base=base, changed_weights=changed)


def check_start(config: RunConfig) -> Shape:
    """Check before the first stage what training would reject after hours: missing models, files and packages, settings
    that the engine cannot use; return the shape of the net, as far as it is known."""
    model, train = config.model, config.train
    check_trackers(config.track)
    own_parts(train)
    family = open_family(model.family)
    check_teachers(train.distil, config.engine, model)
    used = open_used(config.tokenizer, train.layout) if config.tokenizer.use and not config.tokens.use else None
    vocab = used.vocab if used else config.tokenizer.vocab
    if model.init_from:
        shape = shape_of_checkpoint(open_model(model.init_from), model.shape)
        shape = select_layers(shape, model.init_layers) if model.init_layers else shape
    else:
        shape = family.shape_of(model, vocab=vocab, eos_id=0, length=train.length)
    _check_length(train, shape.positions)
    check_own_family(model, shape, config.engine)
    if config.corpus.labels:
        shape = with_label_head(shape, config.corpus.labels, ["", ""])
    _check_objective(train, shape)
    _check_pairs(train, config.corpus, shape)
    if not config.tokens.use:
        has_chat = used.chat is not None if used else bool(turns_of(config.tokenizer.chat, config.tokenizer.chat_turns))
        _check_tokens(config.tokens, config.corpus, train, has_chat)
    rules_of(shape, train, model.lora)
    if train.masked.counts:
        check_counts_file(Path(train.masked.counts))
    for name in train.distil.teachers:
        teacher = read_shape(teacher_folder(name))
        check_teacher(name, replace(teacher, vocab=shape.vocab), shape, train)  # that of this run is not known yet
        matched_layers(train.distil, shape.layers, teacher.layers)
    for task in open_tasks(train.tasks):
        check_objective(task, open_family(shape.family).OBJECTIVE, f"model.family: {shape.family}")
        task.check(config.evaluate, shape.positions, train.length)
    if not train.tasks:
        check_measured(train.best.metric, [])
    check_batch_memory(train, train.length or shape.positions)
    _check_engine(config.engine, train, shape)
    return shape


def check_own_code(model: ModelConfig, train: TrainConfig, shape: Shape, engine: EngineConfig) -> None:
    """Refuse a family or a loss in the user's own file that breaks its contract."""
    check_own_family(model, shape, engine)
    if is_own_file(train.loss):  # other engines than torch take none
        from textmill.engines.losses_torch import check_own_loss

        check_own_loss(train, shape.vocab)


def check_own_family(model: ModelConfig, shape: Shape, engine: EngineConfig) -> None:
    """Refuse a family in the user's own file that breaks the contract of families; those of textmill have tests."""
    if find_family_file(shape.family) is not None:
        from textmill.models.contract_torch import check_family  # it imports torch, which JAX does not need

        check_family(model, shape, activation_checkpointing=engine.activation_checkpointing > 0)


def _check_tokens(tokens: TokensConfig, corpus: CorpusConfig, train: TrainConfig, has_chat: bool) -> None:
    """Refuse a layout that cannot read the tokens which these settings will make."""
    if tokens.level == "sentence" and corpus.sentences == "none":
        raise TextmillError(
            "tokens.level: sentence needs corpus.sentences=split (or lines, if each line is one already); set it, or "
            "tokens.level=document"
        )
    if train.layout == "chat" and not has_chat:
        raise TextmillError("tokenizer.chat: is not set, which train.layout=chat needs; set tokenizer.chat=default")
    if train.layout == "features" and tokens.kind != "features":
        raise TextmillError(
            f"tokens.kind: {tokens.kind} has no feature rows, which train.layout=features needs; set "
            "tokens.kind=features, or train.layout=packed"
        )
    pairs = train.masked.pairs
    if train.layout == "masked" and pairs != "none" and tokens.level != "sentence":
        raise TextmillError(
            f"tokens.level: {tokens.level} has no sentences, which train.masked.pairs={pairs} needs; set "
            "corpus.sentences=split and tokens.level=sentence, or train.masked.pairs=none"
        )


def _check_engine(engine: EngineConfig, train: TrainConfig, shape: Shape) -> None:
    """Refuse settings that the engine cannot use in these processes."""
    launch = read_launch(os.environ)
    world = launch.world if launch else 1
    if engine == TorchEngine() and world == 1:
        return  # the defaults work everywhere, and importing torch takes seconds
    if "batch" in train.open_settings:  # `train.preset=auto` will choose one that fits
        train = train.model_copy(update={"batch": batch_multiple(engine, world)})
    check_engine(engine, train, shape, world)


def check_batch_memory(train: TrainConfig, length: int) -> None:
    """Refuse a batch whose token ids alone do not fit into this machine's memory."""
    needed = max(train.sizes) * length * BYTES_PER_ID
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise TextmillError(
            f"train.batch: {max(train.sizes):,} samples of {length:,} tokens need {needed / 1e9:,.0f} GB, "
            f"this machine has {memory / 1e9:,.0f} GB; lower it"
        )


def batch_multiple(engine: EngineConfig, processes: int) -> int:
    """A number of samples that processes and micro-batches divide evenly, as does every multiple of it."""
    return processes * (engine.micro_batch if isinstance(engine.micro_batch, int) else 1)


def check_measured(metric: str, measured: list[str]) -> None:
    """Refuse a `train.best.metric` of a task that no task of the run measures."""
    if "/" in metric and metric not in measured:
        raise TextmillError(
            f"train.best.metric: '{metric}' is not measured; "
            + (f"train.tasks measures {', '.join(measured)}" if measured else "set train.tasks")
        )


def _check_objective(train: TrainConfig, shape: Shape) -> None:
    """Refuse a layout whose labels are not what the family predicts: a net that sees both sides would copy them."""
    layout = train.layout
    pairs = train.masked.pairs
    objective = open_family(shape.family).OBJECTIVE
    layout_objectives = objectives_of(layout)
    if layout == "labelled":
        return  # the family has a head for it, or `with_label_head` refused it
    if head := label_head_of(shape):
        raise TextmillError(
            f"model.init_from: was finetuned for {head[0]}, and train.layout={layout} needs a model that predicts "
            "tokens; name the model that it was finetuned from"
        )
    if objective not in layout_objectives:
        fitting_layout = "masked" if objective == "masked" else "packed"
        raise TextmillError(
            f"train.layout: {layout} has labels for {layout_objectives[0]}, but a {shape.family} is trained for "
            f"{objective}; set train.layout={fitting_layout}, or another model.family"
        )
    if layout == "masked" and not getattr(shape, "masked_head", True):
        raise TextmillError(
            "model.init_from: the model has no head for masked tokens, so its masked training cannot go on; use a "
            "folder of BertForMaskedLM or BertForPreTraining"
        )
    if layout == "masked" and pairs != "none" and not getattr(shape, "pair_head", False):
        raise TextmillError(
            f"train.masked.pairs: {pairs} needs a pair head, which this model does not have; "
            "set train.masked.pairs=none, or model.shape.pair_head=true for a new model"
        )


def _check_pairs(train: TrainConfig, corpus: CorpusConfig, shape: Shape) -> None:
    """Refuse pairs of texts for a net that knows one segment."""
    other = "use another model.init_from"
    if train.layout == "masked" and (pairs := train.masked.pairs) != "none":
        check_segments(shape, f"train.masked.pairs: {pairs}", f"set train.masked.pairs=none, or {other}")
    if corpus.labels == "question-answering":
        check_segments(shape, f"corpus.labels: {corpus.labels}", other)
    if corpus.labels == "sequence-classification" and "+" in corpus.text_key:
        check_segments(shape, f"corpus.text_key: {corpus.text_key}", f"name one text, or {other}")


def _check_fit(shape: Shape, train: TrainConfig, data: Splits, init_model: Checkpoint | None) -> None:
    """Check that the tokenizer and the sample length fit the model."""
    if data.tokenizer.vocab > shape.vocab:
        model = init_model.folder if init_model else "the model"
        raise TextmillError(
            f"{model}: has embeddings for {shape.vocab:,} tokens, the tokenizer has {data.tokenizer.vocab:,}; "
            f"tokenize with the model's own tokenizer: tokenizer.use={init_model.folder if init_model else 'FOLDER'}"
        )
    _check_length(train, shape.positions)


def _check_length(train: TrainConfig, positions: int) -> None:
    if (train.length or 0) > positions:
        raise TextmillError(
            f"train.length: {train.length} is longer than the model's {positions} positions; lower it, or set "
            f"model.shape.positions={train.length}"
        )


def use_imported_model(config: RunConfig, *, write: bool = True) -> RunConfig:
    """The config with `model.init_from` as a model folder; only the rank that may `write` imports the file."""
    given = config.model.init_from
    if given is None or not _may_be_foreign(Path(given)):
        return config
    from textmill.conversion.importing import import_model, is_importable  # they import torch, which JAX does not need

    if not is_importable(Path(given)):
        return config  # opening it says what is wrong
    folder = config.folder_of("train") / IMPORTED
    if write:
        tokenizer = config.tokenizer.use if config.tokenizer.use and Path(config.tokenizer.use).exists() else None
        import_model(given, str(folder), tokenizer=tokenizer)
    return config.model_copy(update={"model": config.model.model_copy(update={"init_from": str(folder)})})


def _may_be_foreign(path: Path) -> bool:
    """A file, or a folder without safetensors that is not a run."""
    if not path.is_dir():
        return path.is_file()
    runs = map(list_checkpoints, (path, path / "run"))
    return not is_adapter(path) and not any(path.glob("*.safetensors")) and not any(runs)


def choose_shape(model: ModelConfig, length: int | None, data: Splits, checkpoint: Checkpoint | None) -> Shape:
    """The shape of a checkpoint, where dropout and positions may be overridden, or of a new model for samples of
    `length` tokens."""
    if checkpoint is None:
        vocab = data.tokenizer.vocab
        shape = open_family(model.family).shape_of(model, vocab=vocab, eos_id=data.tokenizer.eos_id, length=length)
    else:
        shape = shape_of_checkpoint(checkpoint, model.shape)
    labels = data.manifest.get("labels")
    return shape if labels is None else with_label_head(shape, labels["task"], labels["names"])


def shape_of_checkpoint(checkpoint: Checkpoint, override: ShapeConfig | str) -> Shape:
    """The shape of a checkpoint; `model.shape` may override dropout and positions."""
    shape = read_shape(checkpoint.folder)
    if isinstance(override, str):
        return shape
    if override.dropout is not None:
        shape = shape.with_dropout(override.dropout)
    return replace(shape, positions=override.positions or shape.positions)


def own_parts(train: TrainConfig, open_file: Callable[[str, str, str], OwnFile] = open_own_file) -> dict[str, OwnFile]:
    """The user's own files that the settings name, by setting; as they are now, or as they were read last."""
    keys = {f"train.{name}": (getattr(train, name), function) for name, function in OWN_PARTS.items()}
    return {key: open_file(value, key, function) for key, (value, function) in keys.items() if is_own_file(value)}


def describe_inputs(
    model: ModelConfig, train: TrainConfig, data: Splits, shape: Shape, weights_fingerprint: str | None
) -> dict[str, Any]:
    """All settings and inputs that decide the result; given files count by their content, not by their path."""
    settings = results_of(train, "train")
    settings |= {key: file.described for key, file in own_parts(train).items()}
    if train.masked.counts:
        settings["train.masked.counts"] = hash_file(Path(train.masked.counts))
    settings["train.length"] = train.length or shape.positions
    numbers = {f"model.{name}": value for name, value in recorded_numbers(shape).items()}
    inputs = {
        "model.init_from": weights_fingerprint,
        "model.init_layers": model.init_layers or None,
        "model.lora": model.lora.model_dump() if model.lora else None,
        "tokens": data.fingerprint,
        "tokenizer": data.tokenizer.fingerprint,
    }
    if train.distil.teachers:
        settings["train.distil.teachers"] = fingerprint_teachers(train.distil.teachers)
    if (file := find_family_file(shape.family)) is not None:
        inputs[FAMILY_SHA256] = file.sha256
    return {**settings, **numbers, **inputs}
