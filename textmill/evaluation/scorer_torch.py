"""The Scorer of every torch net for the next token; masked_scorer_torch.py has that of masked nets.

`score_tokens` scores (context, continuation) pairs, packed by packing.py; tasks with choices use it. `sum_losses`
slides windows over a token store, for perplexity; `sum_answer_losses` reads conversations. All of them compute with
`token_log_likelihoods`. While the device computes a batch, the host prepares the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig, RunConfig
from textmill.devices import open_device, torch_dtype
from textmill.errors import TextmillError
from textmill.evaluation.checks import warn_if_foreign_tokenizer
from textmill.evaluation.masked_scorer_torch import MaskedScorer
from textmill.evaluation.packing import Rows, Tree, build_trees, fill_rows, pack
from textmill.evaluation.share import ALL_BATCHES, Numbered, Share
from textmill.evaluation.task import Pair, Score, Scorer, StoreLoss
from textmill.evaluation.text_scorer_torch import TextScorer, check_ids
from textmill.evaluation.token_losses_torch import token_log_likelihoods
from textmill.evaluation.tree_attention_torch import TreeAttention
from textmill.models import check_masked_head, check_next_token, open_family
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import open_net
from textmill.storage.progress import progress
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.chat import ChatLayout
from textmill.tokens.batches.windows import count_windows, window_batches
from textmill.tokens.store import TokenStore
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

GPU_ROW_TOKENS = 512
CPU_ROW_TOKENS = 0
"""Short texts share rows of at least this many tokens; on a CPU texts of similar length are rows of one batch."""
CPU_BATCH_TOKENS = 4096
"""Tokens in one forward pass on a CPU: more do not fit into its caches."""


def open_scorer(checkpoint: Checkpoint, engine: EngineConfig, batch: int) -> TorchScorer:
    """Load a checkpoint to score with it; `batch` windows of the model's length are read at a time."""
    tokenizer = open_tokenizer(checkpoint.tokenizer)
    device = open_device(engine.device)
    net = open_net(checkpoint.folder, device)
    return check_tokenizer(TorchScorer(checkpoint, net, tokenizer, batch, torch_dtype(engine.precision, device)))


def new_scorer(
    checkpoint: Checkpoint, net: BaseNet, tokenizer: TextTokenizer, config: RunConfig, share: Share = ALL_BATCHES
) -> Scorer:
    """A scorer of a net that is already loaded: of the next token, or of masked ones."""
    dtype = torch_dtype(config.engine.precision, net.head.device)
    if open_family(net.shape.family).OBJECTIVE == "masked":
        check_masked_head(net.shape, checkpoint.folder)
        masked = MaskedScorer(checkpoint, net, tokenizer, config.evaluate.batch, dtype, share)
        check_vocabulary(masked)
        masked.special_ids()
        if masked.positions < 1:
            raise TextmillError(
                f"{checkpoint.folder}: has {net.shape.positions} positions, and [CLS] and [SEP] take two; use a model "
                "with more"
            )
        return masked
    return check_tokenizer(TorchScorer(checkpoint, net, tokenizer, config.evaluate.batch, dtype, share))


def check_tokenizer(scorer: TorchScorer) -> TorchScorer:
    """Refuse a model for other tokens than the next, or one with fewer entries than its tokenizer; warn if that looks
    like another model's."""
    check_next_token(scorer.net.shape, scorer.checkpoint.folder, "score a text token by token")
    check_vocabulary(scorer)
    warn_if_foreign_tokenizer(scorer, scorer.net.shape.end)
    return scorer


def check_vocabulary(scorer: TextScorer) -> None:
    """Refuse a model with fewer entries than its tokenizer."""
    tokenizer = scorer.tokenizer
    shape = scorer.net.shape
    if tokenizer.vocab > shape.vocab:
        raise TextmillError(
            f"{scorer.checkpoint.folder}: its tokenizer has {tokenizer.vocab:,} entries, its embedding "
            f"{shape.vocab:,} rows; use the tokenizer that the model was trained with"
        )


