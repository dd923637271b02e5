"""The verb evaluate: how well a model predicts a split, beside models that only count."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import Checkpoint, WhichStep, model_of
from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.evaluation.metrics import figures_of, protocol_of, table_of
from textmill.storage.files import shown, write_json
from textmill.storage.stages import open_manifest
from textmill.tokens.splits import open_splits
from textmill.tokens.store import TokenStore, open_store
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

ROWS = ("model", "unigram", "bigram")


@dataclass(frozen=True)
class Measure:
    """What a model is measured on."""

    stores: list[TokenStore]
    train: list[TokenStore]
    """What the baselines are counted on."""
    counts: dict[str, int]
    """Documents and tokens, and words and bytes where they are known."""
    vocab: int
    facts: dict[str, Any]
    """What else one must know of the tokens."""


def evaluate(config: RunConfig, step: WhichStep = "latest", as_json: bool = False) -> dict[str, Any]:
    """Measure `evaluate.split`, print the figures and how they came about, and keep them beside the run."""
    if "perplexity" not in config.evaluate.tasks:
        raise TextmillError("evaluate.tasks: nothing to measure; set evaluate.tasks=perplexity")
    checkpoint = model_of(config.folder_of("train"), config.model.init_from, step)
    result = _measured(config, checkpoint)
    kept = _keep(config, checkpoint, result)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
        return result
    print(table_of({row: result[row] for row in ROWS if row in result}))
    print(f"\n{protocol_of(result)}")
    if kept is not None:
        print(f"Kept in {shown(kept)}")
    return result


def _measured(config: RunConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """The figures of the model and the baselines, and all that one must know to read them."""
    from textmill.devices import open_device, precision_of  # torch is loaded only when there is something to measure
    from textmill.evaluation.perplexity import perplexity
    from textmill.models.nets_torch import open_net

    tokenizer = open_tokenizer(checkpoint.tokenizer)
    measure = _open_used(config, tokenizer) if config.tokens.use else _open_made(config, tokenizer, checkpoint)
    device = open_device(config.engine.device)
    precision = precision_of(config.engine.precision, device)
    net = open_net(checkpoint.folder, device)
    if tokenizer.vocab > net.shape.vocab:
        raise TextmillError(
            f"{checkpoint.folder}: its tokenizer has {tokenizer.vocab:,} pieces, its embedding {net.shape.vocab:,} vectors"
        )
    window = min(config.train.length or net.shape.positions, net.shape.positions)
    stride = config.evaluate.stride or window
    if stride > window:
        raise TextmillError(
            f"evaluate.stride: {stride} is more than the window of {window} tokens, so some would be left out; lower it"
        )
    loss = sum(
        perplexity(
            net,
            store,
            length=window,
            stride=stride,
            batch=config.evaluate.batch,
            first=tokenizer.end,
            precision=precision,
        ).loss
        for store in measure.stores
    )
    return {
        "checkpoint": str(checkpoint.folder), "step": checkpoint.step, "split": config.evaluate.split, **measure.counts, "window": window,
        "stride": stride, "precision": str(precision).removeprefix("torch."), "device": str(device), **measure.facts,
        "model": figures_of(loss, measure.counts, str(checkpoint.folder)),
        **(_baselines(measure, tokenizer.end) if config.evaluate.baselines else {}),
    }  # fmt: skip


def _open_made(config: RunConfig, tokenizer: TextTokenizer, checkpoint: Checkpoint) -> Measure:
    """What `tokenize` made of a corpus."""
    folder = config.folder_of("tokens")
    manifest = open_manifest(folder)
    store, counts = _open_split(folder, config.evaluate.split, manifest, tokenizer, checkpoint)
    facts = {"append_end": bool(manifest["made_from"].get("tokens.append_end", True))}
    return Measure([store], [open_store(folder / "train")], counts, manifest["vocab"], facts)


def _open_used(config: RunConfig, tokenizer: TextTokenizer) -> Measure:
    """Existing tokens, one store after the other, whatever their weights; their words and bytes are not known."""
    splits, split = open_splits(config, tokenizer), config.evaluate.split
    stores = splits.of(split)
    if not stores:
        filled = [name for name in splits.stores if splits.of(name)]
        raise TextmillError(
            f"tokens.use: the {split} split there is empty; measure another (evaluate.split={filled[0] if filled else 'train'}), "
            f"or give it a share in corpus.split"
        )
    counts = {"documents": sum(map(len, stores)), "tokens": sum(store.tokens for store in stores)}
    return Measure(stores, splits.of("train"), counts, tokenizer.vocab, {"stores": len(stores)})


def _open_split(
    folder: Path, split: str, manifest: dict[str, Any], tokenizer: TextTokenizer, checkpoint: Checkpoint
) -> tuple[TokenStore, dict[str, int]]:
    """The split's tokens and counts, after checking that the model can read them."""
    if manifest["tokenizer"] != tokenizer.fingerprint:
        raise TextmillError(
            f"{folder}: made with another tokenizer than that of {checkpoint.folder}; tokenize for this model: "
            f"tokenizer.use={checkpoint.folder} with another tokenizer.folder and tokens.folder"
        )
    counts: dict[str, int] = manifest["splits"][split]
    store = open_store(folder / split)
    if not store.tokens:
        filled = [name for name, one in manifest["splits"].items() if one["tokens"]]
        raise TextmillError(
            f"{folder}: its {split} split is empty; measure another (evaluate.split={filled[0] if filled else 'train'}), "
            f"or give it a share in corpus.split and prepare anew with --force"
        )
    if store.tokens != counts["tokens"]:
        raise TextmillError(
            f"{folder}: its {split} split holds {store.tokens:,} tokens, its manifest says {counts['tokens']:,}; "
            f"make it anew with: textmill tokenize --force"
        )
    return store, counts


def _baselines(measure: Measure, first: int) -> dict[str, Any]:
    from textmill.evaluation.baselines import count, losses_of

    seen = count(*measure.train, vocab=measure.vocab, first=first)
    losses = losses_of(seen, *measure.stores, first=first)
    figures = {name: figures_of(loss, measure.counts, f"the {name}") for name, loss in losses.items()}
    return {**figures, "counted": seen.counted, "train_tokens": sum(store.tokens for store in measure.train)}


def _keep(config: RunConfig, checkpoint: Checkpoint, result: dict[str, Any]) -> Path | None:
    """Write the result into the run that the checkpoint is of; a model from elsewhere keeps its folder as it is."""
    run = config.folder_of("train")
    if not checkpoint.progress or checkpoint.folder.parent.resolve() != run.resolve():
        return None
    path = run / "evaluation" / f"step-{checkpoint.step:07d}-{result['split']}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, result)
    return path
