"""What the planner knows of a text and of a machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TextFacts:
    """A text, as far as planning needs it."""

    bytes: int
    """Bytes of text, markup and compression not counted."""
    documents: int
    """Estimated number of documents."""
    duplicates: float
    """The fraction of the sample's bytes in documents that occurred before."""
    bytes_per_token: Mapping[int, float]
    """By vocabulary size, on documents that the trial vocabulary was not fitted on."""
    scripts: Mapping[str, float]
    """The fraction of letters in each script, the most frequent first."""
    section: int = 0
    """`corpus.section_chars` for plain text; 0: documents are given."""
    cut_records: bool = False
    """Whether records are cut into sections too, as plain text is."""
    typical_document_bytes: float = 0.0
    """Mean bytes of the documents, weighted by their bytes: where most of the text is, even if most documents are
    short."""
    train_fraction: float = 0.9
    """The part of the text in the train split."""

    @property
    def train_bytes(self) -> float:
        """Bytes of text in the train split, duplicates removed."""
        return self.bytes * self.train_fraction * (1 - self.duplicates)

    @property
    def different_documents(self) -> int:
        """Estimated number of documents, duplicates removed."""
        return max(1, round(self.documents * (1 - self.duplicates)))

    @property
    def document_bytes(self) -> float:
        """Mean bytes of a document."""
        return self.bytes / max(1, self.documents)


@dataclass(frozen=True)
class MachineFacts:
    """A machine, as far as planning needs it."""

    device: str
    """cpu or cuda."""
    name: str
    cores: int
    memory: int
    """Bytes of the device's memory."""
    rates: tuple[tuple[int, float], tuple[int, float]]
    """(parameters, achieved operations per second) of a small and a larger net in training; compiled on a GPU."""
    startup_seconds: float
    """Seconds of a command that are not work on text or steps: imports, saving, evaluating."""

    def flops(self, parameters: float) -> float:
        """Achieved operations per second with a net of so many parameters: a power law through the two measured
        ones."""
        (small, slow), (large, fast) = self.rates
        power = math.log(fast / slow) / math.log(large / small)
        bounded = min(max(parameters, small / 4), large * 8)
        return slow * math.pow(bounded / small, max(0.0, min(1.0, power)))
