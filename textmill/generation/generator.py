"""Generator: a checkpoint in memory that continues texts, piece by piece or many at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from textmill.checkpoint import Checkpoint
from textmill.config import SampleConfig, TorchEngine
from textmill.devices import open_device, precision_of
from textmill.errors import TextmillError, warn
from textmill.generation.sampling import next_ids
from textmill.models.nets_torch import Net, new_cache, open_net
from textmill.tokens.tokenizer import TextTokenizer, open_tokenizer

TOGETHER = 32
"""Samples that go through the net at a time, at most."""
BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Sample:
    """One continuation and what it came from."""

    prompt: str
    text: str
    seed: int
    tokens: int
    """New tokens, the end-of-text token not counted."""


class TextStream:
    """Ids in, text out as soon as it is sure: a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: TextTokenizer, context: list[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(context)
        # Decoding begins a little before the new ids, since a tokenizer may write a first token otherwise than a later one.
        self.start, self.said, self.tokens = 0, len(context), 0

    def add(self, id_: int) -> str:
        """The text that one more id settles; often none."""
        self.ids.append(id_)
        self.tokens += 1
        text = self._unsaid()
        if not text or text.endswith(BROKEN):
            return ""
        self.start, self.said = self.said, len(self.ids)
        return text

    def end(self) -> str:
        """What was held back; bytes that never became a character are shown as replacement characters."""
        return self._unsaid()

    def _unsaid(self) -> str:
        before = self.tokenizer.decode(self.ids[self.start : self.said])
        return self.tokenizer.decode(self.ids[self.start :])[len(before) :]


class Generator:
    """A net and its tokenizer; a text is a function of the prompt, the settings and the seed."""

    def __init__(self, net: Net, tokenizer: TextTokenizer) -> None:
        self.net, self.tokenizer = net, tokenizer
        self.device = next(parameter.device for _, parameter in net.named_parameters())
        self._cut_said = False

    def stream(self, prompt: str, sample: SampleConfig) -> Iterator[str]:
        """The continuation as it comes, never splitting a character; its pieces joined are the whole text."""
        context = self.context_of(prompt)
        room = self._room(len(context), sample)
        return self._pieces(context, room, sample)

    def sample(self, prompt: str, sample: SampleConfig) -> Sample:
        """One whole continuation, the same text as `stream` gives."""
        return self._samples([self.context_of(prompt)], [prompt], [sample.seed], sample)[0]

    def texts(self, prompts: list[str], sample: SampleConfig) -> list[str]:
        """A continuation of each prompt; the first has the seed of the settings, the next one more, and so on."""
        return [one.text for one in self.samples(prompts, sample)]

    def samples(self, prompts: list[str], sample: SampleConfig) -> list[Sample]:
        """What `texts` gives, with seeds and counts; prompts of one length go through the net together."""
        contexts = [self.context_of(prompt) for prompt in prompts]
        lengths: dict[int, list[int]] = {}
        for place, context in enumerate(contexts):
            lengths.setdefault(len(context), []).append(place)
        done: dict[int, Sample] = {}
        for places in lengths.values():
            for begin in range(0, len(places), TOGETHER):
                part = places[begin : begin + TOGETHER]
                seeds = [sample.seed + place for place in part]
                found = self._samples([contexts[place] for place in part], [prompts[place] for place in part], seeds, sample)
                done.update(zip(part, found, strict=True))
        return [done[place] for place in range(len(prompts))]

    def context_of(self, prompt: str) -> list[int]:
        """What the net sees first: the prompt's ids, or the end-of-text token where there are none."""
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise TextmillError("sample.prompt: holds half of a character pair; give it as UTF-8 text") from None
        return self.tokenizer.encode(prompt) or [self.tokenizer.end]

    def _room(self, length: int, sample: SampleConfig) -> int:
        """New tokens that are asked and fit after a context."""
        positions: int = self.net.shape.positions
        if length > positions - 1:
            raise TextmillError(
                f"sample.prompt: {length:,} tokens; the model sees {positions:,} at a time, one of them new; give {positions - 1:,} at most"
            )
        fits = positions - length
        if sample.slide:
            return sample.max_tokens
        if sample.max_tokens > fits and not self._cut_said:
            self._cut_said = True
            cut = f"a context of {length:,} tokens leaves room for {fits:,} new ones, less than sample.max_tokens={sample.max_tokens}"
            warn(cut)
        return min(sample.max_tokens, fits)

    def _pieces(self, context: list[int], room: int, sample: SampleConfig) -> Iterator[str]:
        text = TextStream(self.tokenizer, context)
        for ids in self._steps([context], [sample.seed], room, sample):
            if ids[0] == self.tokenizer.end:
                break
            if piece := text.add(ids[0]):
                yield piece
        if piece := text.end():
            yield piece

    def _samples(self, contexts: list[list[int]], prompts: list[str], seeds: list[int], sample: SampleConfig) -> list[Sample]:
        """Continuations of contexts of one length, step by step together until the last of them ends."""
        streams = [TextStream(self.tokenizer, context) for context in contexts]
        texts, ended = [""] * len(contexts), [False] * len(contexts)
        for ids in self._steps(contexts, seeds, self._room(len(contexts[0]), sample), sample):
            for row, id_ in enumerate(ids):
                ended[row] = ended[row] or id_ == self.tokenizer.end
                if not ended[row]:
                    texts[row] += streams[row].add(id_)
            if all(ended):
                break
        made = zip(prompts, texts, seeds, streams, strict=True)
        return [Sample(prompt, text + stream.end(), seed, stream.tokens) for prompt, text, seed, stream in made]

    def _steps(self, contexts: list[list[int]], seeds: list[int], room: int, sample: SampleConfig) -> Iterator[list[int]]:
        """The next id of every context, `room` times."""
        positions: int = self.net.shape.positions
        cache = new_cache(self.net, len(contexts), min(len(contexts[0]) + room, positions))
        seen_NT = torch.tensor(contexts, device=self.device)
        new_NT = seen_NT
        for number in range(room):
            if cache.used + new_NT.shape[1] > positions:
                new_NT, cache.used = seen_NT[:, -(positions // 2) :], 0
            ids = next_ids(self._scores(new_NT, cache), seen_NT, seeds=seeds, number=number, end=self.tokenizer.end, sample=sample)
            yield ids
            new_NT = torch.tensor(ids, device=self.device).unsqueeze(1)
            seen_NT = torch.cat([seen_NT, new_NT], 1)

    @torch.inference_mode()
    def _scores(self, ids_NT: Tensor, cache: Any) -> Tensor:
        """Scores of the token after the last; rows of the embedding that the tokenizer has no text for are left out."""
        x_NTE = self.net(ids_NT, None, cache)
        return self.net.logits(x_NTE[:, -1:])[:, 0, : self.tokenizer.vocab]


def open_generator(checkpoint: Checkpoint, engine: TorchEngine) -> Generator:
    """A checkpoint's net, in the engine's arithmetic and on its device, with the tokenizer that stands beside it."""
    tokenizer = open_tokenizer(checkpoint.folder)
    device = open_device(engine.device)
    net = open_net(checkpoint.folder, device)
    if tokenizer.vocab > net.shape.vocab:
        raise TextmillError(
            f"{checkpoint.folder}: its tokenizer has {tokenizer.vocab:,} pieces, its embedding {net.shape.vocab:,} vectors; "
            f"put the tokenizer that the model was trained with beside it"
        )
    return Generator(cast(Net, cast(nn.Module, net).to(precision_of(engine.precision, device))), tokenizer)
