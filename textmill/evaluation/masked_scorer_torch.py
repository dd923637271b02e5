"""The Scorer of a model for masked tokens: pseudo-log-likelihoods (Salazar et al. 2020).

Each token of a text is masked in turn and predicted from all others; the sum of the log-probabilities scores the text.
The context [5 6] with the continuation [7 8] is read in two copies:

    [CLS] 5 6 [MASK] 8 [SEP]    log p(7)
    [CLS] 5 6 7 [MASK] [SEP]    log p(8)

`masked_batches` makes the copies. Those of one text may be in several batches; `_join` adds up what each batch gives.

Shapes in names: N copies of texts with one mask each, T tokens, K texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.evaluation.share import Numbered
from textmill.evaluation.task import Pair, Score, StoreLoss
from textmill.evaluation.text_scorer_torch import TextScorer, check_ids
from textmill.evaluation.token_losses_torch import token_log_likelihoods
from textmill.ranges import expand_ranges
from textmill.storage.progress import progress

CPU_BATCH_TOKENS = 4096
"""Tokens in one forward pass on a CPU: more do not fit into its caches."""
GROUP_TEXTS = 1024
"""Texts of the same length that are prepared at a time."""
SPECIAL = 2
"""[CLS] before a text and [SEP] after it."""

Ids = NDArray[np.int64]


class MaskedBatch(NamedTuple):
    """Copies of texts of the same length, so that there is no padding; each has one mask."""

    ids_NT: Ids
    places_N: Ids
    """Where the mask is, in the flat array of all tokens."""
    labels_N: Ids
    numbers_N: Ids
    """Which pair each copy belongs to; copies of a pair are next to each other."""
    is_last_N: NDArray[np.bool_]
    """Whether the mask is the pair's last token."""


