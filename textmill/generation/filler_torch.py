"""Filler: a model for masked tokens with its tokenizer, and the most likely tokens for each mask of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig
from textmill.devices import open_device, torch_dtype
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import open_net
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

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

    def __init__(self, net: BaseNet, tokenizer: TextTokenizer, choices: int, where: str) -> None:
        mask, first = tokenizer.mask, tokenizer.classifier
        if mask is None or first is None:
            raise TextmillError(
                f"{where}: its tokenizer has no mask token such as [MASK], or no [CLS]; use another one"
            )
        self.net, self.tokenizer, self.choices = net, tokenizer, min(choices or DEFAULT_CHOICES, net.shape.vocab)
        self.mask_id, self.first_id, self.mask = mask, first, str(tokenizer.inner.id_to_token(mask))

    def check(self, prompt: str) -> None:
        """Refuse a text without a mask, or one that is too long."""
        if self.mask not in prompt:
            raise TextmillError(f"sample.prompt: {prompt[:60]!r} has no {self.mask}; write it where a token is missing")
        if (count := len(self._encode(prompt))) > self.net.shape.positions:
            raise TextmillError(
                f"sample.prompt: {prompt[:60]!r} has {count:,} tokens, the model reads {self.net.shape.positions:,}; "
                "shorten it"
            )

    def fill(self, prompts: Sequence[str]) -> Iterator[Filled]:
        """Each text in order; texts are computed in batches and do not affect each other."""
        encoded = [self._encode(prompt) for prompt in prompts]
        start = 0
        while start < len(encoded):
            stop, longest = start + 1, len(encoded[start])
            while stop < len(encoded) and (stop + 1 - start) * max(longest, len(encoded[stop])) <= BATCH_TOKENS:
                longest = max(longest, len(encoded[stop]))
                stop += 1
            yield from self._fill(prompts[start:stop], encoded[start:stop], longest)
            start = stop

    @torch.inference_mode()
    def _fill(self, prompts: Sequence[str], encoded: Sequence[list[int]], longest: int) -> Iterator[Filled]:
        device = self.net.head.device
        ids = torch.tensor([one + [self.mask_id] * (longest - len(one)) for one in encoded], device=device)
        documents = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in encoded], device=device)
        states = self.net(ids, documents_NT=documents)
        for row, (prompt, one) in enumerate(zip(prompts, encoded, strict=True)):
            places = [place for place, id_ in enumerate(one) if id_ == self.mask_id]
            chances = self.net.logits(states[row, places]).float().softmax(-1)[:, : self.tokenizer.vocab]
            values, tokens = chances.topk(min(self.choices, chances.shape[1]))
            masks = [
                [Choice(self._text(id_), id_, chance) for id_, chance in zip(*pair, strict=True)]
                for pair in zip(tokens.tolist(), values.tolist(), strict=True)
            ]
            text = prompt
            for choices in masks:
                text = text.replace(self.mask, choices[0].token.removeprefix("##"), 1)
            yield Filled(prompt, text, masks)

    def _encode(self, prompt: str) -> list[int]:
        """[CLS], the text with its masks, [SEP]; other text that looks like a special token is plain text."""
        ids: list[int] = [self.first_id]
        for number, part in enumerate(prompt.split(self.mask)):
            ids += [self.mask_id] if number else []
            ids += self.tokenizer.encode(part)
        return [*ids, self.tokenizer.separator]

    def _text(self, id_: int) -> str:
        return self.tokenizer.decode([id_]).strip() or str(self.tokenizer.inner.id_to_token(id_))


def open_filler(checkpoint: Checkpoint, engine: EngineConfig, choices: int) -> Filler:
    """Load a checkpoint's net and tokenizer; an adapter is merged into its base."""
    tokenizer, device = open_tokenizer(checkpoint.tokenizer), open_device(engine.device)
    net = open_net(checkpoint.folder, device)
    if open_family(net.shape.family).OBJECTIVE != "masked":
        raise TextmillError(
            f"{checkpoint.folder}: a {net.shape.family} predicts the next token, not masked ones; "
            f"use: textmill generate {checkpoint.folder}"
        )
    if not getattr(net.shape, "masked_head", True):
        raise TextmillError(
            f"{checkpoint.folder}: has no head for masked tokens, so it cannot fill them in; use a folder of "
            "BertForMaskedLM or BertForPreTraining"
        )
    return Filler(net.to(torch_dtype(engine.precision, device)), tokenizer, choices, str(checkpoint.folder))
