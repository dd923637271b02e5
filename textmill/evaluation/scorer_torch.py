"""Scorers of torch nets: TorchScorer for nets that predict the next token, MaskedScorer for nets of masked tokens.

`score_tokens` scores (context, continuation) pairs, packed by packing.py; tasks with choices use it. `sum_losses`
slides windows over a token store, for perplexity; `sum_answer_losses` reads conversations. MaskedScorer computes
pseudo-log-likelihoods (Salazar et al. 2020): each token of a text is masked in turn and predicted from all others. All
compute with `token_log_likelihoods`. While the device computes a batch, the host prepares the next one.

Shapes in names: N rows, T tokens, E width, V vocabulary, M labels, H heads, D head width, S all tokens of a batch.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig
from textmill.devices import PendingCopy, autocast, copy_to_device, open_device, torch_dtype
from textmill.errors import TextmillError
from textmill.evaluation.measured_task import warn_if_foreign_tokenizer
from textmill.evaluation.metrics import check_finite
from textmill.evaluation.packing import Rows, Tree, build_trees, fill_rows, pack
from textmill.evaluation.task import ALL_BATCHES, LossPart, Numbered, Pair, Score, Share, StoreLoss
from textmill.kernels.cross_entropy_triton import cross_entropy_and_correct
from textmill.kernels.triton_support import can_run_kernels
from textmill.models import check_masked_head, check_next_token, open_family
from textmill.models.base_torch import BaseNet, Cache
from textmill.models.decode_torch import net_slots
from textmill.models.nets_torch import open_net
from textmill.ranges import expand_ranges
from textmill.storage.progress import progress
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.chat import ChatLayout
from textmill.tokens.batches.packed import count_windows, window_batches
from textmill.tokens.store import TokenStore
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

GPU_ROW_TOKENS = 512
CPU_ROW_TOKENS = 0
"""Short texts share rows of at least this many tokens; on a CPU texts of similar length are rows of one batch."""
CPU_BATCH_TOKENS = 4096
"""Tokens in one forward pass on a CPU: more do not fit into its caches."""


def open_scorer(checkpoint: Checkpoint, engine: EngineConfig, batch: int) -> TorchScorer:
    """Load a checkpoint to score with it; `batch` windows of the model's length are read at a time."""
    net = open_net(checkpoint.folder, open_device(engine.device))
    check_next_token(net.shape, checkpoint.folder, "score a text token by token")
    scorer = new_scorer(checkpoint, net, open_tokenizer(checkpoint.tokenizer), engine.precision, batch)
    assert isinstance(scorer, TorchScorer)
    return scorer


def new_scorer(
    checkpoint: Checkpoint,
    net: BaseNet,
    tokenizer: TextTokenizer,
    precision: str,
    batch: int,
    share: Share = ALL_BATCHES,
) -> TextScorer:
    """A scorer of a net that is already loaded: of the next token, or of masked ones."""
    shape = net.shape
    if tokenizer.vocab > shape.vocab:
        raise TextmillError(
            f"{checkpoint.folder}: its tokenizer has {tokenizer.vocab:,} entries, its embedding "
            f"{shape.vocab:,} rows; use the tokenizer that the model was trained with"
        )
    dtype = torch_dtype(precision, net.head.device)
    if open_family(shape.family).OBJECTIVE == "masked":
        check_masked_head(shape, checkpoint.folder)
        masked = MaskedScorer(checkpoint, net, tokenizer, batch, dtype, share)
        masked.special_ids()
        if masked.positions < 1:
            raise TextmillError(
                f"{checkpoint.folder}: has {shape.positions} positions, and [CLS] and [SEP] take two; use a model "
                "with more"
            )
        return masked
    scorer = TorchScorer(checkpoint, net, tokenizer, batch, dtype, share)
    warn_if_foreign_tokenizer(scorer, shape.eos_id)
    return scorer


T = TypeVar("T")
ENCODED_TEXTS = 4096
"""Texts that are encoded at a time."""


