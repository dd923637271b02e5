"""Perplexity and bits per byte of one split, or loss and accuracy of a chat model's answers, next to two baselines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.evaluation.baselines import count, sum_losses
from textmill.evaluation.metrics import compute_metrics, describe_answers, describe_windows, format_metrics
from textmill.evaluation.task import Result, Scorer
from textmill.storage.stages import open_manifest
from textmill.tokens.splits import open_splits
from textmill.tokens.store import TokenStore, open_store

ROWS = ("model", "unigram", "bigram")


@dataclass(frozen=True)
class SplitTokens:
    """The tokens of the measured split."""

    stores: list[TokenStore]
    train: list[TokenStore]
    """What the baselines are counted on."""
    counts: dict[str, int]
    """Documents and tokens, and words and bytes where they are known."""
    vocab: int
    facts: dict[str, Any]
    """How the tokens were made, as far as it changes the numbers."""

    @property
    def has_answers(self) -> bool:
        """Whether the stores mark the assistant's tokens."""
        return all(store.loss_mask is not None for store in (*self.stores, *self.train))


def measure(scorer: Scorer, config: RunConfig) -> Result:
    """Sum the loss of every token of `evaluate.split` and divide it by tokens, words and bytes."""
    tokens = _open_used(scorer, config) if config.tokens.use else _open_made(scorer, config)
    window = min(config.train.length or scorer.positions, scorer.positions)
    if config.train.layout == "chat" and tokens.has_answers:
        return _measure_answers(scorer, config, tokens, window)
    stride = config.evaluate.stride or window
    if stride > window:
        raise TextmillError(
            f"evaluate.stride: {stride} is more than the window of {window} tokens, so some would be left out; lower it"
        )
    loss = sum(scorer.sum_losses(store, length=window, stride=stride).loss for store in tokens.stores)
    return {
        "split": config.evaluate.split, **tokens.counts, "window": window, "stride": stride,
        "precision": scorer.precision, "device": scorer.device, **tokens.facts,
        "model": compute_metrics(loss, tokens.counts, str(scorer.checkpoint.folder)),
        **(_measure_baselines(tokens, scorer.tokenizer.end) if config.evaluate.baselines else {}),
    }  # fmt: skip


def _measure_answers(scorer: Scorer, config: RunConfig, tokens: SplitTokens, window: int) -> Result:
    """Loss and accuracy of the assistant's tokens: what the user says is given, the model need not predict it."""
    truncate = config.train.chat.truncate
    found = [scorer.sum_answer_losses(store, length=window, truncate=truncate) for store in tokens.stores]
    counted = sum(one.tokens for one in found)
    if not counted:
        raise TextmillError(
            f"{config.folder_of('tokens')}: the {config.evaluate.split} split has no assistant tokens in windows of "
            f"{window} tokens; raise train.length, or measure another split (evaluate.split)"
        )
    model = compute_metrics(sum(one.loss for one in found), {"tokens": counted}, str(scorer.checkpoint.folder))
    return {
        "split": config.evaluate.split, "documents": tokens.counts["documents"], "tokens": counted, "window": window,
        "truncate": truncate, "precision": scorer.precision, "device": scorer.device,
        "model": {**model, "accuracy": sum(one.correct for one in found) / counted},
        **(_measure_baselines(tokens, scorer.tokenizer.end, answers_only=True) if config.evaluate.baselines else {}),
    }  # fmt: skip


def format_table(result: Result) -> str:
    """A row for the model and for each baseline."""
    return format_metrics({row: result[row] for row in ROWS if row in result})


def describe_method(result: Result) -> str:
    """Windows, counts and baselines."""
    return describe_answers(result) if "truncate" in result else describe_windows(result)


def result_name(config: RunConfig) -> str:
    """The split: each has its own file."""
    return config.evaluate.split


def _open_made(scorer: Scorer, config: RunConfig) -> SplitTokens:
    """What `tokenize` wrote, after checking that the model can read it."""
    folder, split, checkpoint = config.folder_of("tokens"), config.evaluate.split, scorer.checkpoint.folder
    manifest = open_manifest(folder, "tokenize")
    if manifest["tokenizer"] != scorer.tokenizer.fingerprint:
        raise TextmillError(
            f"{folder}: made with another tokenizer than that of {checkpoint}; tokenize for this model: "
            f"tokenizer.use={checkpoint} with another tokenizer.folder and tokens.folder"
        )
    counts: dict[str, int] = manifest["splits"][split]
    store = open_store(folder / split)
    if not store.tokens:
        filled = [name for name, one in manifest["splits"].items() if one["tokens"]]
        raise _empty_split(folder, split, filled, " and run textmill prepare again with --force")
    if store.tokens != counts["tokens"]:
        raise TextmillError(
            f"{folder}: its {split} split holds {store.tokens:,} tokens, its manifest says {counts['tokens']:,}; "
            f"write it again with: textmill tokenize --force"
        )
    facts = {"append_end": bool(manifest["made_from"].get("tokens.append_end", True))}
    return SplitTokens([store], [open_store(folder / "train")], counts, manifest["vocab"], facts)


def _open_used(scorer: Scorer, config: RunConfig) -> SplitTokens:
    """Existing tokens, one store after the other, whatever their weights; their words and bytes are not known."""
    splits, split = open_splits(config, scorer.tokenizer), config.evaluate.split
    stores = splits.stores(split)
    if not stores:
        raise _empty_split("tokens.use", split, [name for name in splits.by_split if splits.stores(name)])
    counts = {"documents": sum(map(len, stores)), "tokens": sum(store.tokens for store in stores)}
    return SplitTokens(stores, splits.stores("train"), counts, scorer.tokenizer.vocab, {"stores": len(stores)})


def _empty_split(where: Path | str, split: str, filled: list[str], then: str = "") -> TextmillError:
    return TextmillError(
        f"{where}: its {split} split is empty; measure another (evaluate.split={filled[0] if filled else 'train'}), "
        f"or give it a larger part in corpus.split{then}"
    )


def _measure_baselines(tokens: SplitTokens, first: int, answers_only: bool = False) -> Result:
    seen = count(*tokens.train, vocab=tokens.vocab, first=first, answers_only=answers_only)
    losses = sum_losses(seen, *tokens.stores, first=first, answers_only=answers_only)
    counts = {"tokens": _count_answers(tokens.stores)} if answers_only else tokens.counts
    metrics = {name: compute_metrics(loss, counts, f"the {name}") for name, loss in losses.items()}
    trained = _count_answers(tokens.train) if answers_only else sum(store.tokens for store in tokens.train)
    return {**metrics, "counted": seen.counted, "train_tokens": trained}


def _count_answers(stores: list[TokenStore]) -> int:
    return sum(int(np.count_nonzero(store.loss_mask)) for store in stores if store.loss_mask is not None)