@dataclass(frozen=True)
class TorchScorer(TextScorer):
    """A net for the next token with its tokenizer; see Scorer in task.py."""

    @property
    def objective(self) -> str:
        """What the model predicts."""
        return "next_token"

    def score_tokens(self, pairs: Sequence[Pair]) -> list[Score]:
        """Score each (context, continuation) and return the scores in the order given.

        A context that several pairs have is computed once. Rows have texts of similar length, or several texts."""
        self._check(pairs)
        trees = build_trees(pairs, end=self.tokenizer.end, positions=self.positions)
        is_cpu = self.net.head.device.type == "cpu"
        batch_tokens = self.batch * self.positions
        batches = pack(
            trees,
            row_tokens=CPU_ROW_TOKENS if is_cpu else GPU_ROW_TOKENS,
            batch_tokens=min(batch_tokens, CPU_BATCH_TOKENS) if is_cpu else batch_tokens,
        )
        total = sum(tree.tokens for tree in trees)
        with progress("score", total=total, unit="tokens", second_unit="texts") as bar:

            def compute() -> Numbered:
                scores: dict[int, Score] = {}
                wait_for_scores: Callable[[], dict[int, Score]] = dict
                for number, packed in enumerate(batches):
                    wait_for_previous = wait_for_scores
                    wait_for_scores = self._score_rows(packed) if self.share.is_mine(number) else dict
                    scores |= wait_for_previous()  # while the device computes this batch
                    batch_trees = [tree for row in packed for tree in row]
                    texts = sum(len(pairs) for tree in batch_trees for pairs in tree.branches.values())
                    bar.advance(sum(tree.tokens for tree in batch_trees), texts)
                scores |= wait_for_scores()
                return [(pair, list(vars(score).values())) for pair, score in scores.items()]

            return [Score(*values) for _, values in self.share.gather(compute)]

    def _check(self, pairs: Sequence[Pair]) -> None:
        self.check_lengths(pairs)
        ids = np.fromiter(chain.from_iterable(chain.from_iterable(pairs)), np.int64)
        check_ids(int(ids.min(initial=0)), int(ids.max(initial=0)), self.vocab, self.checkpoint.folder)

    def _score_rows(self, packed: list[list[Tree]]) -> Callable[[], dict[int, Score]]:
        """Queue a batch on the device; return a function that waits for its scores, by the number of the pair."""
        rows = fill_rows(packed, self.tokenizer.end)
        cache = None if rows.is_causal else TreeAttention(rows, self.net.head.device)
        wait_for_result = token_log_likelihoods(
            self.net, rows.ids_NT, rows.places_M, rows.labels_M, self.dtype, cache=cache, greedy=True
        )
        return lambda: _scores_of(rows, *wait_for_result())

    def sum_losses(
        self,
        store: TokenStore,
        *,
        length: int,
        stride: int,
        predict_first: bool = True,
        count_end: bool = True,
        sample: int | None = None,
        seed: int = 0,
    ) -> StoreLoss:
        """Sum the loss of every token of a store once; see Scorer. window_batches says which window predicts what."""
        end = self.tokenizer.end
        first_input = end if predict_first else None
        count = count_windows(store, length=length, stride=stride, first_input=first_input)
        windows = _sample_windows(count, sample, seed)
        own_batches = [number for number in range(-(-len(windows) // self.batch)) if self.share.is_mine(number)]
        own_windows = [windows[number * self.batch : (number + 1) * self.batch] for number in own_batches]
        batches = window_batches(
            store,
            length=length,
            stride=stride,
            batch=self.batch,
            first_input=first_input,
            samples=np.concatenate([windows[:0], *own_windows]),
        )
        with progress("evaluate", total=len(windows), unit="windows", second_unit="tokens") as bar:

            def compute() -> Numbered:
                results: Numbered = []
                for number, batch in zip(own_batches, batches, strict=True):
                    labels = np.where((batch.labels == end) & (not count_end), IGNORED, batch.labels)
                    # A short text does not fill its window, which can have tens of thousands of tokens.
                    used = 1 + int(np.flatnonzero((labels != IGNORED).any(0)).max(initial=0))
                    sums, counts, _ = self._score_labels(batch.inputs[:, :used], labels[:, :used], store.prefix)
                    results.append((number, [(-sums).tolist(), counts.tolist()]))
                    bar.advance(len(counts) * self.share.parts, int(counts.sum()))
                    self.share.ranks.report_progress()
                return results

            results = [result for _, result in self.share.gather(compute)]
        losses = [loss for result in results for loss in result[0]]
        tokens = [count for result in results for count in result[1]]
        return StoreLoss(float(np.sum(losses)), sum(tokens), 0, losses, tokens)

    def sum_answer_losses(self, store: TokenStore, *, length: int, truncate: str) -> StoreLoss:
        """Sum the loss of the assistant tokens of a store of conversations; count those that are the likeliest."""
        layout = ChatLayout(
            store, length=length, seed=None, pad=self.tokenizer.end, truncate=truncate, pack=False, vocab=self.vocab
        )
        starts = range(0, layout.samples_per_epoch, self.batch)
        with progress("evaluate", total=layout.samples_per_epoch, unit="conversations") as bar:

            def compute() -> Numbered:
                results: Numbered = []
                for number, begin in enumerate(starts):
                    samples = np.arange(begin, min(begin + self.batch, layout.samples_per_epoch), dtype=np.int64)
                    if self.share.is_mine(number):
                        arrays = layout.build_samples(samples)
                        sums, counts, likeliest = self._score_labels(
                            arrays.inputs, arrays.labels, store.prefix, greedy=True
                        )
                        results.append((number, [-float(sums.sum()), int(counts.sum()), likeliest]))
                    bar.advance(len(samples))
                return results

            results = [result for _, result in self.share.gather(compute)]
        loss = sum(batch_loss for batch_loss, _, _ in results)
        tokens = sum(batch_tokens for _, batch_tokens, _ in results)
        correct = sum(batch_correct for _, _, batch_correct in results)
        return StoreLoss(loss, tokens, correct)

    def _score_labels(
        self, inputs: NDArray[np.int32], labels: NDArray[np.int32], where: Path, greedy: bool = False
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], int]:
        """The log-likelihood and the number of predicted tokens of each row, and how many are the likeliest."""
        has_loss_NT = labels != IGNORED
        counts = has_loss_NT.sum(1, dtype=np.int64)
        check_ids(int(inputs.min()), int(max(inputs.max(), labels.max())), self.vocab, where)
        if not counts.any():
            return np.zeros(len(counts)), counts, 0
        places_M = np.flatnonzero(has_loss_NT)
        wait_for_result = token_log_likelihoods(
            self.net, inputs.astype(np.int64), places_M, labels[has_loss_NT].astype(np.int64), self.dtype, greedy=greedy
        )
        log_likelihoods_M, greedy_M = wait_for_result()
        sums: NDArray[np.float64] = np.zeros(len(counts))
        np.add.at(sums, places_M // labels.shape[1], log_likelihoods_M)
        return sums, counts, int(greedy_M.sum())


def _scores_of(rows: Rows, log_likelihoods_M: NDArray[np.float64], greedy_M: NDArray[np.bool_]) -> dict[int, Score]:
    """The scores of a batch by the number of the pair; equal pairs share a continuation, so they get equal scores."""
    starts = np.concatenate([[0], rows.ends[:-1]])
    lasts = rows.ends - 1
    # One row for each continuation, one column for each field of Score.
    columns = (
        np.add.reduceat(log_likelihoods_M, starts),
        rows.ends - starts,
        np.logical_and.reduceat(greedy_M, starts),
        log_likelihoods_M[lasts],
        greedy_M[lasts],
    )
    values_by_continuation = zip(*(column.tolist() for column in columns), strict=True)
    scores: dict[int, Score] = {}
    for pairs, values in zip(rows.pairs, values_by_continuation, strict=True):
        scores |= dict.fromkeys(pairs, Score(*values))
    return scores


def _sample_windows(count: int, sample: int | None, seed: int) -> NDArray[np.int64]:
    """The numbers of the windows to read: all of them, or a random sample in order."""
    if sample is None or sample >= count:
        return np.arange(count, dtype=np.int64)
    return np.sort(np.random.default_rng(seed).choice(count, sample, replace=False)).astype(np.int64)
