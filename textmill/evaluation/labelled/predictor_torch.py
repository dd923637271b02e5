"""Predictor: the logits of a finetuned head for examples, in batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig
from textmill.corpus.labelled import ANSWERS, SEQUENCES, Example
from textmill.devices import autocast, open_device, torch_dtype
from textmill.errors import TextmillError
from textmill.models import check_segments, label_head_of
from textmill.models.nets_torch import open_net
from textmill.tokens.batches.labelled import find_types
from textmill.tokens.labelled import ExampleEncoder, Sample
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

BLOCK = 1024
"""Examples that are read, encoded and sorted by length at a time."""

Logits = NDArray[np.float32]


class Predictor:
    """A model with a finetuned head, ready to predict."""

    def __init__(
        self, checkpoint: Checkpoint, engine: EngineConfig, *, batch: int, length: int | None, overlap: int
    ) -> None:
        self.device = open_device(engine.device)
        self.precision = torch_dtype(engine.precision, self.device)
        self.net = open_net(checkpoint.folder, self.device)
        self.batch = batch
        self.tokenizer = open_tokenizer(checkpoint.tokenizer)
        self.where = str(checkpoint.folder)
        head = label_head_of(self.net.shape)
        assert head is not None
        self.task, self.names = head
        self.length = min(length or self.net.shape.positions, self.net.shape.positions)
        self.overlap = min(overlap, self.length // 2)
        self.encoder = ExampleEncoder(self.tokenizer, self.task, self.length, self.overlap, self.names)
        self.pad_id = self.tokenizer.padding_id

    def predict(self, examples: Iterator[Example]) -> Iterator[tuple[Example, list[Sample], list[Logits]]]:
        """Each example with its samples and their logits.

        [1, classes] of a text, [tokens, classes] of words, [2, tokens] of answers."""
        while block := list(islice(examples, BLOCK)):
            samples_by_example = list(self.encoder.encode(block))  # a long text has several samples
            samples = [sample for example_samples in samples_by_example for sample in example_samples]
            logits_by_sample: dict[int, Logits] = {}
            by_length = sorted(range(len(samples)), key=lambda number: len(samples[number].ids))
            for start in range(0, len(by_length), self.batch):
                numbers = by_length[start : start + self.batch]
                batch_logits = self._logits([samples[number] for number in numbers])
                logits_by_sample.update(zip(numbers, batch_logits, strict=True))
            first = 0
            for example, example_samples in zip(block, samples_by_example, strict=True):
                end = first + len(example_samples)
                yield example, example_samples, [logits_by_sample[number] for number in range(first, end)]
                first = end

    @torch.inference_mode()
    def _logits(self, samples: Sequence[Sample]) -> Iterator[Logits]:
        counts = np.array([len(sample.ids) for sample in samples])
        filled = np.arange(counts.max()) < counts[:, None]
        inputs = np.full(filled.shape, self.pad_id, np.int32)
        inputs[filled] = np.concatenate([sample.ids for sample in samples])
        types = find_types(inputs, filled, self.encoder.sep_id)
        if types.any():
            check_segments(self.net.shape, "corpus.text_key: a pair", "name one text, or use another model")
        ids, segments, documents = (
            torch.from_numpy(array).to(self.device) for array in (inputs, types, filled.astype(np.int32))
        )
        positions = torch.arange(ids.numel(), device=self.device).view(ids.shape)
        positions = positions[:, :1] if self.task == SEQUENCES else positions
        with autocast(self.device, self.precision):
            states = self.net(ids, documents_NT=documents, types_NT=segments)
            logits = self.net.label_logits(states, positions, documents, None).float().cpu().numpy()
        for padded, count in zip(logits, counts.tolist(), strict=True):
            sample_logits = padded[:, :count] if self.task == ANSWERS else padded[:count]
            if not np.isfinite(sample_logits).all():
                raise TextmillError(
                    f"{self.where}: a prediction is not finite; the weights are damaged or training diverged"
                )
            yield sample_logits