@dataclass(frozen=True)
class TextScorer(ABC):
    """One checkpoint, ready to score text. Which model family it is does not matter to a task."""

    checkpoint: Checkpoint
    net: BaseNet
    tokenizer: TextTokenizer
    batch: int
    """Windows in one forward pass."""
    dtype: torch.dtype = torch.float32
    share: Share = ALL_BATCHES
    """The part of the work that this process does."""

    objective: ClassVar[str]
    """What the model predicts: next_token, or masked."""

    @property
    def positions(self) -> int:
        """The longest input of the model, in tokens; of a masked model, without the special tokens around a text."""
        return int(self.net.shape.positions)

    @property
    def vocab(self) -> int:
        """How many tokens the model knows."""
        return int(self.net.shape.vocab)

    @property
    def precision(self) -> str:
        """The arithmetic it computes in, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self.net.head.device)

    @abstractmethod
    def score_tokens(self, pairs: Sequence[Pair]) -> list[Score]:
        """Score each (context, continuation) of token ids, of any lengths, in the order given.

        Give all pairs at once: texts are packed without padding, and a context that several pairs share is computed
        once. A context that is too long for the model loses its first tokens; a continuation that is too long is
        refused.
        """

    def score_texts(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """Score each (context, continuation), in the order given.

        Both are encoded as one text, so that tokens are those of running text; spaces at the end of the context count
        to the continuation. An empty context is the tokenizer's begin token, or its end-of-text token if there is
        none.
        """
        return self.score_tokens(self.encode_pairs(pairs))

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
        """The token ids of each (context, continuation), as `score_texts` scores them."""
        encoded: list[Pair] = []
        for begin in range(0, len(pairs), ENCODED_TEXTS):
            block = [_move_spaces(*pair) for pair in pairs[begin : begin + ENCODED_TEXTS]]
            contexts = list(dict.fromkeys(context for context, _ in block))
            whole_texts = self.tokenizer.encode_many([context + continuation for context, continuation in block])
            ids_by_context = dict(zip(contexts, self.tokenizer.encode_many(contexts), strict=True))
            for (context, _), ids in zip(block, whole_texts, strict=True):
                context_ids = ids_by_context[context]
                encoded.append((context_ids.tolist(), ids[len(context_ids) :].tolist()))
        return encoded

    def log_likelihoods(
        self,
        ids_NT: NDArray[np.int64],
        places_M: NDArray[np.int64],
        labels_M: NDArray[np.int64],
        *,
        cache: Cache | None = None,
        greedy: bool = False,
    ) -> Callable[[], Result]:
        """`token_log_likelihoods` of this net; a number that is not finite is an error, whatever it is used for."""
        wait = token_log_likelihoods(self.net, ids_NT, places_M, labels_M, self.dtype, cache=cache, greedy=greedy)

        def wait_and_check() -> Result:
            log_likelihoods_M, greedy_M = wait()
            check_finite(-log_likelihoods_M, self.checkpoint.folder)
            return log_likelihoods_M, greedy_M

        return wait_and_check

    def gather_scores(
        self, batches: Iterable[T], queue: Callable[[int, T], Callable[[], Numbered]], advance: Callable[[T], None]
    ) -> Numbered:
        """The results of all batches: `queue` starts the work on one and returns a function that waits for it."""

        def compute() -> Numbered:
            results: Numbered = []
            wait_for_results: Callable[[], Numbered] = list
            for number, batch in enumerate(batches):
                wait_for_previous = wait_for_results
                wait_for_results = queue(number, batch) if self.share.is_mine(number) else list
                results += wait_for_previous()  # while the device computes this batch
                advance(batch)
            return results + wait_for_results()

        return self.share.gather(compute)

    def check_lengths(self, pairs: Sequence[Pair]) -> None:
        """Refuse a continuation without tokens, or one that is longer than the model's positions."""
        for _, continuation in pairs:
            if not 0 < len(continuation) <= self.positions:
                raise TextmillError(
                    f"{self.checkpoint.folder}: a continuation has {len(continuation):,} tokens; "
                    f"the model scores from 1 to {self.positions:,}"
                )


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Spaces at the end of the context belong to the first token of the continuation: ("A: ", "b") -> ("A:", " b")."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def check_ids(lowest: int, highest: int, vocab: int, where: Path) -> None:
    """Refuse ids that the model does not know."""
    if highest >= vocab or lowest < 0:
        raise TextmillError(
            f"{where}: token ids from {lowest} to {highest} found, the model knows {vocab:,}; "
            f"tokenize with the model's own tokenizer"
        )


