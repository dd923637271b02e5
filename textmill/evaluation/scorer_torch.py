"""The Scorer of every torch net. Shapes in names: N rows, T tokens, M loss tokens, E width, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig
from textmill.devices import autocast, open_device, torch_dtype
from textmill.errors import TextmillError
from textmill.evaluation.task import Score, StoreLoss
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import open_net
from textmill.storage.progress import progress
from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.tokens.batches.chat import ChatLayout
from textmill.tokens.batches.windows import window_batches
from textmill.tokens.store import TokenStore
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

MAX_LOGITS = 1 << 26
"""Logits held at once: 256 MiB in fp32, however large the vocabulary."""

Pair = tuple[Sequence[int], Sequence[int]]
"""The token ids of a context and of its continuation."""


def open_scorer(checkpoint: Checkpoint, engine: EngineConfig, batch: int) -> TorchScorer:
    """Load a checkpoint to score with it, `batch` rows at a time."""
    tokenizer, device = open_tokenizer(checkpoint.tokenizer), open_device(engine.device)
    net = open_net(checkpoint.folder, device)
    if tokenizer.vocab > net.shape.vocab:
        raise TextmillError(
            f"{checkpoint.folder}: its tokenizer has {tokenizer.vocab:,} entries, its embedding {net.shape.vocab:,} "
            "rows; "
            f"use the tokenizer that the model was trained with"
        )
    return TorchScorer(checkpoint, net, tokenizer, batch, torch_dtype(engine.precision, device))


@dataclass(frozen=True)
class TorchScorer:
    """A net with its tokenizer; see Scorer in task.py."""

    checkpoint: Checkpoint
    net: BaseNet
    tokenizer: TextTokenizer
    batch: int
    """Rows in one forward pass."""
    dtype: torch.dtype = torch.float32

    @property
    def positions(self) -> int:
        """The longest input of the model, in tokens."""
        return int(self.net.shape.positions)

    @property
    def vocab(self) -> int:
        """How many tokens the model knows."""
        return int(self.net.shape.vocab)

    @property
    def precision(self) -> str:
        """The arithmetic it computes in."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """Where the net is."""
        return str(self.net.head.device)

    def score_texts(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """Score each (context, continuation), encoded as one text."""
        return self.score_tokens([self._encode(context, continuation) for context, continuation in pairs])

    def _encode(self, context: str, continuation: str) -> Pair:
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        before, both = self.tokenizer.encode(kept), self.tokenizer.encode(kept + continuation)
        return before, both[len(before) :]

    def score_tokens(self, pairs: Sequence[Pair]) -> list[Score]:
        """Score each (context, continuation), rows of similar length together, and return the scores in the order
        given."""
        rows = [self._row(context, continuation) for context, continuation in pairs]
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number][0]))
        scores: dict[int, Score] = {}
        with progress("score", total=len(rows), unit="texts") as bar:
            for begin in range(0, len(order), self.batch):
                numbers = order[begin : begin + self.batch]
                scores.update(zip(numbers, self._score_rows([rows[number] for number in numbers]), strict=True))
                bar.advance(len(numbers))
        return [scores[number] for number in range(len(rows))]

    def _row(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[list[int], int]:
        """The last tokens that the model can read, and how many of them are the continuation."""
        if not 0 < len(continuation) <= self.positions:
            raise TextmillError(
                f"{self.checkpoint.folder}: a continuation has {len(continuation):,} tokens; "
                f"the model scores from 1 to {self.positions:,}"
            )
        ids = [*(context or [self.tokenizer.end]), *continuation]
        return ids[-(self.positions + 1) :], len(continuation)

    def _score_rows(self, rows: list[tuple[list[int], int]]) -> Iterator[Score]:
        """One batch, padded on the right: in a causal net padding changes nothing before it."""
        length = max(len(ids) for ids, _ in rows) - 1
        inputs = np.full((len(rows), length), self.tokenizer.end, np.int32)
        labels = np.full((len(rows), length), IGNORED, np.int32)
        for row, (ids, scored) in enumerate(rows):
            inputs[row, : len(ids) - 1] = ids[:-1]
            labels[row, len(ids) - 1 - scored : len(ids) - 1] = ids[-scored:]
        batch = Batch(inputs=inputs, labels=labels, samples=np.arange(len(rows), dtype=np.int64))
        _check_ids(batch, self.vocab, self.checkpoint.folder)
        losses_M, greedy_M = _token_losses(self.net, batch, self.dtype, greedy=True)
        counts = [scored for _, scored in rows]
        for losses, greedy in zip(
            torch.split(losses_M.cpu().double(), counts), torch.split(greedy_M.cpu(), counts), strict=True
        ):
            yield Score(-float(losses.sum()), len(losses), bool(greedy.all()))

    def sum_losses(self, store: TokenStore, *, length: int, stride: int) -> StoreLoss:
        """Sum the loss of every token of a store once. The first token is predicted from the end-of-text token."""
        loss, tokens = 0.0, 0
        with progress("evaluate", total=store.tokens, unit="tokens") as bar:
            for windows in window_batches(
                store, length=length, stride=stride, batch=self.batch, first_input=self.tokenizer.end
            ):
                _check_ids(windows, self.vocab, store.prefix)
                losses_M, _ = _token_losses(self.net, windows, self.dtype)
                loss += float(losses_M.cpu().double().sum())
                tokens += len(losses_M)
                bar.advance(len(losses_M))
        return StoreLoss(loss, tokens)

    def sum_answer_losses(self, store: TokenStore, *, length: int, truncate: str) -> StoreLoss:
        """Sum the loss of the assistant tokens of a store of conversations; count those that are the likeliest."""
        layout = ChatLayout(
            store, length=length, seed=None, pad=self.tokenizer.end, truncate=truncate, pack=False, vocab=self.vocab
        )
        loss, tokens, correct = 0.0, 0, 0
        with progress("evaluate", total=layout.samples_per_epoch, unit="conversations") as bar:
            for begin in range(0, layout.samples_per_epoch, self.batch):
                samples = np.arange(begin, min(begin + self.batch, layout.samples_per_epoch), dtype=np.int64)
                arrays = layout.build_samples(samples)
                batch = Batch(inputs=arrays.inputs, labels=arrays.labels, samples=samples)
                if (batch.labels != IGNORED).any():
                    losses_M, likeliest_M = _token_losses(self.net, batch, self.dtype, greedy=True)
                    loss += float(losses_M.cpu().double().sum())
                    tokens, correct = tokens + len(losses_M), correct + int(likeliest_M.sum())
                bar.advance(len(samples))
        return StoreLoss(loss, tokens, correct)


@torch.inference_mode()
def _token_losses(net: BaseNet, batch: Batch, precision: torch.dtype, greedy: bool = False) -> tuple[Tensor, Tensor]:
    """The loss of each loss token and, if `greedy`, whether it is the likeliest; logits are computed block by block."""
    device = net.head.device
    inputs_NT, labels_NT = (torch.from_numpy(array).to(device) for array in (batch.inputs, batch.labels))
    has_loss_NT = labels_NT != IGNORED
    labels_M = labels_NT[has_loss_NT].long()
    losses, likeliest = [], []
    with autocast(device, precision):
        hidden_ME = net(inputs_NT)[has_loss_NT]
        rows = max(1, MAX_LOGITS // net.shape.padded_vocab)
        for begin in range(0, len(labels_M), rows):
            logits_MV, labels = net.logits(hidden_ME[begin : begin + rows]).float(), labels_M[begin : begin + rows]
            losses.append(F.cross_entropy(logits_MV, labels, reduction="none"))
            likeliest.append(logits_MV.argmax(-1) == labels if greedy else labels.new_empty(0))
    return torch.cat(losses), torch.cat(likeliest)


def _check_ids(batch: Batch, vocab: int, where: Path) -> None:
    ids = np.concatenate([batch.inputs.ravel(), batch.labels[batch.labels != IGNORED]])
    if ids.max() >= vocab or ids.min() < 0:
        raise TextmillError(
            f"{where}: token ids from {ids.min()} to {ids.max()} found, the model knows {vocab:,}; "
            f"tokenize with the model's own tokenizer"
        )
