"""Generator: a checkpoint in memory that continues texts, piece by piece or many at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig, SampleConfig
from textmill.devices import open_device, torch_dtype
from textmill.errors import TextmillError, warn
from textmill.generation.batch import Batch, Event
from textmill.generation.beams import beam_search
from textmill.generation.incremental_text import TextDecoder, text_decoder_factory
from textmill.generation.requests import Done, Request, max_new_tokens
from textmill.models.base_torch import BaseNet
from textmill.models.decode_torch import Slots, bytes_per_slot, open_slots
from textmill.models.nets_torch import open_net
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer


@dataclass(frozen=True)
class Sample:
    """One continuation and what it came from."""

    prompt: str
    text: str
    seed: int
    tokens: int
    """New tokens, the end-of-text token not counted."""


class Generator:
    """A net and its tokenizer; a text is a function of the prompt, the settings and the seed."""

    def __init__(self, net: BaseNet, tokenizer: TextTokenizer) -> None:
        self.net, self.tokenizer = net, tokenizer
        self.device = next(parameter.device for _, parameter in net.named_parameters())
        self.positions: int = net.shape.positions
        self._streams: Callable[[Sequence[int]], TextDecoder] | None = None
        self._kept: Slots | None = None
        self._cut_said = False

    def stream(self, prompt: str, sample: SampleConfig) -> Iterator[str]:
        """The continuation as it comes, never splitting a character; its pieces joined are the whole text."""
        request = self.request_of(prompt, sample)
        self.max_new_tokens(request)
        return self._pieces(request)

    def sample(self, prompt: str, sample: SampleConfig) -> Sample:
        """One whole continuation, the same text as `stream` gives."""
        return self.samples([prompt], sample)[0]

    def texts(self, prompts: list[str], sample: SampleConfig) -> list[str]:
        """A continuation of each prompt; the first has the seed of the settings, the next one more, and so on."""
        return [one.text for one in self.samples(prompts, sample)]

    def samples(self, prompts: list[str], sample: SampleConfig) -> list[Sample]:
        """What `texts` gives, with seeds and counts; `sample.batch` of them go through the net at a time."""
        settings = [sample.model_copy(update={"seed": sample.seed + place}) for place in range(len(prompts))]
        return self.complete(
            prompts, [self.request_of(prompt, one) for prompt, one in zip(prompts, settings, strict=True)], sample.batch
        )

    def complete(self, prompts: list[str], requests: list[Request], together: int) -> list[Sample]:
        """What becomes of requests, each under the name of its prompt."""
        texts, counts = [""] * len(requests), [0] * len(requests)
        for place, event in self.run(requests, together):
            texts[place] += event.text
            if isinstance(event, Done):
                counts[place] = event.tokens
        seeds = [request.sample.seed for request in requests]
        return [Sample(*found) for found in zip(prompts, texts, seeds, counts, strict=True)]

    def run(self, requests: list[Request], together: int) -> Iterator[tuple[int, Event]]:
        """What becomes of requests, each by its place in the list, so many of them in slots at a time; a failure ends all."""
        rooms = [self.max_new_tokens(request) for request in requests]
        waiting = iter(range(len(requests)))
        length = max(
            (min(len(request.ids) + room, self.positions) for request, room in zip(requests, rooms, strict=True)),
            default=0,
        )
        batch: Batch | None = None
        try:
            while True:
                while (batch is None or batch.free) and (place := next(waiting, None)) is not None:
                    if requests[place].sample.beams > 1:
                        yield place, beam_search(self, requests[place], rooms[place])
                        continue
                    batch = batch or self.new_batch(min(together, len(requests)), length)
                    batch.add(place, requests[place], rooms[place])
                if batch is None or not (batch.rows or batch.waiting):
                    return
                for place, event in batch.step():
                    if isinstance(event, Done) and event.reason == "error":
                        raise TextmillError(event.message)
                    yield place, event
        finally:
            # On a GPU the captured steps are worth keeping: they take longer to make than many a text.
            self._kept = batch.slots if batch and self.device.type == "cuda" else None

    def request_of(self, prompt: str, sample: SampleConfig) -> Request:
        """A prompt with its settings, as the net takes it."""
        return Request(tuple(self.context_of(prompt)), sample, tuple(sample.stop))

    def context_of(self, prompt: str) -> list[int]:
        """What the net sees first: the prompt's ids, or the end-of-text token where there are none."""
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise TextmillError("sample.prompt: holds half of a character pair; give it as UTF-8 text") from None
        return self.tokenizer.encode(prompt) or [self.tokenizer.end]

    def max_new_tokens(self, request: Request, quiet: bool = False) -> int:
        """New tokens that are asked and fit after the prompt; what cannot be done is refused."""
        room, asked = max_new_tokens(request, self.positions, self.tokenizer.vocab), request.sample.max_tokens
        if room < asked and not self._cut_said and not quiet:
            self._cut_said = True
            warn(
                f"a context of {len(request.ids):,} tokens leaves room for {room:,} new ones, less than sample.max_tokens={asked}"
            )
        return room

    def new_batch(self, slots: int, length: int | None = None) -> Batch:
        """Slots for texts of so many tokens, the model's longest if not said, and nobody in them yet."""
        self._streams = self._streams or text_decoder_factory(self.tokenizer)
        kept, self._kept, length = self._kept, None, length or self.positions
        if kept is None or kept.slots < slots or kept.length < length:
            kept = None  # its memory is free for the new ones
            kept = self.new_slots(slots, length)
        return Batch(kept, self.tokenizer, self.positions, self._streams, slots, ahead=self.device.type == "cuda")

    def new_slots(self, slots: int, length: int) -> Slots:
        """Memory for keys and values; more than the device has is refused."""
        each, free = bytes_per_slot(self.net, length), _free_memory(self.device)
        if (slots + 1) * each > free:  # one slot is nobody's
            raise TextmillError(
                f"{slots} texts at a time take {slots * each / 2**30:.1f} GiB for keys and values; {free / 2**30:.1f} GiB can be had; "
                f"take {max(free // each - 1, 0)} at most (sample.batch, serve.slots)"
            )
        return open_slots(self.net, slots, length)

    def _pieces(self, request: Request) -> Iterator[str]:
        for _, event in self.run([request], 1):
            if event.text:
                yield event.text


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def open_generator(checkpoint: Checkpoint, engine: EngineConfig, *, apart: bool = False) -> Generator:
    """A checkpoint's net, in the engine's arithmetic and on its device, with its tokenizer; an adapter `apart` stands beside its base."""
    tokenizer = open_tokenizer(checkpoint.tokenizer)
    device = open_device(engine.device)
    net = open_net(checkpoint.folder, device, separate=apart)
    if tokenizer.vocab > net.shape.vocab:
        raise TextmillError(
            f"{checkpoint.folder}: its tokenizer has {tokenizer.vocab:,} pieces, its embedding {net.shape.vocab:,} vectors; "
            f"put the tokenizer that the model was trained with beside it"
        )
    return Generator(net.to(torch_dtype(engine.precision, device)), tokenizer)
