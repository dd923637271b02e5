"""Filler: a model for masked tokens with its tokenizer, and the most likely tokens for each mask of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig
from textmill.devices import open_device, torch_dtype
from textmill.errors import TextmillError
from textmill.generation.encoders.fill_texts import MaskedTexts, new_masked_texts
from textmill.models import check_masked_head
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import open_net
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

DEFAULT_CHOICES = 5
"""Tokens that are shown for a mask if `sample.top_k` does not say."""
BATCH_TOKENS = 8192
"""Tokens of the texts that are computed at the same time."""


@dataclass(frozen=True)
class Choice:
    """A token for a mask."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True)
class Filled:
    """A text with its most likely tokens, and all choices for each of its masks."""

    prompt: str
    text: str
    masks: list[list[Choice]]


class Filler:
    """Fills masks."""

    def __init__(self, net: BaseNet, texts: MaskedTexts, choices: int = 0) -> None:
        self.net = net
        self.texts = texts
        self.tokenizer = texts.tokenizer
        self.mask = texts.mask
        self.choices = choices or DEFAULT_CHOICES

    def fill(self, prompts: Sequence[str], choices: int = 0) -> Iterator[Filled]:
        """Each text in order with this many choices; texts are computed in batches and do not affect each other."""
        encoded = [self.texts.encode(prompt) for prompt in prompts]
        start = 0
        while start < len(encoded):
            stop = start + 1
            longest = len(encoded[start])
            while stop < len(encoded) and (stop + 1 - start) * max(longest, len(encoded[stop])) <= BATCH_TOKENS:
                longest = max(longest, len(encoded[stop]))
                stop += 1
            yield from self._fill(prompts[start:stop], encoded[start:stop], longest, choices or self.choices)
            start = stop

    @torch.inference_mode()
    def _fill(self, prompts: Sequence[str], encoded: Sequence[list[int]], longest: int, count: int) -> Iterator[Filled]:
        device = self.net.head.device
        ids = torch.tensor([one + [self.texts.mask_id] * (longest - len(one)) for one in encoded], device=device)
        documents = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in encoded], device=device)
        states = self.net(ids, documents_NT=documents)
        for row, (prompt, one) in enumerate(zip(prompts, encoded, strict=True)):
            places = [place for place, id_ in enumerate(one) if id_ == self.texts.mask_id]
            chances = self.net.logits(states[row, places]).float().softmax(-1)[:, : self.tokenizer.vocab]
            if not chances.isfinite().all():
                raise TextmillError("a probability is not finite; the weights are damaged or training diverged")
            values, tokens = chances.topk(min(count, chances.shape[1]))
            masks = [
                [Choice(self._text(id_), id_, chance) for id_, chance in zip(*pair, strict=True)]
                for pair in zip(tokens.tolist(), values.tolist(), strict=True)
            ]
            text, *rest = prompt.split(self.mask)
            for choices, after in zip(masks, rest, strict=True):
                text += choices[0].token.removeprefix("##") + after
            yield Filled(prompt, text, masks)

    def _text(self, id_: int) -> str:
        return self.tokenizer.decode([id_]).strip() or str(self.tokenizer.inner.id_to_token(id_))


def open_filler(checkpoint: Checkpoint, engine: EngineConfig, choices: int) -> Filler:
    """Load a checkpoint's net and tokenizer; an adapter is merged into its base."""
    tokenizer = open_tokenizer(checkpoint.tokenizer)
    device = open_device(engine.device)
    net = open_net(checkpoint.folder, device)
    check_masked_head(net.shape, checkpoint.folder)
    texts = new_masked_texts(tokenizer, net.shape.positions, checkpoint.folder)
    return Filler(net.to(torch_dtype(engine.precision, device)), texts, choices)
