"""A small checkpoint with its tokenizer, and generators that produce a fixed text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.small_models import TEXT, write_model
from textmill.checkpoints.folders import Checkpoint
from textmill.config import TokenizerConfig, TorchEngine
from textmill.generation.generator import Generator, open_generator
from textmill.models.gpt2 import family as gpt2
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit


class Parrot(nn.Module):
    """A net with a shape and no computation."""

    def __init__(self, shape: gpt2.Shape) -> None:
        super().__init__()
        self.shape, self.weight = shape, nn.Parameter(torch.zeros(1))


class ParrotSlots:
    """Slots whose next token depends on the position only."""

    def __init__(self, net: Parrot, ids: list[int], slots: int, length: int) -> None:
        self.net, self.ids, self.slots, self.length, self.device = net, ids, slots, length, torch.device("cpu")

    def prefill(self, first: int, contexts: list[list[int]]) -> Tensor:
        return torch.zeros(len(contexts), max(map(len, contexts)), 1)

    def decode(self, ids_N: Tensor, places: list[int]) -> Tensor:
        return nn.functional.one_hot(torch.tensor([self.ids[place] for place in places]), self.net.shape.vocab) * 100.0

    def move(self, source: int, target: int, used: int) -> None:
        pass


class ParrotGenerator(Generator):
    """Generates a fixed text for any prompt, from the second position on, then ends."""

    def __init__(self, shape: gpt2.Shape, tokenizer: TextTokenizer, text: str) -> None:
        self.text_ids = tokenizer.encode(text)
        super().__init__(Parrot(dataclasses.replace(shape, positions=len(self.text_ids) + 8)), tokenizer)

    def new_slots(self, slots: int, length: int) -> ParrotSlots:
        return ParrotSlots(self.net, [*self.text_ids, *[self.tokenizer.eos_id] * 8], slots, length)


@pytest.fixture(scope="session")
def parrot_of(shape: gpt2.Shape, tokenizer: TextTokenizer) -> Callable[[str], Generator]:
    """Return a function that makes a generator of a fixed text."""
    return lambda text: ParrotGenerator(shape, tokenizer, text)


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    """Byte-level BPE with few merges, so that most characters beyond ASCII are several tokens."""
    return fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))


@pytest.fixture(scope="session")
def shape(tokenizer: TextTokenizer) -> gpt2.Shape:
    """A net with two small blocks."""
    return gpt2.Shape(
        layers=2, heads=2, width=32, inner=128, positions=96, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
    )


@pytest.fixture(scope="session")
def engine() -> TorchEngine:
    """The CPU in fp32."""
    return TorchEngine(device="cpu", precision="fp32")


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoint's run."""
    return tmp_path_factory.mktemp("generation") / "run"


@pytest.fixture(scope="session")
def checkpoint(run_folder: Path, tokenizer: TextTokenizer, shape: gpt2.Shape) -> Checkpoint:
    """The checkpoint, written to disk."""
    return write_model(run_folder, tokenizer, shape)


@pytest.fixture(scope="session")
def generator(checkpoint: Checkpoint, engine: TorchEngine) -> Generator:
    """The checkpoint, opened."""
    return open_generator(checkpoint, engine)