@dataclass(frozen=True)
class TorchScorer(TextScorer):
    """A net for the next token with its tokenizer."""

    objective = "next_token"

    @property
    def _added_ids(self) -> list[int]:
        return [self.tokenizer.first_id] if self.tokenizer.adds_bos else []

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
        """The token ids of each (context, continuation), after a begin token if the tokenizer's files add one to every
        text; an empty context stays empty, and is scored as the tokenizer's first token."""
        added = self._added_ids
        encoded = super().encode_pairs(pairs)
        return [
            ([*added, *context], continuation) if context else ([], continuation) for context, continuation in encoded
        ]

    def score_tokens(self, pairs: Sequence[Pair]) -> list[Score]:
        """Score each (context, continuation) and return the scores in the order given.

        A context that several pairs have is computed once. Rows have texts of similar length, or several texts."""
        self._check(pairs)
        # Only attention can distinguish several texts of a row.
        alone = not self.net.has_attention_cache
        trees = build_trees(pairs, first=self.tokenizer.first_id, positions=self.positions, alone=alone)
        is_cpu = self.net.head.device.type == "cpu"
        batch_tokens = self.batch * self.positions
        batches = pack(
            trees,
            row_tokens=CPU_ROW_TOKENS if is_cpu else GPU_ROW_TOKENS,
            batch_tokens=min(batch_tokens, CPU_BATCH_TOKENS) if is_cpu else batch_tokens,
            alone=alone,
        )
        total = sum(tree.tokens for tree in trees)
        with progress("score", total=total, unit="tokens", second_unit="texts") as bar:

            def advance(packed: list[list[Tree]]) -> None:
                batch_trees = [tree for row in packed for tree in row]
                bar.advance(sum(tree.tokens for tree in batch_trees), sum(tree.texts for tree in batch_trees))

            results = self.gather_scores(batches, lambda _, packed: self._score_rows(packed), advance)
        return [Score(*values) for _, values in results]

    def _check(self, pairs: Sequence[Pair]) -> None:
        self.check_lengths(pairs)
        ids = np.fromiter(chain.from_iterable(chain.from_iterable(pairs)), np.int64)
        check_ids(int(ids.min(initial=0)), int(ids.max(initial=0)), self.vocab, self.checkpoint.folder)

    def _score_rows(self, packed: list[list[Tree]]) -> Callable[[], Numbered]:
        """Queue a batch on the device; return a function that waits for its scores, by the number of the pair."""
        rows = fill_rows(packed, self.tokenizer.eos_id)
        cache = None if rows.is_causal else TreeAttention(rows, self.net.head.device)
        wait_for_result = self.log_likelihoods(rows.ids_NT, rows.places_M, rows.labels_M, cache=cache, greedy=True)
        return lambda: _scores_of(rows, *wait_for_result())

    def sum_losses(
        self,
        store: TokenStore,
        *,
        length: int,
        stride: int,
        predict_first: bool = True,
        sample: int | None = None,
        seed: int = 0,
    ) -> StoreLoss:
        """Sum the loss of every token of a store once, in windows of `length` tokens that start every `stride` tokens.

        The first token is predicted from the tokenizer's first token, or is only context. With `sample`, only so many
        random windows are read.
        """
        first_input = self.tokenizer.first_id if predict_first else None
        count = count_windows(store, length=length, stride=stride, first_input=first_input)
        windows = _sample_windows(count, sample, seed)
        document_ends = np.cumsum(np.asarray(store.lengths, np.int64))
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
                wait_for_parts: Callable[[], Numbered] = list
                for number, batch in zip(own_batches, batches, strict=True):
                    labels = batch.labels
                    # A short text does not fill its window, which can have tens of thousands of tokens.
                    used = 1 + int(np.flatnonzero((labels != IGNORED).any(0)).max(initial=0))
                    starts = windows[number * self.batch :][: len(labels)] * stride + (first_input is None)
                    documents_NT = np.searchsorted(document_ends, starts[:, None] + np.arange(used), "right")
                    wait_for_previous = wait_for_parts
                    wait_for_parts = self._queue_parts(
                        number, batch.inputs[:, :used], labels[:, :used], documents_NT, store.prefix
                    )
                    results += wait_for_previous()  # while the device computes this batch
                    bar.advance(len(labels) * self.share.parts, int((labels != IGNORED).sum()))
                    self.share.ranks.report_progress()
                return results + wait_for_parts()

            parts = [LossPart(*part) for _, result in self.share.gather(compute) for part in result]
        loss = float(np.sum([part.loss for part in parts]))
        return StoreLoss(loss, sum(part.tokens for part in parts), 0, len(windows), parts)

    def sum_answer_losses(self, store: TokenStore, *, length: int) -> StoreLoss:
        """Sum the loss of the assistant tokens of a store of conversations, and count those that are the likeliest.

        Each conversation is read alone in a window of `length` tokens; a longer one is truncated at its start.
        """
        layout = ChatLayout(store, length=length, seed=None, pad_id=self.tokenizer.eos_id, pack=False, vocab=self.vocab)
        starts = range(0, layout.samples_per_epoch, self.batch)
        with progress("evaluate", total=layout.samples_per_epoch, unit="conversations") as bar:

            def compute() -> Numbered:
                results: Numbered = []
                for number, begin in enumerate(starts):
                    samples = np.arange(begin, min(begin + self.batch, layout.samples_per_epoch), dtype=np.int64)
                    if self.share.is_mine(number):
                        arrays = layout.build_samples(samples)
                        log_likelihoods_M, greedy_M = self._score_labels(
                            arrays.inputs, arrays.labels, store.prefix, greedy=True
                        )()
                        loss = -float(log_likelihoods_M.sum())
                        results.append((number, [loss, len(log_likelihoods_M), int(greedy_M.sum())]))
                    bar.advance(len(samples))
                return results

            results = [result for _, result in self.share.gather(compute)]
        loss = sum(batch_loss for batch_loss, _, _ in results)
        tokens = sum(batch_tokens for _, batch_tokens, _ in results)
        correct = sum(batch_correct for _, _, batch_correct in results)
        return StoreLoss(loss, tokens, correct)

    @torch.inference_mode()
    def write_texts(self, prompts: Sequence[str], stops: Sequence[str], max_tokens: int) -> list[str]:
        """The likeliest continuation of each prompt, token by token, up to the first stop text."""
        with progress("generate", total=len(prompts), unit="texts") as bar:

            def compute() -> Numbered:
                texts: Numbered = []
                for number, prompt in enumerate(prompts):
                    if self.share.is_mine(number):
                        texts.append((number, self._write_text(prompt, stops, max_tokens)))
                    bar.advance(1)
                return texts

            return [text for _, text in self.share.gather(compute)]

    def _write_text(self, prompt: str, stops: Sequence[str], max_tokens: int) -> str:
        """One text; a prompt that leaves no space for `max_tokens` loses its first tokens."""
        device = self.net.head.device
        max_tokens = min(max_tokens, self.positions - 1)
        ids = [*self._added_ids, *self.tokenizer.encode(prompt)] or [self.tokenizer.first_id]
        ids = ids[-(self.positions - max_tokens) :]
        written: list[int] = []
        text = ""
        with autocast(device, self.dtype):
            slots = net_slots(self.net, 1, self.positions, self.dtype)
            logits_V = self.net.logits(slots.prefill(0, [ids])[0, -1])
            for position in range(len(ids), len(ids) + max_tokens):
                token = int(logits_V.argmax())
                check_finite(float(logits_V[token]), self.checkpoint.folder)
                if token in self.tokenizer.end_ids:
                    break
                written.append(token)
                text = self.tokenizer.inner.decode(written, skip_special_tokens=True)
                if any(stop in text for stop in stops):
                    break
                logits_V = slots.decode(torch.tensor([token], device=device), [position])[0]
        return min((text.split(stop)[0] for stop in stops), key=len, default=text)

    def _score_labels(
        self, inputs: NDArray[np.int32], labels: NDArray[np.int32], where: Path, greedy: bool = False
    ) -> Callable[[], Result]:
        """Queue a batch; the log-likelihood of each label that is not ignored, in their order, and whether it is the
        likeliest."""
        check_ids(int(inputs.min()), int(max(inputs.max(), labels.max())), self.vocab, where)
        has_loss_NT = labels != IGNORED
        if not has_loss_NT.any():
            return lambda: (np.zeros(0), np.zeros(0, np.bool_))
        labels_M = labels[has_loss_NT].astype(np.int64)
        return self.log_likelihoods(inputs.astype(np.int64), np.flatnonzero(has_loss_NT), labels_M, greedy=greedy)

    def _queue_parts(
        self,
        number: int,
        inputs: NDArray[np.int32],
        labels: NDArray[np.int32],
        documents_NT: NDArray[np.int64],
        where: Path,
    ) -> Callable[[], Numbered]:
        """Queue a batch; the loss of each document in each of its rows, by the batch's number."""
        wait_for_result = self._score_labels(inputs, labels, where)
        rows_M, columns_M = np.nonzero(labels != IGNORED)
        documents_M = documents_NT[rows_M, columns_M]
        is_first_M = np.ones(len(rows_M), np.bool_)
        is_first_M[1:] = (np.diff(rows_M) != 0) | (np.diff(documents_M) != 0)
        starts = np.flatnonzero(is_first_M)
        counts = np.diff(starts, append=len(rows_M))

        def wait_for_parts() -> Numbered:
            log_likelihoods_M, _ = wait_for_result()
            losses = np.add.reduceat(-log_likelihoods_M, starts) if len(starts) else log_likelihoods_M
            return [(number, list(map(LossPart, documents_M[starts].tolist(), losses.tolist(), counts.tolist())))]

        return wait_for_parts


