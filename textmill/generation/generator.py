"""Generates text with a checkpoint in memory: one text as a stream, or many in a batch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import torch

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig, SampleConfig
from textmill.devices import open_device, torch_dtype
from textmill.errors import TextmillError, warn
from textmill.generation.batch import Event, PrefixCache, RunningBatch
from textmill.generation.beams import beam_search
from textmill.generation.constraints import TokenTable, sample_grammar
from textmill.generation.incremental_text import TextDecoder, text_decoder_factory
from textmill.generation.prompts import check_unicode
from textmill.generation.requests import Done, FinishReason, MemoryShort, Request, max_new_tokens, repeat_request
from textmill.generation.sampling import CapturedSampling
from textmill.models import check_next_token
from textmill.models.base_torch import BaseNet
from textmill.models.decode_torch import CapturedSlots, NetSlots, bytes_per_slot, open_slots
from textmill.models.nets_torch import open_net
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer


@dataclass(frozen=True)
class GeneratedText:
    """One continuation, its prompt and seed."""

    prompt: str
    text: str
    seed: int
    tokens: int
    """New tokens, without the end-of-text token."""
    finish_reason: FinishReason
    """stop: an end-of-text token or a stop string; length: the limit of new tokens or the context is full."""


class Generator:
    """A net and its tokenizer. A text depends on the prompt, the settings and the seed only."""

    def __init__(self, net: BaseNet, tokenizer: TextTokenizer) -> None:
        self.net = net
        self.tokenizer = tokenizer
        self.device = next(parameter.device for _, parameter in net.named_parameters())
        self.positions: int = net.shape.positions
        self._new_decoder: Callable[[Sequence[int]], TextDecoder] | None = None
        self._tokens = TokenTable(tokenizer)
        self.prefixes: PrefixCache | None = None
        self._spare_slots: NetSlots | None = None
        self._beam_request: Request | None = None
        self._beam_texts: list[Done] = []
        """What the last beam search found, for `_beam_request`."""
        self._warned = False

    def stream(self, prompt: str, sample: SampleConfig, number: int = 0) -> Iterator[str]:
        """Yield continuation `number` of a prompt in chunks of complete characters, as it is generated."""
        request = repeat_request(self.new_request(prompt, sample), number + 1, sample.seed)[number]
        self.max_new_tokens(request)  # raises at once if it cannot be done
        return (event.text for _, event in self.run([request], 1) if event.text)

    def sample(self, prompt: str, sample: SampleConfig) -> GeneratedText:
        """Return one continuation; its text is the same as `stream` yields."""
        return self.samples([prompt], sample)[0]

    def texts(self, prompts: list[str], sample: SampleConfig) -> list[str]:
        """Continue each prompt. The first has the seed of the settings, the next that plus one, and so on."""
        return [result.text for result in self.samples(prompts, sample)]

    def samples(self, prompts: list[str], sample: SampleConfig, count: int = 1) -> list[GeneratedText]:
        """Continue each prompt `count` times; up to `sample.batch` texts are decoded at a time. The seeds count up."""
        requests = [self.new_request(prompt, sample) for prompt in prompts]
        return self.complete(prompts, requests, sample, count)

    def complete(
        self, prompts: list[str], requests: list[Request], sample: SampleConfig, count: int = 1
    ) -> list[GeneratedText]:
        """Complete each request `count` times; `prompts` become the prompts of the samples."""
        repeated: list[Request] = []
        for place, request in enumerate(requests):
            repeated += repeat_request(request, count, sample.seed + place * count)
        texts = [""] * len(repeated)
        ends = dict[int, Done]()
        for index, event in self.run(repeated, sample.batch):
            texts[index] += event.text
            if isinstance(event, Done):
                ends[index] = event
        return [
            GeneratedText(
                prompts[index // count], text, repeated[index].sample.seed, ends[index].tokens, ends[index].reason
            )
            for index, text in enumerate(texts)
        ]

    def run(self, requests: list[Request], slots: int) -> Iterator[tuple[int, Event]]:
        """Run requests, up to `slots` at a time; yield each event with the request's index. An error ends all."""
        indexed = [(index, request, self.max_new_tokens(request)) for index, request in enumerate(requests)]
        sampled = [one for one in indexed if one[1].sample.beams == 1]
        for index, request, max_new in indexed:
            if request.sample.beams > 1:
                yield index, self._find_beam(request, max_new)
        if sampled:
            yield from self._run_batch(sampled, slots)

    def _run_batch(self, requests: list[tuple[int, Request, int]], slots: int) -> Iterator[tuple[int, Event]]:
        """`run` without beam search; each request comes with its index and its number of new tokens."""
        longest = max(len(request.ids) + max_new for _, request, max_new in requests)
        batch = self.new_batch(min(slots, len(requests)), min(longest, self.positions))
        waiting = deque(requests)
        try:
            while waiting or not batch.is_empty:
                while waiting and batch.free:
                    index, request, _ = waiting.popleft()
                    batch.add(index, request)
                for index, event in batch.step():
                    if isinstance(event, Done) and event.reason == "error":
                        raise TextmillError(event.message)
                    yield index, event
        finally:
            # On a GPU the slots are reused: capturing their CUDA graphs takes longer than many a text.
            self._spare_slots = batch.slots if self.device.type == "cuda" else None

    def _find_beam(self, request: Request, max_new: int) -> Done:
        """Return the text that `beam_rank` names; texts of the same prompt come from one search."""
        best = repeat_request(request, 1, 0)[0]
        if best != self._beam_request:
            self._beam_texts = beam_search(self, best, max_new)
            self._beam_request = best
        if request.beam_rank >= len(self._beam_texts):
            raise TextmillError(
                f"sample.count: sample.beams={request.sample.beams} found {len(self._beam_texts)} different texts; "
                "lower sample.count, or raise sample.beams"
            )
        return self._beam_texts[request.beam_rank]

    def new_request(self, prompt: str, sample: SampleConfig) -> Request:
        """Return the request that continues a prompt with these settings and their stop strings."""
        return Request(tuple(self.encode_prompt(prompt)), sample, tuple(sample.stop), grammar=sample_grammar(sample))

    def check_prompt(self, prompt: str, sample: SampleConfig, place: str) -> None:
        """Raise if a prompt cannot be continued; the error names its place."""
        request = Request(tuple(self.encode_prompt(prompt, place)), sample)
        max_new_tokens(request, self.positions, self.tokenizer.vocab, place)

    def encode_prompt(self, prompt: str, place: str = "sample.prompt") -> list[int]:
        """Return the prompt's token ids; for an empty prompt, the end-of-text token."""
        return self.tokenizer.encode(check_unicode(prompt, place)) or [self.tokenizer.eos_id]

    def max_new_tokens(self, request: Request) -> int:
        """Return how many new tokens the request allows and the context has space for; warn once if it is too short."""
        max_new = max_new_tokens(request, self.positions, self.tokenizer.vocab)
        requested = request.sample.max_tokens
        if max_new < requested and not self._warned:
            self._warned = True
            warn(
                f"after a prompt of {len(request.ids):,} tokens the context has space for {max_new:,} new ones, "
                f"fewer than sample.max_tokens={requested}"
            )
        return max_new

    def keep_texts(self, slots: int) -> None:
        """From here on, compute only what a prompt does not have in common with earlier texts (prefix cache).

        They may have as many tokens as a quarter of these slots, or one slot. A net with a cache of its own keeps none.
        """
        if self.net.has_attention_cache:
            self.prefixes = PrefixCache(max(slots // 4, 1) * self.positions)

    def new_batch(self, slots: int, length: int | None = None) -> RunningBatch:
        """Return an empty batch for `slots` texts of `length` tokens; the default is the model's context length."""
        self._new_decoder = self._new_decoder or text_decoder_factory(self.tokenizer)
        spare = self._spare_slots
        self._spare_slots = None
        length = length or self.positions
        if spare is None or spare.slots < slots or spare.length < length:
            spare = None  # frees its memory for the new slots
            spare = self.new_slots(slots, length)
        on_gpu = self.device.type == "cuda"
        batch = RunningBatch(
            spare,
            self.tokenizer,
            self.positions,
            self._new_decoder,
            self._tokens,
            slots,
            self.prefixes,
            run_ahead=on_gpu,
        )
        if isinstance(spare, CapturedSlots) and spare.captured:
            if spare.sampling is None:  # it must not keep the slots, and their memory, alive
                spare.sampling = CapturedSampling(WeakMethod(spare.capture), spare.slots)
            batch.captured_sampling = spare.sampling
        return batch

    def new_slots(self, slots: int, length: int) -> NetSlots:
        """Allocate the KV cache; raise if the device has too little memory."""
        each = bytes_per_slot(self.net, length)
        free = _free_memory(self.device)
        kept = 0 if self.prefixes is None else self.prefixes.limit // self.positions
        if (slots + kept + 1) * each > free:  # there is one slot more than texts
            fitting = max(free // each - kept - 1, 0)
            raise MemoryShort(
                f"the KV cache of {slots} texts needs {slots * each / 2**30:.1f} GiB, but "
                f"{free / 2**30:.1f} GiB are free; set sample.batch or serve.slots to {fitting} or less"
            )
        return open_slots(self.net, slots, length)


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            kilobytes = dict(line.split()[:2] for line in lines)["MemAvailable:"]
            return int(kilobytes) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(checkpoint: Checkpoint, device: torch.device) -> None:
    """Raise if the weights of a checkpoint do not fit into the device's free memory."""
    size = sum(file.stat().st_size for file in checkpoint.folder.glob("*.safetensors") if file.stem != "optimizer")
    free = _free_memory(device)
    if size > free:
        raise MemoryShort(
            f"{checkpoint.folder}: the weights need {size / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free"
        )


def open_generator(checkpoint: Checkpoint, engine: EngineConfig) -> Generator:
    """Load a checkpoint's net and tokenizer; an adapter is merged into its base."""
    tokenizer = open_tokenizer(checkpoint.tokenizer)
    device = open_device(engine.device)
    net = open_net(checkpoint.folder, device)
    check_next_token(net.shape, checkpoint.folder, "generate text")
    if tokenizer.vocab > net.shape.vocab:
        raise TextmillError(
            f"{checkpoint.folder}: the tokenizer has {tokenizer.vocab:,} tokens, but the embedding has only "
            f"{net.shape.vocab:,} rows; put the tokenizer that the model was trained with into this folder"
        )
    return Generator(net.to(torch_dtype(engine.precision, device)), tokenizer)