@dataclass(frozen=True)
class MaskedScorer(TextScorer):
    """A net for masked tokens with its tokenizer; see Scorer in task.py."""

    @property
    def objective(self) -> str:
        """What the model predicts."""
        return "masked"

    @property
    def positions(self) -> int:
        """The longest text in tokens, without the special tokens around it."""
        return int(self.net.shape.positions) - SPECIAL

    def score_tokens(self, pairs: Sequence[Pair]) -> list[Score]:
        """The pseudo-log-likelihood of each continuation: its tokens are masked, the context is not."""
        self.check_lengths(pairs)
        on_cpu = self.net.head.device.type == "cpu"
        tokens = self.batch * self.positions
        batches = masked_batches(
            pairs,
            positions=self.positions,
            special=self.special_ids(),
            batch_tokens=min(tokens, CPU_BATCH_TOKENS) if on_cpu else tokens,
        )
        total = sum(len(continuation) for _, continuation in pairs)
        with progress("score", total=total, unit="masks") as bar:

            def compute() -> Numbered:
                results: Numbered = []
                wait_for_results: Callable[[], Numbered] = list
                for number, batch in enumerate(batches):
                    wait_for_previous = wait_for_results
                    wait_for_results = self._score_batch(number, batch) if self.share.is_mine(number) else list
                    results += wait_for_previous()  # while the device computes this batch
                    bar.advance(len(batch.labels_N))
                return results + wait_for_results()

            return _join(self.share.gather(compute), pairs)

    def special_ids(self) -> tuple[int, int, int]:
        """[CLS], [SEP] and [MASK]; refuse a tokenizer without them."""
        first = self.tokenizer.classifier
        mask = self.tokenizer.mask
        if first is None or mask is None:
            raise TextmillError(
                f"{self.checkpoint.folder}: its tokenizer has no mask token such as [MASK], or no [CLS]; use another"
            )
        return first, self.tokenizer.separator, mask

    def _score_batch(self, number: int, batch: MaskedBatch) -> Callable[[], Numbered]:
        """Queue a batch on the device; return a function that waits for its partial scores."""
        check_ids(int(batch.labels_N.min()), int(batch.ids_NT.max()), self.vocab, self.checkpoint.folder)
        wait_for_result = token_log_likelihoods(
            self.net, batch.ids_NT, batch.places_N, batch.labels_N, self.dtype, greedy=True
        )
        return lambda: [(number, _partial_scores(batch, *wait_for_result()))]

    def sum_losses(self, *_: Any, **__: Any) -> StoreLoss:
        """A masked model has no loss of running text."""
        self._refuse()

    def sum_answer_losses(self, *_: Any, **__: Any) -> StoreLoss:
        """The same for answers."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TextmillError(
            f"{self.checkpoint.folder}: a {self.net.shape.family} predicts masked tokens, not the next one, so it has "
            "no perplexity; use evaluate.tasks=pseudo_perplexity"
        )


def _partial_scores(
    batch: MaskedBatch, log_likelihoods_N: NDArray[np.float64], greedy_N: NDArray[np.bool_]
) -> list[list[Any]]:
    """For each pair in the batch: its number, the sum over its copies, whether all are the likeliest tokens, and both
    for its last token if that is in this batch."""
    starts = np.sort(np.unique(batch.numbers_N, return_index=True)[1])
    numbers = batch.numbers_N[starts].tolist()
    sums = np.add.reduceat(log_likelihoods_N, starts).tolist()
    greedy = np.logical_and.reduceat(greedy_N, starts).tolist()
    last_tokens: dict[int, tuple[float, bool]] = {}
    for copy in np.flatnonzero(batch.is_last_N):
        last_tokens[int(batch.numbers_N[copy])] = float(log_likelihoods_N[copy]), bool(greedy_N[copy])
    return [
        [pair, total, all_greedy, *last_tokens.get(pair, (0.0, False))]
        for pair, total, all_greedy in zip(numbers, sums, greedy, strict=True)
    ]


def masked_batches(
    pairs: Sequence[Pair], *, positions: int, special: tuple[int, int, int], batch_tokens: int
) -> Iterator[MaskedBatch]:
    """All copies of all texts, longest first; `special` are [CLS], [SEP] and [MASK]."""
    lengths = np.array([min(len(context) + len(text), positions) for context, text in pairs], np.int64)
    for length in np.unique(lengths)[::-1].tolist():
        numbers = np.flatnonzero(lengths == length)
        rows = max(1, batch_tokens // (length + SPECIAL))
        for begin in range(0, len(numbers), GROUP_TEXTS):
            group = numbers[begin : begin + GROUP_TEXTS]
            yield from _masked_group([pairs[number] for number in group], group, length, special, rows)


def _masked_group(
    pairs: Sequence[Pair], numbers: Ids, length: int, special: tuple[int, int, int], rows: int
) -> Iterator[MaskedBatch]:
    """The copies of texts with `length` tokens, `rows` at a time."""
    first, separator, mask = special
    texts_KT = np.full((len(pairs), length + SPECIAL), separator, np.int64)
    texts_KT[:, 0] = first
    for number, (context, continuation) in enumerate(pairs):
        context_length = length - len(continuation)
        texts_KT[number, 1 : 1 + context_length] = list(context)[len(context) - context_length :]
        texts_KT[number, 1 + context_length : 1 + length] = continuation
    counts = np.array([len(continuation) for _, continuation in pairs], np.int64)
    rows_N = np.repeat(np.arange(len(pairs)), counts)
    columns_N = expand_ranges(length + 1 - counts, counts)
    for begin in range(0, len(rows_N), rows):
        row = rows_N[begin : begin + rows]
        column = columns_N[begin : begin + rows]
        ids_NT = texts_KT[row]
        copies = np.arange(len(row))
        labels_N = ids_NT[copies, column]
        ids_NT[copies, column] = mask
        yield MaskedBatch(ids_NT, copies * ids_NT.shape[1] + column, labels_N, numbers[row], column == length)


def _join(results: Numbered, pairs: Sequence[Pair]) -> list[Score]:
    """The score of each pair, from the partial scores of all batches."""
    sums = np.zeros(len(pairs))
    last = np.zeros(len(pairs))
    greedy = np.ones(len(pairs), bool)
    last_greedy = np.zeros(len(pairs), bool)
    for _, partial_scores in results:
        for pair, total, all_greedy, last_value, is_last_greedy in partial_scores:
            sums[pair] += total
            greedy[pair] &= all_greedy
            last[pair] += last_value
            last_greedy[pair] |= is_last_greedy
    return [
        Score(float(sums[pair]), len(continuation), bool(greedy[pair]), float(last[pair]), bool(last_greedy[pair]))
        for pair, (_, continuation) in enumerate(pairs)
    ]
