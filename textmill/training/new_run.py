"""Start a new run: from random weights, from the model of `model.init_from`, or with new LoRA adapters on it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from textmill.checkpoints.adapters import is_adapter
from textmill.checkpoints.folders import Checkpoint, describe_init_model, open_model
from textmill.config import LoraConfig, RunConfig, ShapeConfig, TrainConfig
from textmill.engines.distillation.teachers import check_teachers
from textmill.errors import TextmillError, warn
from textmill.models import (
    Shape,
    check_segments,
    initial_weights,
    known_weights,
    label_head_of,
    open_family,
    read_shape,
    weights_of,
    with_label_head,
)
from textmill.models.lora import initial_adapters, trained_with_adapters
from textmill.models.parameter_groups import rules_of
from textmill.models.resizing import replace_heads, resize_weights, select_layer_weights, select_layers
from textmill.storage.tensor_files import Named, fingerprint_weights
from textmill.tokens.batches.batch import objectives_of
from textmill.tokens.batches.chat import check_training_data
from textmill.tokens.splits import Splits
from textmill.tokens.vocabulary.tokenizer import open_named
from textmill.tokens.vocabulary.transfer import VocabularyTransfer, transfer_vocabulary
from textmill.track import check_trackers
from textmill.training.start import Start, choose_shape, describe_inputs


def start_new_run(config: RunConfig, data: Splits) -> Start:
    """The start of a new run."""
    init_model = open_model(config.model.init_from) if config.model.init_from else None
    shape = choose_shape(config, data, init_model)
    _check_objective(config.train, shape)
    _check_pairs(config, shape)
    if init_model is not None:
        warn(f"model.init_from: using {describe_init_model(init_model, str(config.model.init_from))}")
        shape, weights = _adapt_init_model(init_model, shape, config, data)
    else:
        _check_fit(shape, config, data, None)
        weights = initial_weights(shape, config.train.seed)
    check_training_data(config.train, data, config.train.length or shape.positions, shape.vocab)
    fingerprint = fingerprint_weights(init_model.folder) if init_model else None
    start = Start(
        step=0,
        shape=shape,
        weights=weights,
        moments=[],
        updates=0,
        source=str(init_model.folder) if init_model else "the initial weights",
        made_from=describe_inputs(config, data, shape, fingerprint),
    )
    if config.model.lora and init_model:
        return _add_adapters(start, config.model.lora, init_model, config)
    return start


def _adapt_init_model(
    init_model: Checkpoint, shape: Shape, config: RunConfig, data: Splits
) -> tuple[Shape, Iterable[Named]]:
    """The model of `model.init_from` with the blocks, vocabulary, positions and head that this run needs."""
    transfer = transfer_vocabulary(init_model.tokenizer, data.tokenizer, shape.vocab)
    weights: Iterable[Named] = init_model.weights()
    if layers := config.model.init_layers:
        weights = select_layer_weights(weights, shape, layers)
        shape = select_layers(shape, layers)
        print(f"train: {len(layers)} blocks of {read_shape(init_model.folder).layers}: {layers}", flush=True)
    shape = _resize_shape(shape, data, init_model, transfer)
    _check_fit(shape, config, data, init_model)
    weights = resize_weights(weights, shape, transfer.kept, transfer.new)
    if label_head_of(shape):
        weights = replace_heads(weights, shape, config.train.seed)
    return shape, weights


def check_start(config: RunConfig) -> None:
    """Check before the first stage what training would reject after hours: missing models, trackers and weights."""
    check_trackers(config.track)
    check_teachers(config)
    if config.tokenizer.use and not config.tokens.use:
        open_named(config.tokenizer.use, config.tokenizer.end_token, config.tokenizer.lowercase)
    family = open_family(config.model.family)
    if config.model.init_from:
        shape = read_shape(open_model(config.model.init_from).folder)
        shape = select_layers(shape, config.model.init_layers) if config.model.init_layers else shape
        chosen = config.model.shape.positions if isinstance(config.model.shape, ShapeConfig) else None
        _check_length(config.train, chosen or shape.positions)
    else:
        shape = family.shape_of(config.model, vocab=1, end=0)
    if config.corpus.labels:
        shape = with_label_head(shape, config.corpus.labels, ["", ""])
    _check_objective(config.train, shape)
    _check_pairs(config, shape)
    rules_of(shape, config.train, config.model.lora)


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


def _check_pairs(config: RunConfig, shape: Shape) -> None:
    """Refuse pairs of texts for a net that knows one segment."""
    corpus = config.corpus
    other = "use another model.init_from"
    if config.train.layout == "masked" and (pairs := config.train.masked.pairs) != "none":
        check_segments(shape, f"train.masked.pairs: {pairs}", f"set train.masked.pairs=none, or {other}")
    if corpus.labels == "question-answering":
        check_segments(shape, f"corpus.labels: {corpus.labels}", other)
    if corpus.labels == "sequence-classification" and "+" in corpus.text_key:
        check_segments(shape, f"corpus.text_key: {corpus.text_key}", f"name one text, or {other}")


def _add_adapters(start: Start, lora: LoraConfig, init_model: Checkpoint, config: RunConfig) -> Start:
    """Add new LoRA adapters; weights of the base that were resized are saved with them."""
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
    weights += initial_adapters(start.shape, lora, config.train.seed)
    # A hub name works on every machine; a folder is recorded by its full path.
    base = str(config.model.init_from)
    if Path(base).is_dir():
        base = str(folder.resolve())
    return replace(start, weights=weights, base=base, changed_weights=changed)


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
        is_learned = any(weight.by_position for weight in weights_of(shape))
        longer = "interpolated" if is_learned else "the net has no weights for them; it must learn the new ones"
        method = longer if shape.positions > before else "the first ones"
        print(f"train: {shape.positions:,} positions instead of {before:,}: {method}", flush=True)
    keeps_end = transfer.kept is None and data.tokenizer.chat is None
    return replace(shape, vocab=transfer.rows, end=shape.end if keeps_end else data.tokenizer.end)


def _check_fit(shape: Shape, config: RunConfig, data: Splits, init_model: Checkpoint | None) -> None:
    """Check that the tokenizer and the sample length fit the model."""
    if data.tokenizer.vocab > shape.vocab:
        model = init_model.folder if init_model else "the model"
        raise TextmillError(
            f"{model}: has embeddings for {shape.vocab:,} tokens, the tokenizer has {data.tokenizer.vocab:,}; "
            f"tokenize with the model's own tokenizer: tokenizer.use={init_model.folder if init_model else 'FOLDER'}"
        )
    _check_length(config.train, shape.positions)


def _check_length(train: TrainConfig, positions: int) -> None:
    if (train.length or 0) > positions:
        raise TextmillError(
            f"train.length: {train.length} is longer than the model's {positions} positions; lower it, or set "
            f"model.shape.positions={train.length}"
        )