def _scores_of(rows: Rows, log_likelihoods_M: NDArray[np.float64], greedy_M: NDArray[np.bool_]) -> Numbered:
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
    return [
        (pair, list(values)) for pairs, values in zip(rows.pairs, values_by_continuation, strict=True) for pair in pairs
    ]


def _sample_windows(count: int, sample: int | None, seed: int) -> NDArray[np.int64]:
    """The numbers of the windows to read: all of them, or a random sample in order."""
    if sample is None or sample >= count:
        return np.arange(count, dtype=np.int64)
    return np.sort(np.random.default_rng(seed).choice(count, sample, replace=False)).astype(np.int64)


MAX_LOGITS = 1 << 26
MAX_KERNEL_LOGITS = 1 << 28
"""Logits held at once, however large the vocabulary: 256 MiB in fp32; with the kernel, 512 MiB in bf16."""


Result = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""The log-likelihood of each label, and whether it is the likeliest token."""


@torch.inference_mode()
def token_log_likelihoods(
    net: BaseNet,
    ids_NT: NDArray[np.int64],
    places_M: NDArray[np.int64],
    labels_M: NDArray[np.int64],
    precision: torch.dtype,
    *,
    cache: Cache | None = None,
    greedy: bool = False,
) -> Callable[[], Result]:
    """Queue the work on the device and return a function that waits for the result.

    Without `greedy`, the second array of the result is empty, unless a kernel computes it anyway.
    """
    device = net.head.device
    with autocast(device, precision):
        hidden_NTE = net(copy_to_device(ids_NT, device), cache=cache)
        hidden_SE = hidden_NTE.flatten(0, 1)
        if can_use_kernel(net):
            return _with_kernel(net, hidden_SE, places_M, labels_M, precision)
        result = _with_torch(net, hidden_SE, places_M, labels_M, greedy)
        return lambda: result


def can_use_kernel(net: BaseNet) -> bool:
    """True for a net on a GPU that has all rows of the head; else `net.logits` computes them.

    The kernel reads the logits of a token once, where torch reads and writes them several times."""
    return can_run_kernels(net.head) and len(net.head) >= net.shape.vocab


def _with_kernel(
    net: BaseNet, hidden_SE: Tensor, places_M: NDArray[np.int64], labels_M: NDArray[np.int64], precision: torch.dtype
) -> Callable[[], Result]:
    """Logits row by row in a kernel; a place that predicts several labels is computed for each."""
    places, labels = (copy_to_device(array, hidden_SE.device) for array in (places_M, labels_M))
    block_rows = max(1, MAX_KERNEL_LOGITS // net.shape.padded_vocab)
    head_VE = net.head.to(precision)
    bias_V = None if net.head_bias is None else net.head_bias.to(precision)
    blocks: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(places), block_rows):
        block = slice(start, start + block_rows)
        x_RE = net.head_input(hidden_SE[places[block]])
        logits_RV = F.linear(x_RE.to(precision), head_VE, bias_V)
        blocks.append(cross_entropy_and_correct(logits_RV, labels[block], net.shape.vocab))
    losses, correct = (PendingCopy(torch.cat(tensors)) for tensors in zip(*blocks, strict=True))
    return lambda: (-losses.array().astype(np.float64), correct.array().astype(np.bool_))


def _with_torch(
    net: BaseNet, hidden_SE: Tensor, places_M: NDArray[np.int64], labels_M: NDArray[np.int64], greedy: bool
) -> Result:
    """Logits of each distinct place once, block by block; the labels are sorted by place, and unsorted at the end."""
    device = hidden_SE.device
    places_U, index_M = np.unique(places_M, return_inverse=True)  # index_M: which of places_U predicts a label
    order_M = np.argsort(index_M, kind="stable")
    indices, labels = (torch.from_numpy(array[order_M]).to(device) for array in (index_M, labels_M))
    hidden_UE = hidden_SE[torch.from_numpy(places_U).to(device)]
    block_rows = max(1, MAX_LOGITS // net.shape.padded_vocab)
    label_bounds = np.searchsorted(index_M[order_M], np.arange(0, len(places_U) + block_rows, block_rows))
    log_likelihoods: list[Tensor] = []
    is_likeliest: list[Tensor] = []
    for block, (begin, end) in enumerate(itertools.pairwise(label_bounds)):
        start = block * block_rows
        logits_RV = net.logits(hidden_UE[start : start + block_rows]).float()
        row = indices[begin:end] - start
        label = labels[begin:end]
        chosen = logits_RV[row, label]
        highest_R, likeliest_R = logits_RV.max(-1)
        # Log-sum-exp in the memory of the logits: torch's function would allocate, and read, as much again.
        normalizer_R = logits_RV.sub_(highest_R[:, None]).exp_().sum(-1).log_().add_(highest_R)
        log_likelihoods.append(chosen - normalizer_R[row])
        if greedy:
            is_likeliest.append(likeliest_R[row] == label)
    unsort_M = np.argsort(order_M, kind="stable")
    log_likelihoods_M = torch.cat(log_likelihoods).double().cpu().numpy()[unsort_M]
    greedy_M = torch.cat(is_likeliest).cpu().numpy()[unsort_M] if greedy else np.zeros(0, np.bool_)
    return log_likelihoods_M, greedy_M


class TreeAttention(Cache):
    """Takes the place of the KV cache: it holds nothing, and lets tokens attend to those of their own text."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.positions_NT = copy_to_device(rows.positions_NT, device)
        last_NT = copy_to_device(rows.last_NT, device)
        queries_T1 = torch.arange(last_NT.shape[1], device=device)[:, None]
        self.mask_N1TT = (queries_T1 <= last_NT[:, None, None]).tril()

    def attend(self, layer: int, q_NHTD: Tensor, k_NHTD: Tensor, v_NHTD: Tensor) -> Tensor:
        """Attention of a layer; there may be fewer key heads than query heads (grouped-query attention)."""
        grouped = q_NHTD.shape[1] != k_NHTD.shape[1]
        return F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, attn_mask=self.mask_N1TT, enable_gqa=grouped)


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
    """A net for masked tokens with its tokenizer; scores are pseudo-log-likelihoods."""

    objective = "masked"

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
            results = self.gather_scores(batches, self._score_batch, lambda batch: bar.advance(len(batch.labels_N)))
        return _join(results, pairs)

    def special_ids(self) -> tuple[int, int, int]:
        """[CLS], [SEP] and [MASK]; refuse a tokenizer without them."""
        first = self.tokenizer.cls_id
        mask = self.tokenizer.mask_id
        if first is None or mask is None:
            raise TextmillError(
                f"{self.checkpoint.folder}: its tokenizer has no mask token such as [MASK], or no [CLS]; use another"
            )
        return first, self.tokenizer.sep_id, mask

    def _score_batch(self, number: int, batch: MaskedBatch) -> Callable[[], Numbered]:
        """Queue a batch on the device; return a function that waits for its partial scores."""
        check_ids(int(batch.labels_N.min()), int(batch.ids_NT.max()), self.vocab, self.checkpoint.folder)
        wait_for_result = self.log_likelihoods(batch.ids_NT, batch.places_N, batch.labels_N, greedy=True)
        return lambda: [(number, _partial_scores(batch, *wait_for_result()))]


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
